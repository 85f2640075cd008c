"""Stacked tensors in HBM as a whole, row after row, in seats of the expert room.

Where tokens choose all experts of every layer, nothing waits for a router: tensors are used in
turn, and what is read next is copied as soon as there is room for some of it. Of the tensors of
one size some stay; the rest share what is left (:func:`tiermem.core.experts.whole_tensors`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tiermem.core.block import Extent, Tier, align_up
from tiermem.core.experts import moved_whole, whole_tensors
from tiermem.core.layout import contiguous_stride
from tiermem.core.residency import State
from tiermem.runtime.memory.expert_seats import Bank, Seat, Stack, small_pieces, stamp_of
from tiermem.runtime.memory.slots import typed_view
from tiermem.runtime.parts import Parts

_AT_ONCE = 64 << 20
"""Bytes of one copy at most: what others wait for comes between."""


@dataclass(eq=False)
class _Rows:
    """Seats of one size that follow each other.

    Attributes:
        seats: All of them.
        what: By seat, the tensor that has a row there, and which bytes that was copied from.
        read: By seat, how many calls are about to read it.
    """

    seats: Sequence[Seat]
    what: list[tuple[Lent, tuple[Any, ...]] | None]
    read: list[int]


@dataclass(eq=False)
class Lent:
    """A tensor of a stack, and where its rows are to be while it is used.

    Attributes:
        stack: The stack.
        index: Which of the block's tensors.
        number: In the order of use.
        rows: Where.
        begin: Its first seat there.
        next: Tensors that have a row after it in the same seats: the first of these, and the last.
    """

    stack: Stack
    index: int
    number: int
    rows: _Rows
    begin: int
    next: list[tuple[Lent, int, int]] = field(default_factory=list)

    @property
    def seats(self) -> range:
        """Which seats it uses."""
        return range(self.begin, self.begin + self.stack.experts)


def moved(stacks: Iterable[Stack], counts: Mapping[int, int]) -> int | None:
    """Returns the bytes that a pass moves that uses tensors as wholes; None where it cannot.

    Args:
        stacks: In the order of use.
        counts: Seats by their bytes.
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
    """Returns the tensors that have rows, by the bytes of a seat for one."""
    found: dict[int, list[tuple[Stack, int]]] = {}
    for stack in stacks:
        for index in stack.rows:
            found.setdefault(align_up(stack.nbytes(index)), []).append((stack, index))
    return found


