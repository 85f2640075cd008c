"""How torch's optimizers step: the kernels they choose, the numbers they derive, their state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, Literal

import numpy as np
import torch

Flavour = Literal["fused", "foreach"]
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_f32 = np.float32


def flavour_of(settings: Mapping[str, Any], device: torch.device) -> Flavour | None:
    """Returns which kernels torch chooses for a parameter group; None for single operations.

    It chooses by default only if neither ``foreach`` nor ``fused`` is set.

    Args:
        settings: Settings of the group.
        device: Device of its parameters.
    """
    if settings.get("fused"):
        return "fused"
    foreach = settings.get("foreach")
    if foreach or (foreach is None and settings.get("fused") is None and device.type == "cuda"):
        return "foreach"
    return None


def foreach_numbers(
    settings: Mapping[str, Any], step: float, *, decoupled: bool
) -> tuple[bool, list[float]]:
    """Returns the numbers that torch's Python derives from settings, in double precision.

    Args:
        settings: ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay``.
        step: Number of the step, from 1 on.
        decoupled: Whether the decay is decoupled from the gradients.

    Returns:
        Whether there is a decay, and the numbers as float32: see :class:`Numbers`.
    """
    lr, beta1, beta2 = (settings[name] for name in ("lr", "beta1", "beta2"))
    decay = settings["weight_decay"]
    size = (lr / (1 - beta1**step)) * -1
    root = (1 - beta2**step) ** 0.5
    factor = 1 - lr * decay if decoupled else decay
    numbers = (beta1, beta2, size, root, settings["eps"], factor, 1 - beta1, 1 - beta2)
    with np.errstate(all="ignore"):
        return bool(decay != 0), [float(_f32(x)) for x in numbers]


def is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether decay leaves the gradients alone; before torch 2.7 only the class determines it."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def is_own_class(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether a class and its ``step`` are from ``torch.optim``, according to their modules."""
    modules = cls.__module__, getattr(cls.step, "__module__", None) or ""
    return all(name.startswith("torch.optim.") for name in modules)


@cache
def is_torchs(method: Any) -> bool:
    """Whether all of a method is torch's own: users replace methods of classes, or wrap them."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


def states_of(state: dict[Any, Any], keys: Sequence[Any]) -> list[Any]:
    """Returns an optimizer's state for each parameter, None if it has none.

    Looking a tensor up runs Python code of torch; usually all are there, in the same order.
    """
    if len(state) == len(keys) and all(map(is_, state, keys)):
        return list(state.values())
    return [state.get(key) for key in keys]
