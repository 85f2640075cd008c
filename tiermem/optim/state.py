"""Saves and loads an optimizer's state dict, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError
from tiermem.nn.compat.outside import outside
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, forget
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.optim.rules.probe import StateProbe
from tiermem.optim.rules.separable import Make, settings_of
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import State, StepUnit

MASTER = "master"
"""Third key of ``state_dict()``, with ``state`` and ``param_groups``: masters by number."""


def load_state(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    state: State,
    state_dict: dict[str, Any],
    cls: type[torch.optim.Optimizer],
    defaults: Set[str],
    probe: StateProbe,
    make: Make,
    begin: Callable[[], None] | None = None,
) -> None:
    """Checks a state dict against the units, then loads it.

    Args:
        runtime: The modules' runtime.
        units: All units of the optimizer.
        groups: The parameter groups.
        state: The tiered optimizer's state, to be kept up to date.
        state_dict: A state dict of this or of the plain optimizer.
        cls: The class; its own ``load_state_dict``, if it has one, is called for each unit.
        defaults: The settings of the class; one that is not in the dict, and that the class does
            not set when it loads, stays as it is.
        probe: Knows which state changes its shape from step to step.
        make: Makes an optimizer of the class.
        begin: Called once the state dict is known to fit.

    Raises:
        CheckpointError: If groups, their lengths or a tensor's shape differ; nothing is changed.
    """
    saved, masters = _by_param(groups, state_dict)
    _check_shapes(units, groups, saved, probe)
    _check_masters(units, masters)
    if begin is not None:
        begin()
    # a tensor learning rate is written in place, and may be that of several groups
    loaded = deepcopy([settings_of(group) for group in state_dict["param_groups"]])
    loads = cls.load_state_dict is not torch.optim.Optimizer.load_state_dict
    as_class = _loaded_by_class(groups, state_dict, make) if loads else None
    loaded = loaded if as_class is None else as_class
    for group, settings in zip(groups, loaded, strict=True):
        for key in settings_of(group).keys() - settings.keys() - defaults:
            del group[key]  # set by a scheduler after the save; a new scheduler would start from it
        group.update(settings)
    settings_now = _Settings(loaded) if as_class is None else None
    for unit in units:
        if isinstance(unit, PartedUnit):
            take = partial(_take_part, runtime, groups, settings_now)
            unit.take_state(runtime, state, saved.get(unit.ids()[0]), take)
        else:
            found = _cast(unit, groups, saved, state_dict if loads else None)
            _import_state(unit, runtime, groups, state, found, settings_now)
        import_masters(unit, runtime, {i: masters[i] for i in unit.ids() if i in masters})
    if settings_now is not None:
        settings_now.take_over(groups)


def _loaded_by_class(
    groups: Sequence[dict[str, Any]], state_dict: dict[str, Any], make: Make
) -> list[dict[str, Any]] | None:
    """Returns the loaded settings as changed by a class with its own ``load_state_dict``.

    It gets no state here. If it fails without, the result is None, and the settings are those of
    the dict.
    """

    def stand_in(param: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(torch.empty(0, dtype=param.dtype, device="cpu"), param.requires_grad)

    given = [
        {**deepcopy(settings_of(group)), "params": [stand_in(p) for p in group["params"]]}
        for group in groups
    ]
    try:
        scratch = make(given)
        saved = deepcopy(state_dict["param_groups"])
        outside(scratch.load_state_dict, {**state_dict, "state": {}, "param_groups": saved})
    except Exception:
        return None
    return [settings_of(group) for group in scratch.param_groups]


class _Settings:
    """Loaded settings, which the class may change when it loads; it is called for each unit."""

    def __init__(self, loaded: Sequence[dict[str, Any]]) -> None:
        """Takes those of each group."""
        self._loaded = loaded
        self._made: dict[int, tuple[set[str], dict[str, Any]]] = {}

    def update(self, unit: StepUnit, optimizer: torch.optim.Optimizer) -> None:
        """Makes a unit's optimizer convert loaded state and settings to the present version.

        As in torch, the class sets settings that are missing in the dict. Those that it does not
        set come from the user's groups, as in each step.
        """
        numbers = unit.plain.numbers
        former = [settings_of(group) for group in optimizer.param_groups]
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            for key in settings_of(group).keys() - self._loaded[number].keys():
                group.pop(key)
        given = [settings_of(group) for group in optimizer.param_groups]
        _update(optimizer)
        found = zip(optimizer.param_groups, numbers, given, former, strict=True)
        for group, number, before, there in found:
            now = settings_of(group)
            changed = {k: v for k, v in now.items() if k not in before or before[k] is not v}
            self._made.setdefault(number, (before.keys() - now.keys(), changed))
            if unit.host is not None and "fused" in there:
                group["fused"] = there["fused"]  # the host keeps its kernel

    def take_over(self, groups: Sequence[dict[str, Any]]) -> None:
        """Changes the settings that users see in the same way."""
        for number, (removed, changed) in self._made.items():
            for key in removed:
                groups[number].pop(key, None)
            groups[number].update(changed)


def _update(optimizer: torch.optim.Optimizer) -> None:
    kept = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    outside(optimizer.__setstate__, kept)


def _by_param(
    groups: Sequence[dict[str, Any]], state_dict: dict[str, Any]
) -> tuple[dict[int, State], dict[int, torch.Tensor]]:
    """Returns the state and the masters in a state dict, by the parameter's id.

    Raises:
        CheckpointError: If it is not a state dict, or has other groups.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            "the state dict has no 'state' or no 'param_groups': give what optimizer.state_dict() "
            f"returned, not a dict with the keys {list(state_dict)[:8]}; nothing was loaded"
        )
    saved_groups = state_dict["param_groups"]
    lengths = [len(group["params"]) for group in groups]
    saved_lengths = [len(group["params"]) for group in saved_groups]
    if lengths != saved_lengths:
        raise CheckpointError(
            f"the state dict has parameter groups of {saved_lengths} parameters, the optimizer of "
            f"{lengths}; nothing was loaded"
        )
    saved: dict[int, State] = {}
    masters: dict[int, torch.Tensor] = {}
    for group, other in zip(groups, saved_groups, strict=True):
        for param, number in zip(group["params"], other["params"], strict=True):
            if number in state_dict["state"]:
                saved[id(param)] = state_dict["state"][number]
            if number in state_dict.get(MASTER, {}):
                masters[id(param)] = state_dict[MASTER][number]
    return saved, masters


