"""Checks of the optimizer class and its parameters before its state is streamed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.errors import StepError
from tiermem.nn.compat.outside import outside
from tiermem.nn.groups.inspect import owners
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.separable import Nature
from tiermem.optim.units.unit import StepUnit

_EXAMPLE = "tier.optimizer(model, torch.optim.AdamW, lr=1e-4)"


def optimizer_class(cls: Any) -> type[torch.optim.Optimizer]:
    """Returns ``cls``, checked to be an optimizer class.

    Raises:
        StepError: If it is not; the message says what to pass instead.
    """
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        return cls
    if isinstance(cls, torch.optim.Optimizer):
        name = type(cls).__name__
        raise StepError(
            f"tier.optimizer makes the optimizer itself, and was given one that is made: give the "
            f"class {name} and its settings, as in {_EXAMPLE}"
        )
    if isinstance(cls, str):
        raise StepError(
            f"tier.optimizer takes an optimizer class, not the text {cls!r}: as in {_EXAMPLE}"
        )
    if isinstance(cls, partial):
        raise StepError(
            "tier.optimizer takes an optimizer class, not a functools.partial: give the class and "
            f"its settings by themselves, as in {_EXAMPLE}"
        )
    what = f"the class {cls.__name__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
    raise StepError(
        f"tier.optimizer takes a class derived from torch.optim.Optimizer, not {what}: "
        f"as in {_EXAMPLE}"
    )


def check_wrapped(runtime: ModuleRuntime, groups: Sequence[dict[str, Any]], given: Any) -> None:
    """Raises if none of the parameters is in the tiers; only some may be outside.

    Args:
        runtime: The modules' runtime.
        groups: The parameter groups.
        given: The user's argument, for names in messages.

    Raises:
        StepError: If none is, or one is in another manager's tiers.
    """
    mine = _managed(runtime)
    names = _names(given)
    refuse_others(runtime, groups, names)
    params = [param for group in groups for param in group["params"]]
    if params and not any(id(param) in mine for param in params):
        _refuse_late(runtime, params)
        raise StepError(
            f"none of these {len(params)} parameters is in the tiers (the first of them is "
            f"{_name(params[0], 0, names)}), so its optimizer would use memory outside all "
            "budgets: call tier.wrap(model) before tier.optimizer, or use the torch optimizer "
            "itself for what stays outside the tiers"
        )


def _refuse_late(runtime: ModuleRuntime, params: Sequence[torch.Tensor]) -> None:
    """Raises for parameters that were added to a model after it was wrapped.

    Raises:
        StepError: If there are any.
    """
    ids = {id(param) for param in params}
    for wrapped in runtime.models.values():
        late = [name for name, param in wrapped.model.named_parameters() if id(param) in ids]
        if late:
            more = f" and {len(late) - 1} more" if late[1:] else ""
            raise StepError(
                f"none of these {len(params)} parameters is in the tiers: {late[0]!r}{more} came "
                "into the model after tier.wrap. Change the model before it: call "
                "tier.unwrap(model), put in the new layer or the adapters "
                "(tiermem.add_adapters, peft's get_peft_model), then tier.wrap; or give "
                "tier.optimizer the whole model, which has these stepped outside the budgets"
            )


def refuse_others(
    runtime: ModuleRuntime, groups: Sequence[dict[str, Any]], names: dict[int, str] | None = None
) -> None:
    """Raises for parameters in the tiers of another manager, and for some in these tiers.

    The latter are parameters that wrap other tensors, as inner tensors have no gradients.

    Args:
        runtime: The modules' runtime.
        groups: The parameter groups.
        names: Names of parameters, by their id, if known.

    Raises:
        StepError: If there is such a parameter.
    """
    mine = _managed(runtime)
    shells = {id(shell.param) for group in runtime.groups for shell in group.shells}
    for number, param in enumerate(p for group in groups for p in group["params"]):
        if id(param) in shells and param.requires_grad:
            raise StepError(
                f"parameter {_name(param, number, names or {})} is of a class that wraps other "
                "tensors (quantized weights), which are not trained in the tiers: freeze it, "
                "requires_grad_(False), and train adapters beside it; or quantize the model after "
                "it is trained"
            )
        if id(param) not in mine and owners.get(param) is not None:
            raise StepError(
                f"parameter {_name(param, number, names or {})} is in the tiers of another "
                "TierManager: make its optimizer with that manager's tier.optimizer"
            )


def _managed(runtime: ModuleRuntime) -> set[int]:
    return {id(entry.param) for group in runtime.groups for entry in group.entries}


def _names(given: Any) -> dict[int, str]:
    if not isinstance(given, nn.Module):
        return {}
    return {id(param): repr(name) for name, param in given.named_parameters()}


def _name(param: torch.Tensor, number: int, names: dict[int, str]) -> str:
    return names.get(id(param), f"number {number}, of shape {tuple(param.shape)}")


def refuse_draws(name: str, natures: Sequence[Nature | None]) -> None:
    """Refuses a class that draws random numbers if blocks are stepped in another order.

    Args:
        name: Name of the class.
        natures: What trial steps have shown, for each group.

    Raises:
        StepError: If it draws any.
    """
    if any(nature is not None and nature.draws for nature in natures):
        raise StepError(
            f"{name} draws random numbers as it steps, which come in the order of the resident "
            "optimizer only where all blocks are stepped in step(), on the device: leave overlap= "
            "and where= out, or switch what is random in the class off"
        )


def refuse_arguments(
    cls: type[torch.optim.Optimizer], closure: Any, more: Sequence[Any], settings: dict[str, Any]
) -> None:
    """Refuses arguments of ``step()`` other than a closure.

    Args:
        cls: The class.
        closure: The closure.
        more: Other positional arguments.
        settings: Keyword arguments.

    Raises:
        TypeError: If the class's own ``step`` does not accept them either.
        StepError: If it does.
    """
    first = (closure,) if more or closure is not None else ()
    step, name = inspect.unwrap(cls.step), cls.__name__
    try:
        inspect.signature(step).bind(None, *first, *more, **settings)
    except TypeError:  # a call fails at its arguments then, before any line of it
        outside(step, None, *first, *more, **settings)
    given = ", ".join([*map(repr, more), *(f"{key}={value!r}" for key, value in settings.items())])
    raise StepError(
        f"{name}.step() was given {given}, and tiers step block by block, with a closure at most: "
        f"give tier.optimizer a subclass of {name} whose step(closure=None) passes that on, or "
        "reads it from the parameter group"
    )


def refuse_whole(name: str, natures: Sequence[Nature | None]) -> None:
    """Refuses a class that updates parameters without gradients, for steps inside backward.

    Args:
        name: Name of the class.
        natures: What trial steps have shown, for each group.

    Raises:
        StepError: If it does so.
    """
    if any(nature is not None and nature.whole for nature in natures):
        raise StepError(
            f"{name} updates parameters that have no gradient as well, or their state, so that "
            "tiers have to see all gradients before they step any block: leave overlap= and where= "
            "out"
        )


def refuse_missing(name: str, groups: Sequence[dict[str, Any]], natures: dict[int, Nature]) -> None:
    """Refuses a step of a class that would update parameters which have no gradient.

    Args:
        name: Name of the class.
        groups: All parameter groups.
        natures: What trial steps have shown, by group.

    Raises:
        StepError: Naming one of them.
    """
    for number in (number for number, nature in natures.items() if nature.whole):
        for place, param in enumerate(groups[number]["params"]):
            if param.grad is None:
                raise StepError(
                    f"{name} updates parameters that have no gradient as well, or their state, "
                    f"which tiers do not: parameter {place} of group {number}, of shape "
                    f"{tuple(param.shape)}, has none. Give it one before step() (param.grad = "
                    "torch.zeros_like(param)), or leave it out of the optimizer if it is not "
                    "trained"
                )


def in_order(
    name: str, units: Sequence[StepUnit], groups: Sequence[dict[str, Any]]
) -> list[StepUnit]:
    """Returns units in the order of the parameters, for a class that draws random numbers.

    In that order, all parameters get the same random numbers as in a single step.

    Args:
        name: Name of the class.
        units: The units to be stepped.
        groups: The parameter groups, whose members come in this order.

    Raises:
        StepError: If the parameters of a unit are not consecutive.
    """
    place = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    found = sorted(units, key=lambda unit: place[id(unit.members[0][0])])
    order = [place[id(p)] for unit in found for p, _ in sorted(unit.members, key=lambda m: m[1])]
    if order != sorted(order):
        raise StepError(
            f"{name} draws random numbers as it steps, and they come to the parameters in another "
            "order block by block than all at once: give the parameters in the order of the model, "
            "in one group (model.parameters()), or switch what is random in the class off"
        )
    return found
