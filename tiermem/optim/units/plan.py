"""Divides parameter groups into units of a step, and reserves homes for state and masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.config import exact_size, format_size
from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.layout import TensorShape, pack, packed_nbytes
from tiermem.errors import CapacityError, StorageError
from tiermem.nn.compat.shapes import shape_of
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.need import Kept, check_calls, check_gradients
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.probe import Make, StateProbe, settings_of
from tiermem.optim.units.cutting import in_parts, lay_out_gradients, loose_nbytes
from tiermem.optim.units.master import Masters, master_dtype_of
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.places import Place
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.services.host_staging import MOST_LOADS

Wanted = tuple[str, Role, Sequence[TensorShape]]
Member = tuple[torch.Tensor, int]
"""A parameter and the number of its parameter group."""


def plan_units(
    runtime: ModuleRuntime,
    groups: Sequence[dict[str, Any]],
    members: Sequence[Member],
    probe: StateProbe,
    make: Make,
    master_dtype: torch.dtype | None = None,
    *,
    overlap: bool = False,
    on_host: bool = False,
    elementwise: bool = False,
) -> list[StepUnit]:
    """Plans the units of parameters and reserves homes for gradients and state.

    Args:
        runtime: The modules' runtime.
        groups: All parameter groups, by number.
        members: The parameters, and the number of the group of each.
        probe: Finds out the state.
        make: Creates a plain optimizer.
        master_dtype: Dtype of the masters of parameters with another dtype; None for no masters.
        overlap: Whether a unit may be stepped while a forward holds other blocks.
        on_host: Whether units may be stepped on the host: then ``"auto"`` leaves room
            in DRAM for the staging of the rest.
        elementwise: Whether a large parameter may be stepped in parts.

    Raises:
        CapacityError: If a step or the state does not fit; nothing is reserved then.
    """
    apart = [e for group in runtime.groups for e in group.entries if e.whole is None]
    known = {id(e.unit): e.unit for e in apart}
    made = check_gradients(runtime)
    try:
        units = _divide(runtime, members, make)
        _prepare(units, groups, probe, master_dtype)
        if elementwise:
            held = runtime.program.worst_chain if overlap else 0
            units = [in_parts(runtime, unit, groups, probe, held) for unit in units]
        lay_out_gradients(runtime, units)
        _reserve(runtime, units, groups, probe, overlap=overlap, on_host=on_host)
    except BaseException:
        let_apart(apart)
        joined = [e.unit for e in apart if e.unit is not None and not e.has_grad]
        new = {id(u): u for u in joined if id(u) not in known} | {id(u): u for u in made}
        runtime.grads.homes.unreserve(list(new.values()))
        raise
    return units


def let_apart(entries: Iterable[Entry]) -> None:
    """Keeps gradients as there is room for them, since their optimizer was refused."""
    for entry in entries:
        entry.whole = None


def _divide(runtime: ModuleRuntime, members: Sequence[Member], make: Make) -> list[StepUnit]:
    """Returns units for parameters; one that occurs twice is stepped twice, as by torch."""
    places: dict[int, list[Member]] = {}
    for param, number in members:
        places.setdefault(id(param), []).append((param, number))
    units: list[StepUnit] = []
    seen: set[int] = set()
    by_unit: dict[int, list[Entry]] = {}
    for group in runtime.groups:
        for entry in group.entries:
            if id(entry.param) in places:
                seen.add(id(entry.param))
                by_unit.setdefault(id(entry.unit) if entry.unit else id(group), []).append(entry)
    for entries in by_unit.values():
        mine = [member for entry in entries for member in places[id(entry.param)]]
        units.append(StepUnit(f"step[{entries[0].name}]", mine, entries, make))
    rest = [(param, number) for param, number in members if id(param) not in seen]
    if rest:
        units.append(StepUnit("step[ordinary parameters]", rest, [], make))
    return units


def _prepare(
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    probe: StateProbe,
    master_dtype: torch.dtype | None,
) -> None:
    """Gives units their masters, and sets whether their steps write gradients."""
    if master_dtype is not None:
        for unit in units:
            _give_masters(unit, master_dtype)
    note_spoils(units, groups, probe)


def note_spoils(
    units: Iterable[StepUnit], groups: Sequence[dict[str, Any]], probe: StateProbe
) -> None:
    """Sets whether steps write gradients, with the present settings of groups."""
    for unit in units:
        spoils = any(
            probe.spoils(unit.own(param), number, settings_of(groups[number]))
            for param, number in unit.members
        )
        unit.handed.spoils = spoils
        for part in unit.parts if isinstance(unit, PartedUnit) else ():
            part.unit.handed.spoils = spoils


def kept_of(
    groups: Sequence[dict[str, Any]],
    members: Sequence[Member],
    probe: StateProbe,
    master_dtype: torch.dtype | None,
    *,
    overlap: bool,
    elementwise: bool,
) -> Kept:
    """Returns what an optimizer of these parameters keeps; arguments as for :func:`plan_units`."""
    number_of = {id(param): number for param, number in members}

    def own(param: torch.Tensor) -> torch.Tensor:
        dtype = master_dtype_of(param, master_dtype) or param.dtype
        return torch.empty(param.shape, dtype=dtype, device="meta")

    def state(param: torch.Tensor, shape: TensorShape) -> list[TensorShape]:
        (spec,), _ = pack([shape])
        number = number_of[id(param)]
        settings = settings_of(groups[number])
        found = probe.state_of(own(param), spec.stride, number, settings)
        return [
            shape_of(f"{shape.name}.{key}{path}", tensor)
            for key, value in found.items()
            for path, tensor in value.tensors
        ]

    def master(param: torch.Tensor, shape: TensorShape) -> TensorShape | None:
        if master_dtype_of(param, master_dtype) is None:
            return None
        return shape_of(f"{shape.name}.master", own(param), shape.stride)

    parted = elementwise and not probe.sparse
    return Kept(frozenset(number_of), state, master, overlap=overlap, elementwise=parted)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A parameter, or a run of one, whose state and master have their own homes."""

    param: torch.Tensor
    name: str
    stride: tuple[int, ...]


