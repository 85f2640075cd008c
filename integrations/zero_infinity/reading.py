"""Reads a configuration: one value for every known option."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiermem import ConfigError

from . import kinds, notation, schema
from .schema import OPTIONS, SECTIONS
from .zerooptions import PARAM, STATE, ZERO

AUTO = "auto"


@dataclass(frozen=True)
class Setting:
    """One value and where it is from.

    Attributes:
        value: As Python has it.
        source: ``"file"``, ``"auto"``, ``"default"``, ``"inferred"`` or a deprecated key's name.
    """

    value: Any
    source: str


@dataclass
class Config:
    """A configuration, read.

    Attributes:
        name: The file, for messages.
        settings: By path; those that are not here have their default.
        sections: Parts that are taken as a whole, by key.
        unknown: Unknown keys, and the nearest known one or "".
        raw: As it is written.
    """

    name: str
    settings: dict[str, Setting] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, path: str) -> Any:
        found = self.settings.get(path)
        if found is None or found.value is None:
            return OPTIONS[path].default
        return found.value

    def given(self, path: str) -> bool:
        """Whether the file says something of an option, other than "auto"."""
        found = self.settings.get(path)
        return found is not None and found.value is not None and found.source != "default"

    def error(self, path: str, what: str) -> ConfigError:
        """Returns an error that names file, key and value."""
        value = self.settings.get(path)
        shown = "" if value is None else f"={kinds.shown(value.value)}"
        return ConfigError(f"{self.name}: {path}{shown}: {what}")

    @property
    def autos(self) -> list[str]:
        """Options that say "auto" and have not been filled."""
        return [path for path, setting in self.settings.items() if setting.value == AUTO]


def read(config: notation.Source | Config) -> Config:
    """Reads a configuration; "auto" stays, for :func:`autofill.fill` to fill.

    Unknown keys are warned about with the nearest known one.

    Args:
        config: A path, a mapping, or text in base64.

    Raises:
        ConfigError: If it cannot be read, a value has another type than the option, or two
            spellings of one option disagree. It names file, key and value.
    """
    if isinstance(config, Config):
        return config
    raw, name = notation.load(config)
    found = Config(name, raw=raw)
    for key, value in raw.items():
        _take(found, schema.SECTION_ALIASES.get(key, key), value, key)
    _warn(found)
    return found


def _take(found: Config, path: str, value: Any, written: str) -> None:
    if path in schema.OFFLOAD_FLAGS:
        _flag(found, path, value)
    elif path == ZERO and isinstance(value, bool | int):
        _put(found, f"{ZERO}.stage", int(value), written)
    elif path in SECTIONS and not isinstance(value, dict):
        found.sections[path] = value
    elif path in schema.FULL_SECTIONS and f"{path}.enabled" in OPTIONS and _is_flag(value):
        _put(found, f"{path}.enabled", value, written)
    elif path in schema.FULL_SECTIONS:
        _section(found, path, value)
    elif path in SECTIONS:
        found.sections[path] = value
    else:
        path = schema.ALIASES.get(path, path)
        if path in OPTIONS:
            _put(found, path, value, written)
        elif not written.rpartition(".")[2].startswith(("_", "/", "#")):  # such keys are comments
            if written.startswith("tiermem."):  # a section that DeepSpeed does not read
                raise ConfigError(
                    f"{found.name}: {written!r} is not a known key; it has "
                    + ", ".join(sorted(o[8:] for o in OPTIONS if o.startswith("tiermem.")))
                    + " (folders of files are nvme_path of zero_optimization.offload_param and "
                    "offload_optimizer)"
                )
            found.unknown[written] = nearest(path)


def _section(found: Config, path: str, value: Any) -> None:
    if value is None or value == AUTO:
        return
    if not isinstance(value, dict):
        raise ConfigError(
            f"{found.name}: {path}={kinds.shown(value)}: it is an object, {_typed(value)}"
        )
    for key, item in value.items():
        _take(found, f"{path}.{key}", item, f"{path}.{key}")


def _put(found: Config, path: str, value: Any, written: str) -> None:
    """Takes one value, unless another spelling has given another one."""
    option = OPTIONS[path]
    if value is not None and value != AUTO:
        value = converted(found.name, written, option.kind, value)
    elif value is not None and option.kind is kinds.TEXT and path != "optimizer.type":
        value = None
    source = "file" if written == path or written in schema.ALIASES else written
    old = found.settings.get(path)
    if old is not None and old.value is not None and value is not None and old.value != value:
        raise ConfigError(
            f"{found.name}: {written}={kinds.shown(value)}, and {path} is given as "
            f"{kinds.shown(old.value)} already: "
            "they are one option; keep one"
        )
    if old is None or value is not None:
        found.settings[path] = Setting(value, source)


def converted(name: str, path: str, kind: kinds.Kind, value: Any) -> Any:
    """Returns a value as its kind has it.

    Raises:
        ConfigError: If it is of another type, naming file, key and value.
    """
    if kind is kinds.TEXT and isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return kind.read(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(
            f"{name}: {path}={kinds.shown(value)}: it must be {kind.says}, {_typed(value)}"
        ) from None


def _flag(found: Config, path: str, value: Any) -> None:
    """Sets a section's device by a deprecated switch."""
    if value is None or value == AUTO:
        return
    section = schema.OFFLOAD_FLAGS[path]
    if not converted(found.name, path, kinds.BOOL, value):
        return
    told = found.raw.get(ZERO)
    told = told.get(section.rpartition(".")[2]) if isinstance(told, Mapping) else None
    device = told.get("device") if isinstance(told, Mapping) else None
    if isinstance(device, str) and device.lower() not in (AUTO, "cpu"):
        raise ConfigError(
            f"{found.name}: {path}={value!r} is an old name for {section}.device='cpu', and "
            f"{section}.device={device!r}: keep one"
        )
    _put(found, f"{section}.device", "cpu", path)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (
        isinstance(value, str) and value.lower() in ("true", "false")
    )