def loaded_order(
    groups: Sequence[dict[str, Any]], state_dict: dict[str, Any]
) -> list[torch.Tensor]:
    """Returns the parameters in the order in which a state dict of such groups has their state."""
    param_of: dict[Any, torch.Tensor] = {}
    for group, other in zip(groups, state_dict["param_groups"], strict=True):
        param_of.update(zip(other["params"], group["params"], strict=True))
    return [param_of[number] for number in state_dict["state"] if number in param_of]


def _take_part(
    runtime: ModuleRuntime,
    groups: Sequence[dict[str, Any]],
    settings: _Settings | None,
    unit: StepUnit,
    state: State,
    share: dict[int, State],
) -> None:
    """Loads into the unit of a part its share of a parameter's state."""
    _import_state(unit, runtime, groups, state, _cast(unit, groups, share), settings)


def _check_shapes(
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    saved: dict[int, State],
    probe: StateProbe,
) -> None:
    for unit in units:
        number_of = {id(param): number for param, number in unit.members}
        for param, key, name, shape in unit.state_shapes():
            value = saved.get(id(param), {}).get(key)
            if isinstance(value, torch.Tensor) and tuple(value.shape) != shape:
                number = number_of[id(param)]
                settings = settings_of(groups[number])
                if not isinstance(unit, PartedUnit) and key in probe.varying(
                    unit.own(param), number, settings
                ):
                    continue  # for example a history of gradients
                raise CheckpointError(
                    f"the state dict's {name!r} has shape {tuple(value.shape)}, the "
                    f"optimizer's has {shape}; nothing was loaded"
                )