def _leaves(units: Sequence[StepUnit]) -> Iterator[tuple[StepUnit, list[_Kept]]]:
    """Yields the units that keep state or masters, and for which parameters or runs."""
    for unit in units:
        if isinstance(unit, PartedUnit):
            (entry,) = unit.entries
            for number, part in enumerate(unit.parts):
                yield part.unit, [_Kept(part.param, f"{entry.name}[part {number}]", (1,))]
            continue
        yield (
            unit,
            [_Kept(e.param, e.name, e.group.block.tensors[e.index].stride) for e in unit.entries],
        )


def _give_masters(unit: StepUnit, master_dtype: torch.dtype) -> None:
    params = {id(p): p for p, _ in unit.members if master_dtype_of(p, master_dtype) is not None}
    if params:
        unit.masters = Masters(list(params.values()), master_dtype)


class _ToReserve:
    """Blocks of state and masters that are to be created, and their owners.

    Attributes:
        blocks: Name, role and tensors of each.
        homes: The home of each; None for the policy's.
        sizes: Bytes that a step of each unit uses, by the unit's id.
    """

    def __init__(self, sizes: dict[int, int]) -> None:
        """Starts without blocks.

        Args:
            sizes: Bytes of each unit's blocks so far, by its id.
        """
        self.blocks: list[Wanted] = []
        self.homes: list[str | None] = []
        self.sizes = sizes
        self._takers: list[Callable[[Block], None]] = []

    def add_state(self, unit: StepUnit, shapes: Sequence[TensorShape], places: list[Place]) -> None:
        """Adds the block of a unit's state, if it has any."""

        def take(block: Block) -> None:
            unit.block, unit.plain.places = block, places

        if shapes:
            self._add(unit, "state", Role.OPTIMIZER, shapes, take)

    def add_masters(self, unit: StepUnit, kept: Sequence[_Kept]) -> None:
        """Adds the block of a unit's masters, if it has any."""
        masters = unit.masters
        mine = [k for k in kept if unit.own(k.param) is not k.param]
        if masters is None or not mine:
            return
        shapes = [shape_of(f"{k.name}.master", unit.own(k.param), k.stride) for k in mine]
        params = [k.param for k in mine]
        self._add(unit, "master", Role.MASTER, shapes, lambda block: masters.place(block, params))

    def _add(
        self,
        unit: StepUnit,
        what: str,
        role: Role,
        shapes: Sequence[TensorShape],
        take: Callable[[Block], None],
    ) -> None:
        self.blocks.append((f"{unit.name}.{what}", role, shapes))
        self.homes.append(_home_of(unit))
        self.sizes[id(unit)] = self.sizes.get(id(unit), 0) + packed_nbytes(shapes)
        self._takers.append(take)

    def hand_out(self, blocks: Sequence[Block]) -> None:
        """Gives each created block, in order, to its owner."""
        for take, block in zip(self._takers, blocks, strict=True):
            take(block)


