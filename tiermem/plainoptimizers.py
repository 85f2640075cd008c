"""Plain torch optimizers that a program makes for a wrapped model: ``torch.optim.AdamW(...)``.

Their results are correct, but their state is in device memory outside the budget, and each of their
operations copies weights and gradients to HBM. Users who only add ``tier.wrap`` to a script would
not notice, so a warning tells them.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tiermem.config import format_size
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.group import Group
from tiermem.optim.tiered import TieredOptimizer
from tiermem.optim.units.undo import OURS

_OPTIM = "tiermem.optim."
_told: WeakSet[torch.optim.Optimizer] = WeakSet()
_followed: list[object] = []


def follow_optimizers() -> None:
    """Checks every later step of any torch optimizer; may be called twice."""
    if not _followed:
        OURS.add(_look)
        _followed.append(register_optimizer_step_post_hook(_look))


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warns, once per optimizer, if its weights are in the tiers and do not stay in HBM."""
    if isinstance(optimizer, TieredOptimizer) or optimizer in _told:
        return
    group = _group_of(optimizer)
    if group is None or group.manager.parts.table.all_fit or _is_ours(sys._getframe(1)):
        return
    _told.add(optimizer)
    device = group.manager.parts.device
    kept = [s for s in optimizer.state.values() if isinstance(s, dict)]
    tensors = [v for state in kept for v in state.values() if torch.is_tensor(v)]
    nbytes = sum(v.nbytes for v in tensors if v.device.type == device.type)
    kind = type(optimizer).__name__
    warnings.warn(
        f"this {kind} steps weights in the tiers from outside: it keeps {format_size(nbytes)} of "
        f"state on {str(device)!r} beside the budget of hbm=, and brings weights and gradients up "
        f"one by one. Make it by tier.optimizer(model, {kind}, ...) instead, unless that refuses "
        "this class: the same bits, with state in the tiers",
        stacklevel=3,
    )


def _group_of(optimizer: torch.optim.Optimizer) -> Group | None:
    """Returns the group of a parameter of an optimizer; checks the first of each param group."""
    for settings in optimizer.param_groups:
        for param in settings["params"][:1]:
            group = group_of.get(id(param))
            member = None if group is None else group.pointing.member_of(param)
            if group is not None and member is not None and not member.materialized:
                return group
    return None


def _is_ours(frame: types.FrameType | None) -> bool:
    """Whether tiermem called ``step()``: units of a tiered optimizer use torch's inside."""
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_OPTIM):
        frame = frame.f_back
    return frame is not None
