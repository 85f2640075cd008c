"""Loading a checkpoint of DeepSpeed's into an engine: by names, and only if all of it fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem import CheckpointError

from . import shards
from .shards import Saved

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine


def names_of(engine: DeepSpeedEngine) -> list[list[str]]:
    """Returns the names of the parameters of each group of an engine's optimizer."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    return [[names.get(id(param), "") for param in group["params"]] for group in groups]


def read(engine: DeepSpeedEngine, folder: Path, *, optimizer: bool) -> Saved:
    """Reads a folder, and checks that it is of this model.

    Args:
        engine: The engine.
        folder: The folder with DeepSpeed's files.
        optimizer: Whether to load state and masters.

    Raises:
        CheckpointError: If names or shapes differ; nothing is loaded.
    """
    params = dict(engine.module.named_parameters())
    order = [{name: tuple(params[name].shape) for name in group} for group in names_of(engine)]
    found = shards.read(folder, order, optimizer=optimizer)
    everything = dict(engine.module.named_parameters(remove_duplicate=False))
    for name, value in list(found.weights.items()):
        empty = value.numel() == 0 and name in everything
        if empty and everything[name].numel():  # stage 3 without its frozen weights
            del found.weights[name]
    if optimizer:
        _check(found, params, order)
    return found


def _check(
    found: Saved, params: dict[str, nn.Parameter], order: list[dict[str, tuple[int, ...]]]
) -> None:
    wanted = [name for names in order for name in names]
    if found.plain is not None:
        counts = [len(group["params"]) for group in found.plain["param_groups"]]
        if counts != [len(names) for names in order]:
            raise CheckpointError(
                f"{found.path}: its optimizer has groups of {counts} parameters, this one of "
                f"{[len(names) for names in order]}; nothing was loaded"
            )
        return
    missing = [name for name in wanted if name not in found.masters]
    if missing:
        raise CheckpointError(
            f"{found.path}: the optimizer's files have no {missing[0]!r} ({len(missing)} of "
            f"{len(wanted)} trained parameters are missing); nothing was loaded. "
            "load_optimizer_states=False loads the weights alone"
        )
    for name in wanted:
        if found.masters[name].numel() != params[name].numel():
            raise CheckpointError(
                f"{found.path}: {name!r} has {found.masters[name].numel()} elements, here "
                f"{params[name].numel()}; nothing was loaded"
            )


def take_state(engine: DeepSpeedEngine, found: Saved) -> None:
    """Loads an engine's optimizer state and loss scale; its weights are loaded already."""
    optimizer = engine.optimizer
    if optimizer is None:
        return
    if found.plain is not None:
        optimizer.load_state_dict(found.plain)
    else:
        optimizer.load_state_dict(_state_dict(engine, found))
    if engine.scaler is not None and found.scale is not None:
        engine.scaler.load_state_dict(found.scale)
        engine.show_scale()


def _state_dict(engine: DeepSpeedEngine, found: Saved) -> dict[str, Any]:
    """Returns a state dict of the engine's optimizer."""
    params = dict(engine.module.named_parameters())
    precise = engine.plan.optimizer["master_dtype"]
    state: dict[int, Any] = {}
    masters: dict[int, torch.Tensor] = {}
    groups = []
    groups_here = [] if engine.optimizer is None else engine.optimizer.param_groups
    for names, group in zip(names_of(engine), groups_here, strict=True):
        first = len(state)
        for number, name in enumerate(names, first):
            shape = params[name].shape
            kept = found.state.get(name, {})
            state[number] = {key: _fitting(engine, key, v, shape) for key, v in kept.items()}
            if precise is not None and params[name].dtype is not precise:
                masters[number] = found.masters[name].view(shape).to(precise)
        number_of = found.group_of.get(names[0], 0) if names else 0
        saved = found.settings[number_of] if number_of < len(found.settings) else {}
        taken = {k: saved[k] for k in group.keys() & saved.keys() - {"params", *_OF_KERNELS}}
        if isinstance(taken.get("betas"), list):
            taken["betas"] = tuple(taken["betas"])
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append({**own, **taken, "params": list(range(first, first + len(names)))})
    found_state = {number: kept for number, kept in state.items() if kept}
    result = {"state": found_state, "param_groups": groups}
    return result | ({"master": masters} if masters else {})


_OF_KERNELS = ("fused", "foreach", "capturable", "differentiable")


def _fitting(engine: DeepSpeedEngine, key: str, value: Any, shape: torch.Size) -> Any:
    """Returns a value of the state as the engine's class keeps it."""
    if key == "step":
        number = float(value)
        of_torch = engine.optimizer_class.__module__.startswith("torch.optim")
        return torch.tensor(number) if of_torch else int(number)
    if isinstance(value, torch.Tensor) and value.numel() == shape.numel() and value.dim():
        return value.view(shape)
    return value
