"""From a plain optimizer, as programs make them, to a tiered one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

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


def hand_over(scheduler: Any, old: torch.optim.Optimizer, new: TieredOptimizer) -> None:
    """Has a learning-rate scheduler that was made for one optimizer set another's rates.

    Schedulers inside it (of a chain or a sequence) are handed over as well.

    Args:
        scheduler: Of :mod:`torch.optim.lr_scheduler`, or one that has ``optimizer``.
        old: What it was made for.
        new: What it goes on with; its groups are in the same order.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        hand_over(inner, old, new)
    if getattr(scheduler, "optimizer", None) is not old:
        return
    scheduler.optimizer = new
    LambdaLR(new, lambda _: 1.0)  # marks the optimizer as one whose steps schedulers look for
    for mine, theirs in zip(new.param_groups, old.param_groups, strict=True):
        mine.update({k: v for k, v in theirs.items() if k != "params"})
