"""What a configuration becomes: batch numbers, and the settings of the tiers and the optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tiermem import ConfigError

from . import autofill, notation, reading
from .reading import SHORT, Config, Setting
from .schema import OPTIONS
from .zerooptions import PARAM, STATE, ZERO

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HOMES = {"none": "hbm", "cpu": "dram", "nvme": "nvme"}

KEYWORDS = {
    "device", "hbm", "dram", "nvme_bytes", "prefetch_depth", "overlap", "where",
    "activation_min", "activation_layers",
}  # fmt: skip
"""What the ``tiermem`` section and ``initialize(tiermem=)`` may set."""


@dataclass
class Plan:
    """What a configuration becomes.

    Attributes:
        config: What was read, "auto" filled.
        micro: Samples per backward.
        accumulation: Backwards per step.
        batch: Samples per step.
        dtype: The dtype of the weights, or None to leave them as they are.
        manager: Settings of ``TierManager``.
        optimizer: Settings of ``tier.optimizer``, without the class's own.
        refused: Why it cannot be used here: folders that are missing, batch numbers for several
            processes; or "".
    """

    config: Config
    micro: int = 1
    accumulation: int = 1
    batch: int = 1
    dtype: torch.dtype | None = None
    manager: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.config[f"{ZERO}.stage"])

    @property
    def device(self) -> str:
        """Where the model computes."""
        return str(self.manager["device"])


def plan(config: Config, more: Mapping[str, Any] | None = None) -> Plan:
    """Maps a configuration whose "auto" is filled; budgets that depend on a model are left out.

    Args:
        config: As read.
        more: Settings that override the ``tiermem`` section of the file.

    Raises:
        ConfigError: If options contradict one another, naming file, key and value.
    """
    reading.check(config)
    found = Plan(config)
    _batches(found)
    found.refused = found.refused or str(reading.missing(config) or "")
    half = "fp16" if config["fp16.enabled"] else "bf16" if config["bf16.enabled"] else None
    found.dtype = None if half is None else DTYPES[half]
    own = _own(config, more)
    _manager(found, own)
    _optimizer(found, own)
    return found


class DeepSpeedConfig:
    """A configuration's values by the names of its options: ``train_batch_size`` and others.

    Args:
        config: A path, a dict, or text in base64.
        mpu: Must be None.
        mesh_device: Must be None.

    Raises:
        ConfigError: If it is wrong.
    """

    def __init__(self, config: notation.Source, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("DeepSpeedConfig(mpu=, mesh_device=): there is one process")
        read = reading.read(config)
        autofill.fill(read, autofill.Caller())
        self._plan = plan(read)

    def __getattr__(self, name: str) -> Any:
        """Returns the value of the option of this name, of the whole file or of a section."""
        config = self.__dict__["_plan"].config
        for path in (name, name.replace("zero_", f"{ZERO}.", 1), name.replace("_", ".", 1)):
            if path in OPTIONS:
                return config[path]
        raise AttributeError(f"the configuration has no option {name!r}")


def _batches(found: Plan) -> None:
    """Infers the batch numbers that are left out of the three, for one process."""
    config = found.config
    keys = (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    )  # fmt: skip
    batch, micro, steps = (config[key] for key in keys)
    given = {key: config[key] for key in keys if config[key] is not None}
    if batch is None:
        micro, steps = micro or 1, steps or 1
        batch = micro * steps
    elif micro is None:
        steps = steps or 1
        micro = batch // steps
    elif steps is None:
        steps = batch // micro
    if micro * steps != batch or not micro or not steps:
        said = ", ".join(f"{key}={value}" for key, value in given.items())
        found.refused = (
            f"{config.name}: {said}: train_batch_size is train_micro_batch_size_per_gpu × "
            "gradient_accumulation_steps × processes, and there is one process; leave one of "
            "them out"
        )
        if not micro or not steps or batch % (micro * steps):
            raise ConfigError(found.refused)
    found.batch, found.micro, found.accumulation = batch, micro, steps
    for key, value in zip(keys, (batch, micro, steps), strict=True):
        if key not in given:
            config.settings[key] = Setting(value, "inferred")


def _own(config: Config, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings of tiermem's own section and of the call."""
    found = {
        path.removeprefix("tiermem."): setting.value
        for path, setting in config.settings.items()
        if path.startswith("tiermem.") and setting.value is not None
    }
    found |= {key: value for key, value in (more or {}).items() if value is not None}
    unknown = sorted(found.keys() - KEYWORDS)
    if unknown:
        raise ConfigError(f"tiermem={{{unknown[0]!r}: ...}}: it has {', '.join(sorted(KEYWORDS))}")
    return found


