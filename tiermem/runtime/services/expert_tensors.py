"""Stacked tensors in HBM as a whole, row after row, in seats of the expert room.

If tokens choose all experts of every layer, there is no need to wait for routers: tensors are used
in turn, and the next one is copied as soon as there is room for a part of it. Of the tensors of one
size some stay; the rest share the remaining seats (:func:`tiermem.core.experts.whole_tensors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from tiermem.core.block import Extent, Tier, align_up
from tiermem.core.experts import moved_whole, whole_tensors
from tiermem.core.residency import State
from tiermem.errors import InvariantError
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.expert_seats import Bank, Seat, Stack, small_pieces
from tiermem.runtime.parts import Parts
from tiermem.runtime.services.piece_copies import copy_up, packed_part
from tiermem.transfer.copy import Event

_AT_ONCE = 64 << 20
"""Maximal bytes of one copy, so that urgent copies can be submitted in between."""


@dataclass(eq=False)
class _Run:
    """Consecutive seats that are used by the same tensors.

    Attributes:
        seats: All of them.
        first: The number of the first in their bank.
        extent: Where they are in HBM.
        released: Events after their last readers.
        what: The tensor that has rows there.
        stamp: Which bytes these were copied from.
        events: The events of the copies to the run.
        read: How many calls are about to read them.
    """

    seats: Sequence[Seat]
    first: int
    extent: Extent
    released: tuple[Event, ...]
    what: Lent | None = None
    stamp: tuple[Any, ...] = ()
    events: list[Event | None] = field(default_factory=list)
    read: int = 0

    def holds(self, tensor: Lent) -> bool:
        """Whether it has the rows of a tensor in their current version."""
        return self.what is tensor and self.stamp == tensor.stack.stamp


@dataclass(eq=False)
class Lent:
    """A tensor of a stack, and where its rows are while it is used.

    Attributes:
        stack: The stack.
        index: The tensor's index in the block.
        number: Its number in the order of use.
        begin: The number of its first seat in the bank.
        runs: Its seats.
        next: Tensors that use some of these runs after it.
        seat: All of them as one.
    """

    stack: Stack
    index: int
    number: int
    begin: int
    runs: list[_Run] = field(default_factory=list)
    next: list[tuple[Lent, _Run]] = field(default_factory=list)
    seat: Seat | None = None

    @property
    def extent(self) -> Extent:
        """Where it is in HBM."""
        first = self.runs[0].extent.offset
        return Extent(first, self.runs[-1].extent.end - first)


def moved(stacks: Iterable[Stack], counts: Mapping[int, int]) -> int | None:
    """Returns the bytes that a pass moves if it uses whole tensors; None if it cannot.

    Args:
        stacks: The stacks in the order of use.
        counts: Numbers of seats, by their bytes.
    """
    total, stacks = 0, list(stacks)
    small = small_pieces(stacks)
    for size, tensors in _by_size(stacks).items():
        experts = {stack.experts for stack, _ in tensors}
        if len(experts) > 1 or any(stack.nbytes(index) != size for stack, index in tensors):
            return None
        [rows], seats = experts, counts.get(size, 0) - small[size]
        if seats < rows:
            return None
        abreast = len(tensors) > len(stacks)
        total += size * moved_whole(len(tensors), rows, seats, abreast=abreast)
    return total


def _by_size(stacks: Iterable[Stack]) -> dict[int, list[tuple[Stack, int]]]:
    """Returns the tensors that have rows, by the bytes of a seat."""
    found: dict[int, list[tuple[Stack, int]]] = {}
    for stack in stacks:
        for index in stack.rows:
            found.setdefault(align_up(stack.nbytes(index)), []).append((stack, index))
    return found


class WholeTensors:
    """Copies whole tensors to HBM; under the manager's lock."""

    def __init__(self, parts: Parts) -> None:
        """Starts without a layout."""
        self._parts = parts
        self._tensors: dict[tuple[int, int], Lent] = {}
        self._postponed: dict[tuple[Lent, _Run], None] = {}

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def clear(self) -> None:
        """Forgets the layout when the room is given back; what is being read keeps its seats."""
        for tensor in self._tensors.values():
            for run in tensor.runs:
                _hold(run, run.read > 0)
        self._tensors, self._postponed = {}, {}

    def repair(self) -> None:
        """Notes, after an exception anywhere, that no thread is about to read."""
        for tensor in self._tensors.values():
            for run in tensor.runs:
                run.read = 0

    def lay_out(self, stacks: Iterable[Stack], banks: Mapping[int, Bank]) -> None:
        """Gives each tensor seats, which are empty; none if :func:`moved` finds no room.

        Args:
            stacks: The stacks in the order of use.
            banks: Banks of seats, by the bytes of one; the first seats of each are for small
                pieces.
        """
        stacks = list(stacks)
        if moved(stacks, {size: len(bank.seats) for size, bank in banks.items()}) is None:
            return
        small = small_pieces(stacks)
        used = [(stack.number, index) for stack in stacks for index in stack.rows]
        number = {name: number for number, name in enumerate(used)}
        for size, tensors in _by_size(stacks).items():
            seats, experts = banks[size].seats[small[size] :], tensors[0][0].experts
            abreast = len(tensors) > len(stacks)
            begins = whole_tensors(len(tensors), experts, len(seats), abreast=abreast)
            if begins is None:
                raise InvariantError(f"{len(seats)} seats have no room for {experts} experts")
            placed = [
                Lent(stack, index, number[stack.number, index], begin)
                for (stack, index), begin in zip(tensors, begins, strict=True)
            ]
            self._divide(placed, seats, experts)
            for tensor in placed:
                self._tensors[tensor.stack.number, tensor.index] = tensor

    def begin(self) -> None:
        """Begins the copies that were left for the begin of a pass."""
        postponed, self._postponed = self._postponed, {}
        for tensor, run in sorted(postponed, key=lambda after: after[0].number):
            self._fill(tensor, run)

    def lend(self, stack: Stack, index: int) -> tuple[Lent, torch.Tensor] | None:
        """Returns a whole tensor, to be read by what is submitted to the current stream next.

        The caller has checked that the stack's home is current, and calls :meth:`take_back`
        after that.

        Returns:
            The argument for :meth:`take_back`, and the tensor; None if the tensor is not in
            the seats.
        """
        tensor = self._tensors.get((stack.number, index))
        if tensor is None or self._parts.table[stack.block.id].home is not Tier.DRAM:
            return None
        missing = [run for run in tensor.runs if not run.holds(tensor)]
        if any(run.read for run in missing):
            return None  # another thread is about to read what is there
        for run in missing:
            self._copy(tensor, run)
        for run in tensor.runs:
            for event in run.events:
                self._parts.copy.use(event)
            run.read += 1
        if tensor.seat is None:
            extent = tensor.extent
            with outside_inference():
                tensor.seat = Seat(self._parts.slots.arena.bytes_of(extent), extent)
        spec = stack.block.tensors[index]
        return tensor, tensor.seat.view(spec, spec.shape)

    def is_read(self, stack: Stack, index: int) -> bool:
        """Whether a tensor has no room as long as other threads read what is there."""
        tensor = self._tensors.get((stack.number, index))
        if tensor is None:
            return False
        return any(run.read and not run.holds(tensor) for run in tensor.runs)

    def take_back(self, tensor: Lent) -> None:
        """Notes that all readers of a tensor are submitted; begins the next copies."""
        after = self._parts.copy.guards(tensor.extent)
        for run in tensor.runs:
            run.read -= 1
            run.released = after
        if self._tensors.get((tensor.stack.number, tensor.index)) is not tensor:
            for run in tensor.runs:  # the room was given back
                _hold(run, run.read > 0)
            return
        for other, run in tensor.next:
            if other.number > tensor.number:
                self._fill(other, run)
            else:  # copies for the next pass, if any; waiting for this one excludes them
                self._postponed[other, run] = None

    # -- inside ----------------------------------------------------------

    def _divide(self, tensors: Sequence[Lent], seats: Sequence[Seat], experts: int) -> None:
        """Divides the seats of a bank into runs, and assigns them to tensors in turn."""
        edges = {edge for t in tensors for edge in (t.begin, t.begin + experts)}
        for first, last in pairwise(sorted(edges)):
            users = [t for t in tensors if t.begin <= first and last <= t.begin + experts]
            if not users:
                continue
            begin, size = seats[first].extent.offset, seats[first].extent.nbytes
            extent = Extent(begin, (last - first) * size)
            run = _Run(seats[first:last], first, extent, (*seats[first].released,))
            for tensor, other in zip(users, [*users[1:], users[0]], strict=True):
                tensor.runs.append(run)
                tensor.next.append((other, run))
            self._postponed[users[0], run] = None
        for tensor in tensors:
            tensor.next.sort(key=lambda after: (after[0].number <= tensor.number, after[0].number))

    def _usable(self, tensor: Lent) -> bool:
        """Whether rows of a tensor can be prefetched without other work before that."""
        parts, block_id = self._parts, tensor.stack.block.id
        record = parts.table.get(block_id)
        return (
            record is not None
            and tensor.stack.stamp == record.stamp
            and record.home is Tier.DRAM
            and record.at_home is State.VALID
            and record.in_hbm in (State.ABSENT, State.VALID)
            and not parts.evictor.rules.is_held(record)
            and block_id not in parts.deferred
        )

    def _fill(self, tensor: Lent, run: _Run) -> None:
        """Begins the copies of a tensor's rows to a run, unless they are there."""
        if not run.read and not run.holds(tensor) and self._usable(tensor):
            self._copy(tensor, run)

    def _copy(self, tensor: Lent, run: _Run) -> None:
        """Begins the copies of rows of a tensor to a run."""
        parts, stack = self._parts, tensor.stack
        home = parts.table[stack.block.id].home_extent
        if home is None:
            raise InvariantError(f"block {stack.block.name!r} has no home to be copied from")
        begin = stack.begin_of(stack.piece(tensor.index, run.first - tensor.begin))
        released = (*run.released, *(event for event in run.events if event is not None))
        events = list[Event | None]()
        run.what, run.events = None, events  # in case a copy cannot be begun
        packed = packed_part(parts, stack, begin, run.extent.nbytes)
        if packed is not None:
            target = parts.slots.arena.bytes_of(run.extent)
            events.append(copy_up(parts, target, packed, stack, released))
        for offset in range(0, run.extent.nbytes if packed is None else 0, _AT_ONCE):
            nbytes = min(_AT_ONCE, run.extent.nbytes - offset)
            source = parts.homes.part_of(home, begin + offset, nbytes)
            target = parts.slots.arena.bytes_of(Extent(run.extent.offset + offset, nbytes))
            events.append(copy_up(parts, target, source, stack, released))
        run.what, run.stamp = tensor, stack.stamp


def _hold(run: _Run, held: bool) -> None:
    """Notes whether the bytes of a run are kept after the expert room is given back."""
    for seat in run.seats:
        seat.inside = held
