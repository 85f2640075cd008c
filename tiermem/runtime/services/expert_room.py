"""The expert room: one block with HBM as home, divided into seats for pieces of experts.

It takes HBM that other blocks leave free, and is given back as soon as one of them needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from tiermem.core.block import Block, Extent, Role, align_up
from tiermem.core.experts import Seats, share_out
from tiermem.core.layout import TensorShape
from tiermem.core.residency import ResidencyTable
from tiermem.errors import CapacityError
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Bank, Seat, Stack, sizes_of, small_pieces

_NAME = "expert room"
_SHRINK = 0.5
_LEAST = 1 / 64
_LONGEST = 256
"""Maximal number of passes after which a share that was reduced is increased again."""
_FAR_LARGER = 2
"""Blocks that may be far larger than others, and are used one at a time: embedding and head."""
_SLOTS = 3
"""Slots for the other blocks: one is used, one is being fetched and one leaves."""
_SPARE = 64
"""One such part of HBM is left free beside all other blocks, for temporary use."""


class ExpertRoom:
    """The expert room, if there is one; under the manager's lock.

    Attributes:
        block: Its block; None if there is no room.
        banks: Banks by the bytes of a seat.
        bank_of: Bank by stack and tensor.
        seats: Seats by the address of their first byte.
        device: The device of the seats; unknown before the first room.
        share: The room takes at most this share of what other blocks leave free.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Starts without a room."""
        self._manager = manager
        self._parts = manager.parts
        self.block: Block | None = None
        self.banks: dict[int, Bank] = {}
        self.bank_of: dict[tuple[int, int], Bank] = {}
        self.seats: dict[int, Seat] = {}
        self.device = self._parts.device
        self.share = 1.0
        self._quiet = 0  # passes since the room was last given back, or grew
        self._patience = 4
        self._capacity = self._gradients = 0
        self._whole: frozenset[int] = frozenset()

    def suits(self, whole: frozenset[int], gradients: int | None) -> bool:
        """Whether an existing room leaves enough for a pass; a new room always does.

        Args:
            whole: Stacks, by the id of their blocks, that are copied whole in the pass.
            gradients: Bytes of gradients that backward will add; None if unknown.
        """
        capacity, wider = self._parts.table.hbm.capacity, not whole <= self._whole
        more = gradients is not None and gradients > self._gradients
        suits = capacity == self._capacity and not wider and not more and not self._grow()
        self._capacity, self._whole = capacity, self._whole | whole
        if gradients is not None:
            self._gradients = gradients
        return suits

    def make(
        self, stacks: Iterable[Stack], worth: Callable[[Any], float], *, tensors: bool = False
    ) -> bool:
        """Creates the room; returns whether there is space for it.

        Args:
            stacks: The stacks for whose pieces it has seats.
            worth: Returns the value of having a piece there.
            tensors: Whether it is for whole tensors.
        """
        stacks = list(stacks)
        counts = self.counts(stacks, tensors=tensors)
        if counts is None:
            return False
        parts, least = self._parts, self._parts.limit.least
        nbytes = sum(size * count for size, count in counts.items())
        shape = TensorShape(_NAME, (nbytes,), (1,), torch.uint8, 1)
        try:
            [block] = self._manager.add_blocks([(_NAME, Role.BUFFER, [shape])], home="hbm")
        except CapacityError:
            self.shrink()
            return False
        finally:
            parts.limit.least = least  # it gives way
        parts.table[block.id].still = True  # seats know their addresses
        self.block = block
        parts.table.give_way.add(block.id)
        given = small_pieces(stacks) if tensors else counts  # rows of whole tensors take the rest
        self._divide(parts.slots.current[block.id].extent, counts, given, worth)
        for stack in stacks:
            for tensor in range(len(stack.block.tensors)):
                bank = self.banks[align_up(stack.nbytes(tensor))]
                self.bank_of[stack.number, tensor] = bank
        return True

    def counts(self, stacks: Iterable[Stack], *, tensors: bool = False) -> dict[int, int] | None:
        """Returns how many seats it would have, by their bytes; None without space.

        Args:
            stacks: The stacks for whose pieces it has seats.
            tensors: Whether it is for whole tensors: for each size, room for at least one.
        """
        stacks = list(stacks)
        sizes = sizes_of(stacks, tensors=tensors)
        least = sum(size * few for size, (_, few) in sizes.items())
        room = int(self._spare(stacks, least) * self.share) // 4096 * 4096
        return None if self.share <= _LEAST else share_out(room, sizes)

    def give_back(self) -> None:
        """Gives the room back; no piece is seated there, and no copy to it is in progress."""
        room, parts = self.block, self._parts
        if room is None:
            return
        parts.copy.synchronize()
        seen = [seat for seat in self.seats.values() if seat.aliased]
        slot = parts.slots.current[room.id]
        keep = slot.bytes.detach() if seen else None  # so that the bytes stay as they are
        self._manager.remove_blocks([room])
        self._forget()
        if keep is not None and parts.table.get(room.id) is None:  # otherwise the manager is closed
            parts.evictor.leave_behind(slot.extent, seen)

    def shrink(self) -> None:
        """Halves the share that the next room takes.

        The need for the space may have been a single event: after some passes the share is doubled
        again, each time after twice as many, as that drops all seated pieces.
        """
        self.share *= _SHRINK
        self._quiet, self._patience = 0, min(2 * self._patience, _LONGEST)

    def _grow(self) -> bool:
        """Counts a pass; returns whether the share has grown."""
        self._quiet += 1
        if self.share >= 1 or self._quiet < self._patience:
            return False
        self.share, self._quiet = self.share / _SHRINK, 0
        return True

    def repair(self) -> None:
        """Gives the room back after an exception anywhere; no operation is in progress."""
        table = self._parts.table
        if self.block is not None and table.get(self.block.id) is None:
            self._forget()
        self.give_back()
        self._manager.remove_blocks([r.block for r in table if r.block.name == _NAME])

    def _forget(self) -> None:
        self.block, self.banks, self.bank_of, self.seats = None, {}, {}, {}

    def _divide(
        self,
        whole: Extent,
        counts: Mapping[int, int],
        given: Mapping[int, int],
        worth: Callable[[Any], float],
    ) -> None:
        """Divides the room into banks of seats, and assigns the first seats of each to pieces."""
        offset, before = whole.offset, self._parts.copy.guards(whole)
        with outside_inference():
            for size, count in counts.items():
                seats = []
                for _ in range(count):
                    extent = Extent(offset, size)
                    seat = Seat(self._parts.slots.arena.bytes_of(extent), extent)
                    seat.released, self.device = before, seat.bytes.device
                    seats.append(seat)
                    self.seats[seat.address] = seat
                    offset += size
                self.banks[size] = Bank(seats, Seats(given.get(size, 0), size, worth))

    def _spare(self, stacks: Iterable[Stack], least: int) -> int:
        """Returns the bytes of HBM that are not needed for other blocks; 0 if all fit.

        Args:
            stacks: The stacks.
            least: Bytes of the smallest number of seats.
        """
        table = self._parts.table
        if table.nbytes <= table.hbm.capacity:
            return 0
        others = sorted(beside(table, {stack.block.id for stack in stacks} - self._whole))
        room, gradients = table.hbm.capacity - table.fixed_nbytes(), self._gradients
        # blocks that fit stay; otherwise a few slots are needed
        rest = room - sum(others) - gradients - room // _SPARE
        largest = others[-1] if others else 0
        slots = largest + _SLOTS * max(others[:-_FAR_LARGER], default=0)
        beside_slots = room - slots - gradients
        few = max(least, min(room // 4, beside_slots)) if beside_slots >= least else 0
        return max(rest, min(room // 2, room - 4 * largest), few, 0)


def beside(table: ResidencyTable, by_rows: Collection[int]) -> list[int]:
    """Returns the bytes of the weights and buffers that may move, except some stacks."""
    return [
        align_up(record.block.nbytes)
        for record in table
        if not record.fixed
        and record.block.id not in by_rows
        and record.block.role in (Role.PARAM, Role.BUFFER)
    ]