def _check_masters(units: Sequence[StepUnit], masters: dict[int, torch.Tensor]) -> None:
    for unit in units:
        for param, _ in unit.members:
            value = masters.get(id(param))
            if value is None:
                continue
            if not unit.has_master(param):
                raise CheckpointError(
                    f"the state dict has master weights ({value.dtype}) for a parameter of "
                    f"{unit.name!r} that has none here; make the optimizer with "
                    f"master_dtype={value.dtype}, or delete {MASTER!r} from the state dict; "
                    "nothing was loaded"
                )
            if value.shape != param.shape:
                raise CheckpointError(
                    f"the state dict's master of a parameter of {unit.name!r} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(param.shape)}; nothing was loaded"
                )


def _cast(
    unit: StepUnit,
    groups: Sequence[dict[str, Any]],
    saved: dict[int, State],
    whole: dict[str, Any] | None = None,
) -> dict[int, State]:
    """Returns the unit's state, cast and moved as by ``load_state_dict``.

    Args:
        unit: The unit.
        groups: The parameter groups.
        saved: The state by the id of the parameter.
        whole: The state dict, for a class that has a ``load_state_dict`` of its own.
    """
    members = [(p, n) for p, n in unit.members if id(p) in saved]
    if not members:
        return {}
    numbers = list(dict.fromkeys(n for _, n in members))
    order = [p for number in numbers for p, n in members if n == number]
    index = {id(p): i for i, p in enumerate(order)}

    def grouped(number: int, value: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
        own = [value(p) for p, n in members if n == number]
        return {**settings_of(groups[number]), "params": own}

    own = [grouped(n, unit.own) for n in numbers]
    scratch = torch.optim.Optimizer(own, {}) if whole is None else unit.plain.make(own)
    outside(
        scratch.load_state_dict,
        {
            **(whole or {}),
            "state": {index[id(p)]: saved[id(p)] for p in order},
            "param_groups": [grouped(n, lambda p: index[id(p)]) for n in numbers],
        },
    )
    return {id(p): dict(scratch.state[unit.own(p)]) for p in order}


def export_all(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    state: State,
    cls: type[torch.optim.Optimizer],
    make: Make,
) -> dict[str, Any]:
    """Returns a state dict as the class makes it, with masters added; tensors in host memory.

    Args:
        runtime: The modules' runtime.
        units: All units of the optimizer.
        groups: The parameter groups.
        state: The tiered optimizer's state.
        cls: The class.
        make: Makes an optimizer of it.
    """
    numbers: dict[int, int] = {}
    packed = []
    count = 0
    for group in groups:  # a parameter that is there twice has its last number, as in torch
        numbers.update((id(p), n) for n, p in enumerate(group["params"], count))
        count += len(group["params"])
        members = [numbers[id(p)] for p in group["params"]]
        packed.append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
    values: dict[int, State] = {}
    owns: dict[int, torch.Tensor] = {}
    for unit in units:
        owns |= {numbers[id(param)]: unit.own(param) for param, _ in unit.members}
        for param, value in export_state(unit, runtime, state):
            values[numbers[id(param)]] = value
    masters = {
        numbers[id(param)]: value
        for unit in units
        for param, value in export_masters(unit, runtime)
    }
    order = [numbers[id(param)] for param in state if id(param) in numbers]
    result = {"state": {n: values[n] for n in order if n in values}, "param_groups": packed}
    if cls.state_dict is not torch.optim.Optimizer.state_dict:
        result = _as_class(result, owns, make)
    return {**result, MASTER: dict(sorted(masters.items()))}


def _as_class(plain: dict[str, Any], owns: dict[int, torch.Tensor], make: Make) -> dict[str, Any]:
    """Converts a plain state dict by the ``state_dict`` of a class that has its own.

    Args:
        plain: The state dict by torch's own method.
        owns: The stepped tensors by number; their shapes and dtypes are used.
        make: Makes an optimizer of the class.
    """
    cpu = torch.device("cpu")
    stand_ins = {
        number: nn.Parameter(shared_placeholder(own.shape, own.dtype, cpu), own.requires_grad)
        for number, own in owns.items()
    }
    groups = [
        {**settings_of(group), "params": [stand_ins[number] for number in group["params"]]}
        for group in plain["param_groups"]
    ]
    scratch = make(groups)
    scratch.state.clear()
    for number, value in plain["state"].items():
        scratch.state[stand_ins[number]] = value
    found = outside(scratch.state_dict)
    return {**found, "param_groups": plain["param_groups"]}


def take_in_edits(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    state: State,
) -> None:
    """Copies users' edits of the shown state into the units' state.

    Args:
        runtime: The modules' runtime.
        units: Units without a deferred step.
        groups: The parameter groups.
        state: The tiered optimizer's, as the user has left it.
    """
    for unit in units:
        if isinstance(unit, PartedUnit):
            if unit.is_edited(state):
                param = unit.members[0][0]
                kept = state.get(param)
                if kept is not None:
                    kept = {key: _value_of(value) for key, value in kept.items()}
                unit.take_state(runtime, state, kept, partial(_take_part, runtime, groups, None))
            continue
        for param, _ in unit.members:
            optimizer = unit.plain.optimizer_for(groups)
            own, shown = unit.own(param), state.get(param)
            mine = optimizer.state.get(own)
            if shown is mine or not (shown or mine):
                continue
            for value in (mine or {}).values():
                forget(value)
            optimizer.state.pop(own, None)
            if shown:
                optimizer.state[own] = shown


def _value_of(value: Any) -> Any:
    return value.clone() if isinstance(value, LazyTensor) else value


def export_state(
    unit: StepUnit, runtime: ModuleRuntime, state: State
) -> Iterator[tuple[torch.Tensor, State]]:
    """Yields each parameter that has state, with copies of it in host memory."""
    if isinstance(unit, PartedUnit):
        yield from unit.shown.copies(runtime, state)
        return
    present = [param for param, _ in unit.members if state.get(param) is not None]
    if not present:
        return
    unit.flush()
    tensors = runtime.manager.read(unit.block) if unit.block is not None else []
    stored = {(id(place.param), place.key): place for place in unit.plain.places}
    for param in present:
        values: State = {}
        for key, value in state[param].items():
            if isinstance(value, LazyTensor):
                values[key] = stored[(id(param), key)].copy(tensors)
            elif isinstance(value, torch.Tensor):
                values[key] = value.detach().clone()
            else:
                values[key] = value
        yield param, values


def _import_state(
    unit: StepUnit,
    runtime: ModuleRuntime,
    groups: Sequence[dict[str, Any]],
    state: State,
    loaded: dict[int, State],
    settings: _Settings | None,
) -> None:
    """Loads state; ``loaded`` is by the id of the parameter and fits."""
    optimizer = unit.plain.optimizer_for(groups)
    with torch.no_grad():
        slot = runtime.manager.acquire(unit.block) if unit.block is not None else None
        try:
            for param, _ in unit.members:
                own = unit.own(param)
                for value in optimizer.state.pop(own, {}).values():
                    forget(value)  # the optimizer has other tensors from now on
                state.pop(param, None)
                if id(param) in loaded:
                    optimizer.state[own] = dict(loaded[id(param)])
            if settings is None:
                _update(optimizer)
            else:
                settings.update(unit, optimizer)
            unit.plain.detach(runtime, slot, state)
        finally:
            if unit.block is not None:
                runtime.manager.release(unit.block, dirty=True)


def export_masters(
    unit: StepUnit, runtime: ModuleRuntime
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each parameter that has a master, with a copy of it in host memory."""
    if unit.masters is None:
        return
    manager, block = runtime.manager, unit.masters.block
    stored = manager.read(block) if block is not None and unit.masters.made else []
    managed = {id(entry.param) for entry in unit.entries}
    weights = {id(p): p.detach().cpu() for p, _ in unit.members if id(p) not in managed}
    if unit.group is not None:
        tensors = manager.read(unit.group.block)
        weights |= {
            id(e.param): e.param.detach().cpu() if e.materialized else tensors[e.index]
            for e in unit.entries
        }
    if isinstance(unit, PartedUnit):
        yield from unit.masters_in(runtime, weights[unit.ids()[0]])
        return
    yield from unit.masters.values(stored, weights)


def import_masters(unit: StepUnit, runtime: ModuleRuntime, loaded: dict[int, torch.Tensor]) -> None:
    """Loads masters, and casts the weights from them; ``loaded`` is by id and fits."""
    if unit.masters is None or not loaded:
        return
    if isinstance(unit, PartedUnit):
        unit.take_master(runtime, loaded[unit.ids()[0]])
        return
    with torch.no_grad(), unit.held(runtime):
        unit.masters.take_loaded(loaded)
