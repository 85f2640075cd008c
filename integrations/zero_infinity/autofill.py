"""What "auto" becomes: the caller's value from elsewhere, or else the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiermem import ConfigError

from .reading import AUTO, Config, Setting, converted
from .schema import OPTIONS

_NAMES: dict[str, Sequence[str]] = {
    "train_micro_batch_size_per_gpu": (
        "train_micro_batch_size_per_gpu", "per_device_train_batch_size", "micro_batch_size",
    ),
    "train_batch_size": ("train_batch_size", "global_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm", "gradient_clipping", "clip_grad"),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
    "optimizer.params.lr": ("learning_rate", "lr"),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.eps": ("adam_epsilon", "eps"),
    "optimizer.params.betas": ("betas",),
    "scheduler.params.warmup_num_steps": (
        "warmup_steps", "num_warmup_steps", "warmup_num_steps", "lr_warmup_steps",
    ),
    "scheduler.params.total_num_steps": (
        "total_num_steps", "max_steps", "max_train_steps", "num_training_steps", "train_iters",
    ),
    "scheduler.params.warmup_max_lr": ("learning_rate", "lr"),
}  # fmt: skip
"""Names that callers use for an option in an argument namespace or a dict."""

_POSITIVE = {
    "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps",
    "scheduler.params.total_num_steps",
}  # fmt: skip


class Caller:
    """What is known from the call.

    Args:
        args: A namespace or a dict of the caller's values, or None.
        model: The module, or None.
        optimizer: The caller's, or None.
    """

    def __init__(
        self,
        args: Any = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._values: Mapping[str, Any] = args if isinstance(args, Mapping) else {}
        self._args = args
        self._model = model
        self._optimizer = optimizer

    def value(self, path: str) -> Any:
        """Returns what the caller says of an option, or None."""
        if path == "optimizer.params.betas":
            pair = [self._named("adam_beta1"), self._named("adam_beta2")]
            if None not in pair:
                return pair
        for name in _NAMES.get(path, ()):
            found = self._named(name)
            unset = path in _POSITIVE and isinstance(found, int | float) and found <= 0
            if found is not None and not unset:
                return found
        if path.endswith(".enabled"):
            return self._half(path.removesuffix(".enabled"))
        if path.endswith(".lr") and self._optimizer is not None:
            return float(self._optimizer.param_groups[0]["lr"])
        return None

    def _named(self, name: str) -> Any:
        if isinstance(self._args, Mapping):
            return self._values.get(name)
        return getattr(self._args, name, None)

    def _half(self, section: str) -> bool | None:
        """Returns whether the model's weights are of a section's dtype already."""
        wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(section)
        if self._model is None or wanted is None:
            return None
        found = [p.dtype for p in self._model.parameters() if p.is_floating_point()]
        return bool(found) and all(dtype is wanted for dtype in found)


def fill(config: Config, caller: Caller) -> None:
    """Replaces every "auto" of a configuration by a value, in place.

    Raises:
        ConfigError: If a caller's value has the wrong type.
    """
    for path in config.autos:
        value = caller.value(path)
        if value is None:
            config.settings[path] = Setting(None, "default")
            continue
        kind = OPTIONS[path].kind
        config.settings[path] = Setting(converted(config.name, path, kind, value), AUTO)
    for path, other in (("bf16.enabled", "fp16.enabled"), ("fp16.enabled", "bf16.enabled")):
        found = config.settings.get(path)
        chosen = config.settings.get(other, Setting(None, "default")).source != AUTO
        if found is not None and found.source == AUTO and chosen and config[other]:
            config.settings[path] = Setting(False, AUTO)  # the file has chosen the other one
    for section in ("optimizer.params", "scheduler.params"):
        params = config[section]
        if params is None:
            continue
        filled = {key: _param(config, caller, f"{section}.{key}", v) for key, v in params.items()}
        kept = {key: value for key, value in filled.items() if value is not None}
        config.settings[section] = Setting(kept, config.settings[section].source)


def _param(config: Config, caller: Caller, path: str, value: Any) -> Any:
    """Returns a setting of optimizer or scheduler: filled, and numbers in text as numbers."""
    if value == AUTO:
        value = caller.value(path)
        if value is None and path.endswith("total_num_steps"):
            raise ConfigError(
                f"{config.name}: {path}='auto': nothing says how many steps there are; write the "
                "number, or hand initialize() args that have max_steps"
            )
    if isinstance(value, list):
        return [_param(config, caller, path, item) for item in value]
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and _is_count(path) and value.is_integer():
        return int(value)
    return value


def _is_count(path: str) -> bool:
    return path.endswith(("_steps", "_size", "_count", "freeze_step"))
