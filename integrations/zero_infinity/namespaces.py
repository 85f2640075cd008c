"""DeepSpeed's modules by their old places: ``deepspeed.runtime``, ``deepspeed.utils``, others."""

from __future__ import annotations

import enum
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

from tiermem import ConfigError, budgets_for

from . import (
    accelerator,
    checkpointing,
    comm,
    optimizers,
    refused,
    schedules,
    unpickling,
    utils,
    zero,
    zero_to_fp32,
)
from .engine import DeepSpeedEngine
from .mapping import DeepSpeedConfig
from .onecycle import OneCycle
from .setup import set_z3_leaf_modules


class OffloadDeviceEnum(str, enum.Enum):
    """Where something is offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """What ``engine.offload_states`` may name."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class ZeroParamStatus(enum.Enum):
    """What ``param.ds_status`` may be; parameters here have none."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's of DeepSpeed's own; none is."""
    return False


def _mem_needs(model: Any, *_: Any, **__: Any) -> None:
    """Logs how much of each budget training a model with AdamW takes."""
    found = budgets_for(
        model, torch.optim.AdamW, device=accelerator.get_accelerator().device_name(), policy="dram"
    )
    utils.logger.info("%s", found)


class _Groups(ModuleType):
    """``deepspeed.utils.groups``: every group is of this one process."""

    def __getattr__(self, name: str) -> Any:
        answers = {"_world_size": 1, "_rank": 0, "_group": None}
        for end, answer in answers.items():
            if name.endswith(end) and "get_" in name:
                return lambda *_: answer
        raise AttributeError(f"deepspeed.utils.groups has no {name!r} in zero_infinity")


def _cloned(item: Any, device: Any = "cpu") -> Any:
    """Returns tensors in lists and mappings as copies of their own memory."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        return type(item)((key, _cloned(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    return type(item)(_cloned(v, device) for v in item) if isinstance(item, list | tuple) else item


_KEYS = (
    "base_optimizer_state", "buffer_names", "ds_version", "fp32_flat_groups",
    "frozen_param_fragments", "frozen_param_shapes", "group_paddings", "loss_scaler",
    "optimizer_state_dict", "param_groups", "param_shapes", "param_slice_mappings",
    "partition_count", "single_partition_of_fp32_groups", "universal_checkpoint_info", "zero_stage",
)  # fmt: skip
_SCALERS = {
    cls.__name__: cls for cls in unpickling.ALLOWED if getattr(cls, "__module__", "").endswith(
        "loss_scaler")
}  # fmt: skip
_SCHEDULES = {
    **{name: value for name, value in vars(schedules).items() if name[0].isupper()},
    "OneCycle": OneCycle,
    "VALID_LR_SCHEDULES": [
        "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
    ],
}  # fmt: skip
_ADAM = {"DeepSpeedCPUAdam": optimizers.DeepSpeedCPUAdam, "FusedAdam": optimizers.FusedAdam}
_LION = {"DeepSpeedCPULion": optimizers.FusedLion, "FusedLion": optimizers.FusedLion}
_OFFLOAD = {
    "OffloadDeviceEnum": OffloadDeviceEnum, "OffloadStateTypeEnum": OffloadStateTypeEnum,
}  # fmt: skip
_TYPES = ("adagrad", "adam", "adamw", "lamb", "lion", "onebitadam", "onebitlamb", "zerooneadam")
_CONFIG = {
    "DeepSpeedConfig": DeepSpeedConfig,
    "DeepSpeedConfigError": ConfigError,
    "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
    "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
    "ZERO_ONE_ADAM_OPTIMIZER": "zerooneadam",
    "DEEPSPEED_OPTIMIZERS": list(_TYPES),
    **{f"{name.upper()}_OPTIMIZER": name for name in _TYPES[:5]},
}
_UTILS = {
    **{name: value for name, value in vars(utils).items() if callable(value) and name[0] != "_"},
    "logger": utils.logger,
    "set_z3_leaf_modules": set_z3_leaf_modules,
}
_ZERO = {name: value for name, value in vars(zero).items() if name[0] != "_"}

PROVIDED: dict[str, Mapping[str, Any] | ModuleType] = {
    "accelerator": accelerator,
    "accelerator.real_accelerator": accelerator,
    "checkpoint.constants": {key.upper(): key for key in _KEYS},
    "checkpoint.utils": {"clone_tensors_for_torch_save": _cloned},
    "checkpointing": checkpointing,
    "comm": comm,
    "comm.comm": comm,
    "constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500},
    "git_version_info": {"version": "0.19.6"},
    "moe.utils": {"is_moe_param": _is_moe_param, "has_moe_layers": lambda _: (False, 0)},
    "ops": {"FusedAdam": optimizers.FusedAdam},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": torch.optim.Adagrad},
    "ops.adam": _ADAM,
    "ops.adam.cpu_adam": _ADAM,
    "ops.adam.fused_adam": _ADAM,
    "ops.lamb": {"FusedLamb": optimizers.FusedLamb},
    "ops.lion": _LION,
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": checkpointing,
    "runtime.config": _CONFIG,
    "runtime.dataloader": {"RepeatingLoader": utils.RepeatingLoader},
    "runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine, **_CONFIG},
    "runtime.fp16.loss_scaler": _SCALERS,
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.utils": {
        **_UTILS, "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    },
    "runtime.zero": zero,
    "runtime.zero.config": {"ZeroStageEnum": ZeroStageEnum, **_OFFLOAD},
    "runtime.zero.offload_config": _OFFLOAD,
    "runtime.zero.partition_parameters": {**_ZERO, "ZeroParamStatus": ZeroParamStatus},
    "runtime.zero.stage3": {
        "estimate_zero3_model_states_mem_needs_all_live": _mem_needs,
    },
    "runtime.zero.stage_1_and_2": {
        "estimate_zero2_model_states_mem_needs_all_live": _mem_needs,
    },
    "utils": _UTILS,
    "utils.groups": _Groups("deepspeed.utils.groups"),
    "utils.logging": _UTILS,
    "utils.tensor_fragment": _UTILS,
    "utils.zero_to_fp32": zero_to_fp32,
    "version": {"version": "0.19.6"},
    "zero": zero,
}  # fmt: skip
"""The names that exist here, by the module below ``deepspeed``."""


class _Namespace(ModuleType):
    """A module of DeepSpeed's; names that it does not have here are refused."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self.__name__} has no {name!r} in zero_infinity: it has what training loops call "
            f"of DeepSpeed ({', '.join(sorted(n for n in vars(self) if n[0] != '_')) or 'nothing'})"
        )


