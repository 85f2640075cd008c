"""Which units are stepped in parts, and whether their gradients are one block or runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape, contiguous_stride, packed_nbytes
from tiermem.core.parts import at_once, parts_of
from tiermem.nn.compat.shapes import shape_of
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.need import check_gradients
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.probe import StateProbe, settings_of
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit

Run = tuple[int, int]


def in_parts(
    runtime: ModuleRuntime,
    unit: StepUnit,
    groups: Sequence[dict[str, Any]],
    probe: StateProbe,
    held: int,
) -> StepUnit:
    """Returns a unit that steps a large parameter in parts, or the same unit if it is not large.

    Args:
        runtime: The modules' runtime.
        unit: The unit, without homes for what it keeps.
        groups: All parameter groups, by number.
        probe: Finds out the state.
        held: Bytes of blocks that may be held at the same time, its own weights among them.

    Raises:
        CapacityError: If there is no home for its gradient in runs.
    """
    if len(unit.members) != 1 or len(unit.entries) != 1 or probe.sparse:
        return unit
    (entry,), ((param, _),) = unit.entries, unit.members
    if entry.unit is None or entry.group.resident or entry.sparse:
        return unit
    kept = _kept(runtime, unit, groups, probe)
    if kept is None:
        return unit
    runs: list[Run] = []
    if not entry.unit.runs and param.requires_grad:
        nbytes = sum(packed_nbytes(shapes) for shapes in kept)
        room = _room(runtime, _beside(runtime, entry, held), nbytes)
        runs = parts_of(param.numel(), nbytes, room)
        longest = max((end - begin for begin, end in runs), default=0)
        part = sum(packed_nbytes(_run(shape, longest) for shape in shapes) for shapes in kept)
        if len(runs) > 1 and at_once(part) > room and entry.whole is None:
            runtime.grads.lay_out(entry, whole=False)
    runs = [(run.begin, run.end) for run in entry.unit.runs] or runs
    return PartedUnit(unit, runs) if len(runs) > 1 else unit


def lay_out_gradients(runtime: ModuleRuntime, units: Sequence[StepUnit]) -> None:
    """Keeps gradients of whole steps in one block each.

    Raises:
        CapacityError: If a backward could not run then.
    """
    entries = [e for u in units if not isinstance(u, PartedUnit) for e in u.entries]
    in_runs = any(entry.unit is not None and entry.unit.runs for entry in entries)
    for entry in entries:
        runtime.grads.lay_out(entry, whole=True)
    if in_runs:
        check_gradients(runtime)


def loose_nbytes(runtime: ModuleRuntime, blocks: Sequence[Block]) -> int:
    """Returns the bytes of those blocks that are not permanently in HBM."""
    table = runtime.manager.parts.table
    return sum(block.nbytes for block in blocks if not table[block.id].fixed)


def _kept(
    runtime: ModuleRuntime, unit: StepUnit, groups: Sequence[dict[str, Any]], probe: StateProbe
) -> list[list[TensorShape]] | None:
    """Returns the streamed tensors of state and of master; None if it cannot be cut."""
    (entry,), ((param, number),) = unit.entries, unit.members
    weight, own = entry.group.block.tensors[entry.index], unit.own(param)
    rows = contiguous_stride(weight.shape)
    found = probe.state_of(own, weight.stride, number, settings_of(groups[number]))
    if any(len(value.tensors) != 1 or value.shape != param.shape for value in found.values()):
        return None
    unit_of = entry.unit
    if weight.stride != rows or unit_of is None:
        return None
    if not unit_of.runs and unit_of.block.tensors[entry.unit_index].stride != rows:
        return None
    home = runtime.manager.parts.settings.policy.home
    state = [shape_of(key, t) for key, value in found.items() for _, t in value.tensors]
    master = [shape_of("master", own)] if own is not param else []
    kinds = ((Role.OPTIMIZER, state), (Role.MASTER, master))
    return [shapes for role, shapes in kinds if shapes and home(role) != "hbm"]


def _beside(runtime: ModuleRuntime, entry: Entry, held: int) -> int:
    """Returns the bytes in HBM beside state and master while a parameter is stepped."""
    weights = loose_nbytes(runtime, [entry.group.block])
    gradients = [] if entry.unit is None else entry.unit.blocks
    found = weights + loose_nbytes(runtime, gradients) + max(0, held - weights)
    return runtime.manager.parts.table.fixed_nbytes() + found


def _room(runtime: ModuleRuntime, beside: int, wanted: int) -> int:
    """Returns the bytes of HBM beside others; its limit may be raised for what is wanted."""
    runtime.manager.can_hold(beside + wanted)
    return max(0, runtime.manager.parts.table.hbm.capacity - beside)


def _run(shape: TensorShape, elements: int) -> TensorShape:
    return TensorShape(shape.name, (elements,), (1,), shape.dtype, shape.itemsize)
