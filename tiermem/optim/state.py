"""Loading an optimizer's state dict into the tiers, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermem.errors import CheckpointError
from tiermem.nn.runtime import ModuleRuntime
from tiermem.optim.probe import settings_of
from tiermem.optim.unit import State, StepUnit


def load_state(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    state: State,
    state_dict: dict[str, Any],
) -> None:
    """Checks a state dict against the units, then takes it over.

    Raises:
        CheckpointError: If groups, their lengths or a tensor's shape differ; nothing is changed.
    """
    saved_groups = state_dict["param_groups"]
    lengths = [len(group["params"]) for group in groups]
    saved_lengths = [len(group["params"]) for group in saved_groups]
    if lengths != saved_lengths:
        raise CheckpointError(
            f"the state dict has parameter groups of {saved_lengths} parameters, the optimizer of "
            f"{lengths}; nothing was loaded"
        )
    saved: dict[int, State] = {}
    for group, other in zip(groups, saved_groups, strict=True):
        for param, number in zip(group["params"], other["params"], strict=True):
            if number in state_dict["state"]:
                saved[id(param)] = state_dict["state"][number]
    _check_shapes(units, saved)
    for group, other in zip(groups, saved_groups, strict=True):
        group.update(settings_of(other))
    for unit in units:
        unit.import_state(runtime, groups, state, _cast(unit, groups, saved))


def _check_shapes(units: Sequence[StepUnit], saved: dict[int, State]) -> None:
    for unit in units:
        if unit.block is None:
            continue
        for (param, key), spec in zip(unit.keys, unit.block.tensors, strict=True):
            value = saved.get(id(param), {}).get(key)
            if isinstance(value, torch.Tensor) and tuple(value.shape) != spec.shape:
                raise CheckpointError(
                    f"the state dict's {spec.name!r} has shape {tuple(value.shape)}, the "
                    f"optimizer's has {spec.shape}; nothing was loaded"
                )


def _cast(
    unit: StepUnit, groups: Sequence[dict[str, Any]], saved: dict[int, State]
) -> dict[int, State]:
    """Returns the unit's state, cast and moved as torch's own ``load_state_dict`` does it."""
    params = [p for p, _ in unit.members if id(p) in saved]
    if not params:
        return {}
    number_of = {id(p): n for p, n in unit.members}
    numbers = list(dict.fromkeys(number_of[id(p)] for p in params))
    own = [
        {**settings_of(groups[n]), "params": [p for p in params if number_of[id(p)] == n]}
        for n in numbers
    ]
    scratch = torch.optim.Optimizer(own, {})
    order = [p for group in own for p in group["params"]]
    index = {id(p): i for i, p in enumerate(order)}
    scratch.load_state_dict(
        {
            "state": {index[id(p)]: saved[id(p)] for p in order},
            "param_groups": [
                {**settings_of(g), "params": [index[id(p)] for p in g["params"]]} for g in own
            ],
        }
    )
    return {id(p): dict(scratch.state[p]) for p in order}