class WholeTensors:
    """Brings tensors up as wholes; under the manager's lock."""

    def __init__(self, parts: Parts) -> None:
        """Starts with no tensor laid out."""
        self._parts = parts
        self._tensors: dict[tuple[int, int], Lent] = {}
        self._postponed: dict[tuple[Lent, int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def clear(self) -> None:
        """Forgets what is where: the expert room is given back."""
        self._tensors, self._postponed = {}, {}

    def repair(self) -> None:
        """Notes, after an exception anywhere, that nobody is about to read anything."""
        for tensor in self._tensors.values():
            for seat in tensor.seats:
                tensor.rows.read[seat] = 0
                tensor.rows.seats[seat].inside = False

    def lay_out(self, stacks: Iterable[Stack], banks: Mapping[int, Bank]) -> None:
        """Gives each tensor seats, which are empty; none where :func:`moved` finds no room.

        Args:
            stacks: In the order of use.
            banks: Of seats, by the bytes of one; the first of each are for small pieces.
        """
        stacks = list(stacks)
        if moved(stacks, {size: len(bank.seats) for size, bank in banks.items()}) is None:
            return
        small = small_pieces(stacks)
        used = [(stack.number, index) for stack in stacks for index in stack.rows]
        number = {name: number for number, name in enumerate(used)}
        for size, tensors in _by_size(stacks).items():
            seats = banks[size].seats[small[size] :]
            rows = _Rows(seats, [None] * len(seats), [0] * len(seats))
            abreast = len(tensors) > len(stacks)
            begins = whole_tensors(len(tensors), tensors[0][0].experts, len(seats), abreast=abreast)
            assert begins is not None
            placed = [
                Lent(stack, index, number[stack.number, index], rows, begin)
                for (stack, index), begin in zip(tensors, begins, strict=True)
            ]
            for place, tensor in enumerate(placed):
                tensor.next = list(_next(tensor, placed[place + 1 :] + placed[: place + 1]))
                self._tensors[tensor.stack.number, tensor.index] = tensor
            left = set(range(len(seats)))
            for tensor in placed:
                for run in _runs(sorted(left.intersection(tensor.seats))):
                    self._postponed[tensor, run.start, run.stop] = None
                left.difference_update(tensor.seats)

    def begin(self) -> None:
        """Begins the copies that were left to the begin of a pass."""
        postponed, self._postponed = self._postponed, {}
        for tensor, first, last in sorted(postponed, key=lambda after: after[0].number):
            self._fill(tensor, first, last)

    def lend(self, stack: Stack, index: int) -> tuple[Lent, torch.Tensor] | None:
        """Returns a whole tensor, to be read by what is submitted to the current stream next.

        Its caller has seen that the stack's home is current, and calls :meth:`take_back` then.

        Returns:
            What :meth:`take_back` is to be given, and the tensor; None where there is none in the
            seats.
        """
        tensor = self._tensors.get((stack.number, index))
        if tensor is None or self._parts.table[stack.block.id].home is not Tier.DRAM:
            return None
        rows, here = tensor.rows, (tensor, stack.stamp)
        missing = [seat for seat in tensor.seats if rows.what[seat] != here]
        if any(rows.read[seat] for seat in missing):
            return None  # another thread is about to read what is there
        for run in _runs(missing):
            self._copy(tensor, run)
        for event in dict.fromkeys(rows.seats[seat].event for seat in tensor.seats):
            self._parts.copy.use(event)
        for seat in tensor.seats:
            rows.read[seat] += 1
            rows.seats[seat].inside = True  # the bytes outlive the room
        spec, extent = stack.block.tensors[index], _extent(rows, tensor.seats)
        with torch.inference_mode(False):
            storage = self._parts.slots.arena.bytes_of(extent).untyped_storage()
            dtype: Any = spec.dtype
            view = typed_view(storage, dtype, 0, spec.shape, contiguous_stride(spec.shape))
        return tensor, view

    def is_read(self, stack: Stack, index: int) -> bool:
        """Whether a tensor has no room as long as other threads read what is there."""
        tensor = self._tensors.get((stack.number, index))
        if tensor is None:
            return False
        rows = tensor.rows
        return any(
            rows.read[seat] and rows.what[seat] != (tensor, stack.stamp) for seat in tensor.seats
        )

    def take_back(self, tensor: Lent) -> None:
        """Notes that all that reads a tensor is submitted; begins the copies of what comes next."""
        rows = tensor.rows
        after = self._parts.copy.guards(_extent(rows, tensor.seats))
        for seat in tensor.seats:
            rows.read[seat] -= 1
            rows.seats[seat].inside = rows.read[seat] > 0
            rows.seats[seat].released = after
        if self._tensors.get((tensor.stack.number, tensor.index)) is not tensor:
            return  # the room was given back
        for other, first, last in tensor.next:
            if other.number > tensor.number:
                self._fill(other, first, last)
            else:  # of the next pass, if there is one: whoever waits for this one waits for less
                self._postponed[other, first, last] = None

    # -- inside ----------------------------------------------------------

    def _usable(self, tensor: Lent) -> bool:
        """Whether rows of a tensor can be copied ahead of their use, with nothing done before."""
        parts, block_id = self._parts, tensor.stack.block.id
        record = parts.table.get(block_id)
        return (
            record is not None
            and tensor.stack.stamp == stamp_of(record)
            and record.home is Tier.DRAM
            and record.at_home is State.VALID
            and record.in_hbm in (State.ABSENT, State.VALID)
            and not parts.evictor.rules.is_held(record)
            and block_id not in parts.deferred
        )

    def _fill(self, tensor: Lent, first: int, last: int) -> None:
        """Begins the copies of a tensor's rows to some seats, as far as they are not there."""
        rows, here = tensor.rows, (tensor, tensor.stack.stamp)
        if self._usable(tensor):
            seats = range(first, last)
            for run in _runs(s for s in seats if rows.what[s] != here and not rows.read[s]):
                self._copy(tensor, run)

    def _copy(self, tensor: Lent, seats: range) -> None:
        """Begins the copies of rows of a tensor to seats that follow each other."""
        most = max(1, _AT_ONCE // tensor.rows.seats[0].extent.nbytes)
        for first in range(seats.start, seats.stop, most):
            self._copy_up(tensor, range(first, min(seats.stop, first + most)))

    def _copy_up(self, tensor: Lent, seats: range) -> None:
        parts, started, stack, rows = self._parts, time.perf_counter_ns(), tensor.stack, tensor.rows
        record, extent = parts.table[stack.block.id], _extent(rows, seats)
        begin = stack.begin_of(stack.piece(tensor.index, seats.start - tensor.begin))
        assert record.home_extent is not None
        source = parts.homes.part_of(record.home_extent, begin, extent.nbytes)
        behind = {event: None for seat in seats for event in rows.seats[seat].released}
        written = parts.transfers.home_ready.get(stack.block.id)
        if written is not None:
            behind[written] = None
        for seat in seats:
            rows.what[seat] = None  # should the copy not begin
        target = parts.slots.arena.bytes_of(extent)
        event = parts.copy.up_behind(target, source, behind)
        for seat in seats:
            rows.seats[seat].event = event
            rows.what[seat] = tensor, stack.stamp
        ended = time.perf_counter_ns()
        parts.counters.moved("dram->hbm", extent.nbytes, ended - started)
        parts.counters.copy_ns += ended - started
        parts.timeline.enter(("dram->hbm", stack.block.name, started, ended, extent.nbytes))


def _extent(rows: _Rows, seats: range) -> Extent:
    """Returns where seats that follow each other are in HBM."""
    first = rows.seats[seats.start].extent
    return Extent(first.offset, len(seats) * first.nbytes)


def _next(tensor: Lent, others: Sequence[Lent]) -> Iterator[tuple[Lent, int, int]]:
    """Yields the tensors that are the next in a tensor's seats, and in which of them."""
    left = set(tensor.seats)
    for other in others:
        for run in _runs(sorted(left.intersection(other.seats))):
            yield other, run.start, run.stop
        left.difference_update(other.seats)


def _runs(seats: Iterable[int]) -> Iterator[range]:
    """Yields the numbers, which ascend, as ranges."""
    run = range(0)
    for seat in seats:
        if seat != run.stop or not run:
            if run:
                yield run
            run = range(seat, seat + 1)
        else:
            run = range(run.start, seat + 1)
    if run:
        yield run
