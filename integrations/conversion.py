"""Makes a tiered optimizer from a plain torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tiermem import StepError, TieredOptimizer, TierManager


def tiered(tier: TierManager, optimizer: torch.optim.Optimizer, **settings: Any) -> TieredOptimizer:
    """Makes the tiered optimizer of a plain one's class, groups and settings.

    Schedulers and hooks of the plain one are given the new one with :func:`hand_over`. A setting
    that the class does not keep among its ``defaults`` is read from the attribute of its name.

    Args:
        tier: The manager of the wrapped parameters.
        optimizer: An optimizer that has made no step.
        **settings: Settings of ``tier.optimizer``: ``overlap``, ``where``, ``master_dtype``, ...

    Raises:
        StepError: If it has state already, its class cannot be stepped block by block, or a setting
            that the class asks for is not to be found.
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
    known = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    own = settings_of(optimizer)
    for name, parameter in list(known.items())[1:]:  # after the parameters to be trained
        asked = parameter.default is parameter.empty and parameter.kind in _NAMED
        if asked and name not in own and name not in settings:
            raise StepError(
                f"{cls.__name__} asks for {name}=, and keeps it neither in its defaults nor in an "
                "attribute of that name; give it among the settings of optimizers, "
                f"optimizer={{{name!r}: ...}}"
            )
    groups = [
        {k: v for k, v in group.items() if k == "params" or takes_any or k in known or k in _OWN}
        for group in optimizer.param_groups
    ]
    return tier.optimizer(groups, cls, **{**own, **settings})  # type: ignore[arg-type, unused-ignore]


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the settings that an optimizer was made with, as far as it keeps them.

    Args:
        optimizer: What its class does not keep in ``defaults`` is read from attributes that are
            named as the arguments of its constructor.
    """
    signature = list(inspect.signature(type(optimizer)).parameters.items())
    known = dict(signature[1:])  # without the parameters to be trained, which groups have
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    kept = {k: v for k, v in vars(optimizer).items() if k in known and k not in _OF_TORCH}
    return kept | {k: v for k, v in optimizer.defaults.items() if takes_any or k in known}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# attributes of every torch optimizer: the tables of hooks, and others
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_OF_TORCH = ("defaults", "state", "param_groups")

# keys of groups that are not settings: written by schedulers and by programs
_OWN = ("initial_lr", "name", "lr")


def hand_over(old: torch.optim.Optimizer, new: TieredOptimizer) -> None:
    """Connects the learning-rate schedulers and hooks of one optimizer to another.

    Args:
        old: The optimizer that they were made for; from now on its groups are those of ``new``.
        new: The optimizer that steps; its groups are in the same order.
    """
    for mine, theirs in zip(new.param_groups, old.param_groups, strict=True):
        mine.update({k: v for k, v in theirs.items() if k != "params"})
    old.param_groups = new.param_groups
    share_hooks(old, new)
    old._opt_called = True  # type: ignore[attr-defined]  # schedulers check that it has stepped


def share_hooks(old: torch.optim.Optimizer, new: TieredOptimizer) -> None:
    """Makes an optimizer call the hooks of another.

    Args:
        old: The optimizer that they were registered with.
        new: The optimizer that steps. It shares the tables themselves: a hook that is registered
            with or removed from either later is registered with or removed from both.
    """
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disables an optimizer's hooks inside ``with``, for calls that the program does not make."""
    kept = {name: getattr(optimizer, name) for name in _HOOKS}
    try:
        for name, table in kept.items():
            setattr(optimizer, name, type(table)())
        yield
    finally:
        for name, table in kept.items():
            setattr(optimizer, name, table)