def _manager(found: Plan, own: dict[str, Any]) -> None:
    config = found.config
    params, state = (_HOMES[config[f"{section}.device"]] for section in (PARAM, STATE))
    saved = "dram" if config["activation_checkpointing.cpu_checkpointing"] else "auto"
    folders = [
        os.path.expanduser(config[f"{section}.nvme_path"])
        for section in (PARAM, STATE)
        if config[f"{section}.device"] == "nvme"
    ]
    found.manager = {
        "device": own.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"),
        "policy": {
            "params": params,
            "grads": "hbm" if state == "hbm" else "dram",
            "master": state,
            "optimizer": state,
            "activations": saved,
        },
    }
    if folders:
        found.manager["nvme"] = list(dict.fromkeys(folders))
    if config[f"{ZERO}.stage3_prefetch_bucket_size"] == 0:
        found.manager["prefetch_depth"] = 0
    for key in KEYWORDS - {"device", "overlap", "where"}:
        if key in own:
            found.manager[key] = own[key]


def _optimizer(found: Plan, own: dict[str, Any]) -> None:
    config = found.config
    if config["torch_autocast.enabled"] and (
        dtype_of(config, "torch_autocast.dtype") is torch.float16
    ):
        raise config.error(
            "torch_autocast.dtype", "the loss would want a scale; write fp16: {enabled: true}"
        )
    halved = found.dtype is not None and not config["bf16.bf16_master_weights_and_grads"]
    kept = config["data_types.grad_accum_dtype"]
    gradients = None if kept is None else DTYPES[SHORT[kept]]
    found.optimizer = {
        "master_dtype": torch.float32 if halved else None,
        "grad_dtype": gradients,
        "overlap": own.get("overlap", "auto"),
        "where": own.get("where", "auto"),
    }
    ratio = f"{STATE}.ratio"
    if "where" not in own and config.given(ratio) and config[f"{STATE}.device"] != "none":
        share = config[ratio]
        where = "host" if share == 1 else "both" if share else "device"
        found.optimizer["where"] = where
        if where == "both":
            found.optimizer["host_share"] = share
    looks = config["gradient_clipping"] > 0 or needs_norm(config)
    if found.optimizer["overlap"] == "backward" and looks:
        raise ConfigError(
            f"{config.name}: tiermem.overlap='backward' steps inside backward, and gradient_"
            f"clipping={config['gradient_clipping']!r} (or the check of overflows) needs every "
            "gradient first: write gradient_clipping: 0 and bf16.check_grad_overflow: false"
        )


def dtype_of(config: Config, path: str) -> torch.dtype:
    """Returns the dtype that an option names.

    Raises:
        ConfigError: If it is none.
    """
    name = str(config[path]).removeprefix("torch.")
    if name not in SHORT:
        raise config.error(path, f"it is one of {', '.join(SHORT)}")
    return DTYPES[SHORT[name]]


def needs_norm(config: Config) -> bool:
    """Whether a step looks for infinite gradients."""
    if config["fp16.enabled"]:
        return True
    checked: bool = config["bf16.check_grad_overflow"]
    return bool(config["bf16.enabled"]) and checked