def _typed(value: Any) -> str:
    names = {bool: "a truth value", str: "text", dict: "an object", list: "a list"}
    kind = names.get(type(value), f"a {type(value).__name__}")
    return f"and this is {kind}"


def nearest(path: str) -> str:
    """Returns the known key most like an unknown one, or ""."""
    section, _, key = path.lower().rpartition(".")
    known = [*OPTIONS, *SECTIONS, *schema.ALIASES, *schema.OFFLOAD_FLAGS, *schema.FULL_SECTIONS]
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    close = difflib.get_close_matches(key, beside, 1, 0.6)
    if close:
        return beside[close[0]]
    ends = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = difflib.get_close_matches(key, ends, 1, 0.8)
    return ends[close[0]] if close else ""


def _warn(found: Config) -> None:
    for key, near in found.unknown.items():
        hint = f"; did you mean {near!r}?" if near else ""
        warnings.warn(f"{found.name}: {key!r} is not a known key, and is ignored{hint}",
                      stacklevel=4)  # fmt: skip
    for key, value in found.sections.items():
        if SECTIONS[key].changes and _is_on(value):
            warnings.warn(f"{found.name}: {key!r} has no effect: {SECTIONS[key].why}", stacklevel=4)


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) not in (False, "false", "auto")
    return bool(value)


def check(config: Config) -> None:
    """Checks the rules between options; "auto" is filled.

    Raises:
        ConfigError: Naming file, key and value.
    """
    if config["fp16.enabled"] and config["bf16.enabled"]:
        raise config.error("fp16.enabled", "bf16.enabled is true as well; one of them can be")
    if config["fp16.fp16_master_weights_and_grads"]:
        raise config.error(
            "fp16.fp16_master_weights_and_grads",
            "float16 masters lose small updates; leave it out for float32 masters",
        )
    alone = "bf16.bf16_master_weights_and_grads"
    states = "bf16.bf16_optimizer_states"
    if config[alone] != config[states]:
        missing, there = (states, alone) if config[alone] else (alone, states)
        raise config.error(there, f"{missing} is false: state has the dtype of what is stepped")
    if config["fp16.enabled"] and not config["fp16.loss_scale"]:
        for key in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
            if not config[key] > 0:
                raise config.error(key, "it must be more than 0 where the loss scale is dynamic")
    _check_dtypes(config)
    _check_paths(config)


def _check_dtypes(config: Config) -> None:
    wanted = config["data_types.param_dtype"]
    half = "fp16" if config["fp16.enabled"] else "bf16" if config["bf16.enabled"] else "fp32"
    if wanted is not None and SHORT[wanted] != half:
        raise config.error(
            "data_types.param_dtype", f"fp16 and bf16 say that weights are {half}; leave it out"
        )


def _check_paths(config: Config) -> None:
    ratio = f"{STATE}.ratio"
    if config.given(ratio) and config[ratio] < 1 and config[f"{STATE}.device"] == "none":
        raise config.error(ratio, f"{STATE}.device is 'none'; write 'cpu' or 'nvme'")
    for section in (PARAM, STATE):
        if config[f"{section}.device"] == "nvme" and config[f"{section}.nvme_path"] is None:
            raise config.error(f"{section}.device", f"{section}.nvme_path is missing")


def missing(config: Config) -> ConfigError | None:
    """Returns why a correct configuration cannot be used on this machine, or None."""
    if config["amp.enabled"]:
        return config.error(
            "amp.enabled", "it needs NVIDIA Apex; write torch_autocast: {enabled: true} instead"
        )
    for section in (PARAM, STATE):
        path = f"{section}.nvme_path"
        if config[f"{section}.device"] != "nvme":
            continue
        folder = Path(config[path]).expanduser()
        if not folder.is_dir():
            return config.error(path, "there is no such folder; make it first")
        if not os.access(folder, os.W_OK):
            return config.error(path, "nothing can be written there")
    return None


SHORT = {
    "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
"""Names of dtypes, and the short one."""