def build() -> dict[str, ModuleType]:
    """Returns every module below ``deepspeed``, by its path, each an attribute of the one above."""
    found: dict[str, ModuleType] = {}
    for path in sorted({key.strip() for key in refused.REFUSED} | set(PROVIDED)):
        parts = path.split(".") if path else []
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            if part in found:
                continue
            own = PROVIDED.get(part, {})
            if isinstance(own, ModuleType):
                module = own
            else:
                module = _Namespace(f"deepspeed.{part}")
                module.__dict__["__path__"] = []
                module.__dict__.update({**refused.stand_ins(part), **own})
            found[part] = module
            if length > 1:
                setattr(found[".".join(parts[: length - 1])], parts[length - 1], module)
    return found


class _Finder:
    """Refuses imports of modules below ``deepspeed`` that do not exist here."""

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raises ImportError for a module below ``deepspeed``; None for any other."""
        if not name.startswith("deepspeed.") or sys.modules.get("deepspeed") is not self._package:
            return None
        raise ModuleNotFoundError(
            f"{name} is not there in tiermem.integrations.zero_infinity, which is installed as "
            "deepspeed: it has what training loops use of DeepSpeed, on one GPU",
            name=name,
        )


def install(package: ModuleType, modules: Mapping[str, ModuleType]) -> None:
    """Makes ``import deepspeed``, and imports from inside it, find a package, in this process.

    Args:
        package: What is found.
        modules: Below it.

    Raises:
        ConfigError: If DeepSpeed itself was imported before.
    """
    there = sys.modules.get("deepspeed")
    if there is not None and there is not package:
        raise ConfigError("install(): deepspeed was imported already; install first")
    sys.modules["deepspeed"] = package
    sys.modules.update({f"deepspeed.{path}": module for path, module in modules.items()})
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package))