def _reserve(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    probe: StateProbe,
    *,
    overlap: bool,
    on_host: bool,
) -> None:
    """Reserves homes for state and masters of all units, or of none."""
    wanted = _ToReserve({id(unit): sum(b.nbytes for b in unit.blocks()) for unit in units})
    leaves = list(_leaves(units))
    for unit, kept in leaves:
        wanted.add_state(unit, *_state_of(unit, kept, groups, probe))
    for unit, kept in leaves:
        wanted.add_masters(unit, kept)
    held = _hold_staging(runtime, list(wanted.sizes.values())) if on_host else []
    try:
        blocks = runtime.manager.add_blocks(wanted.blocks, home=wanted.homes)
    except CapacityError:
        if not held:
            raise
        _let_go(runtime, held)
        blocks = runtime.manager.add_blocks(wanted.blocks, home=wanted.homes)
    finally:
        _let_go(runtime, held)
    wanted.hand_out(blocks)
    try:
        check_steps(runtime, units, overlap=overlap)
        for keeper in runtime.keepers:  # new blocks may leave less room for other steps
            keeper.check_steps()
        check_calls(runtime)
        stepped = {e.group.block.id: e.group.block for unit in units for e in unit.entries}
        runtime.manager.make_writable(list(stepped.values()))
    except (CapacityError, StorageError):
        runtime.manager.remove_blocks(blocks)
        raise


def _home_of(unit: StepUnit) -> str | None:
    """Returns the home for what a unit keeps, if it differs from the policy's."""
    return "hbm" if unit.group is not None and unit.group.resident else None


def _hold_staging(runtime: ModuleRuntime, sizes: Sequence[int]) -> list[Extent]:
    """Takes DRAM that the staging of steps on the host may need if all homes were in files."""
    homes = runtime.manager.parts.homes
    if homes.swap is None:
        return []
    for count in range(MOST_LOADS, 0, -1):
        most = max((sum(sizes[i : i + count]) for i in range(len(sizes))), default=0)
        extent = homes.dram.allocate(most) if most else None
        if extent is not None:
            return [extent]
    return []


def _let_go(runtime: ModuleRuntime, held: list[Extent]) -> None:
    while held:
        runtime.manager.parts.homes.release(Tier.DRAM, held.pop())


def _state_of(
    unit: StepUnit,
    kept: Sequence[_Kept],
    groups: Sequence[dict[str, Any]],
    probe: StateProbe,
) -> tuple[list[TensorShape], list[Place]]:
    """Returns the tensors of a unit's state, and the places of its values among them."""
    shapes: list[TensorShape] = []
    places: list[Place] = []
    number_of = {id(param): number for param, number in unit.members}
    for k in kept:
        number = number_of[id(k.param)]
        settings = settings_of(groups[number])
        for key, found in probe.state_of(unit.own(k.param), k.stride, number, settings).items():
            name, tensors = f"{k.name}.{key}", found.tensors
            places.append(Place(k.param, key, name, found.shape, len(shapes), len(tensors)))
            shapes += [shape_of(f"{name}{path}", tensor) for path, tensor in tensors]
    return shapes, places


def check_steps(runtime: ModuleRuntime, units: Sequence[StepUnit], *, overlap: bool) -> None:
    """Checks that each of some units can be stepped.

    Args:
        runtime: The modules' runtime.
        units: The units that are stepped.
        overlap: Whether a unit may be stepped while a forward holds other blocks.

    Raises:
        CapacityError: If the device budget has no room for a step.
    """
    held = runtime.program.worst_chain if overlap else 0
    table = runtime.manager.parts.table
    fixed = table.fixed_nbytes()
    for unit in units:
        if unit.group is not None and unit.group.freed:
            continue  # its model was unwrapped: it has no blocks, and is not stepped any more
        need = fixed + loose_nbytes(runtime, unit.at_once())
        if held and unit.group is not None:
            need += max(0, held - loose_nbytes(runtime, [unit.group.block]))
        if not runtime.manager.can_hold(need):
            raise CapacityError(
                f"an optimizer step of block {unit.name!r} takes {format_size(need)} in tier hbm: "
                f"weights, gradients, masters and state together; the budget is "
                f"{format_size(table.hbm.capacity)}",
                f"give hbm= at least {exact_size(need)}",
            )
