"""From a plain optimizer, as programs make them, to a tiered one."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tiermem import StepError, TieredOptimizer, TierManager


def tiered(tier: TierManager, optimizer: torch.optim.Optimizer, **settings: Any) -> TieredOptimizer:
    """Makes the tiered optimizer of a plain one's class, groups and settings.

    Schedulers that were made for the plain one are given the new one with :func:`hand_over`.

    Args:
        tier: The manager of the wrapped parameters.
        optimizer: An optimizer that has made no step.
        **settings: Of ``tier.optimizer``: ``overlap``, ``where``, ``master_dtype``, ...

    Raises:
        StepError: If it has state already, or its class cannot be stepped block by block.
        CapacityError: If a budget cannot hold its state.
    """
    if isinstance(optimizer, TieredOptimizer):
        return optimizer
    if optimizer.state:
        raise StepError(
            f"{type(optimizer).__name__} has state already; make the tiered optimizer before the "
            "first step, and load the state with load_state_dict"
        )
    cls = type(optimizer)
    known = inspect.signature(cls.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    own = {k: v for k, v in optimizer.defaults.items() if takes_any or k in known}
    groups = [
        {k: v for k, v in group.items() if k == "params" or takes_any or k in known or k in _OWN}
        for group in optimizer.param_groups
    ]
    return tier.optimizer(groups, cls, **{**own, **settings})  # type: ignore[arg-type, unused-ignore]


# what others keep in groups: schedulers, and programs
_OWN = ("initial_lr", "name", "lr")


def hand_over(old: torch.optim.Optimizer, new: TieredOptimizer) -> None:
    """Connects the learning-rate schedulers of one optimizer to another.

    Args:
        old: The optimizer that they were made for; from now on its groups are those of ``new``.
        new: What is stepped; its groups are in the same order.
    """
    for mine, theirs in zip(new.param_groups, old.param_groups, strict=True):
        mine.update({k: v for k, v in theirs.items() if k != "params"})
    old.param_groups = new.param_groups
    old._opt_called = True  # type: ignore[attr-defined]  # schedulers look whether it steps
