"""Handing HBM out in circles: what has been there longest leaves first.

In a loop that writes what it streams (steps of an optimizer), what was just used has the furthest
next use of all, and by that rule it would leave first. But it has just begun to go down, and so its
place is free last: copies up would wait for copies down, and compute for both, with most of HBM
idle. What has been there longest is down already. Where HBM holds a small part of the loop, hardly
a byte more moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiermem.core.block import Block, Extent
from tiermem.core.schedule import Planner, Schedule

if TYPE_CHECKING:
    from tiermem.runtime.placement.evictor import Evictor


_MOST_STARTS = 32


class Ring:
    """The circle through HBM.

    Attributes:
        uses: What is used again within so many uses stays; 0 where there is no circle.
    """

    def __init__(self, space: Evictor, planner: Planner) -> None:
        """Begins at the first byte.

        Args:
            space: Whose HBM it is, and who may leave it; this is its part, under its lock.
            planner: Knows when blocks are used again.
        """
        self.uses = 0
        self._space = space
        self._hbm = space.table.hbm
        self._at_offset = space.table.at
        self._planner = planner
        self._at = 0
        self._stays = 0
        self._pass = -1
        self._starts: dict[Schedule, int] = {}

    def begin(self, number: int, schedule: Schedule) -> None:
        """Begins a pass where one of the same schedule has begun before.

        So blocks come to the same places in every round, where their slots are known already.

        Args:
            number: Of the pass; only its first call counts.
            schedule: What comes.
        """
        if number == self._pass:
            return
        self._pass = number
        self._at = self._starts.setdefault(schedule, self._at)
        if len(self._starts) > _MOST_STARTS:
            del self._starts[next(iter(self._starts))]

    def place(self, block: Block, position: int | None) -> Extent | None:
        """Makes room where the circle has come to, if nothing there is needed soon.

        Args:
            block: What needs it.
            position: Uses until then, for a fetch ahead, which may not wait; None for now.

        Returns:
            The place, taken; None where it has to be found by another rule.

        Raises:
            StorageError: If what must leave cannot be written.
        """
        hbm, nbytes, end = self._hbm, block.nbytes, self._space.division.border
        if block.id in self._space.residents:
            return None  # its place is not in the circle
        if self._at + nbytes > end:
            self._at = 0
        extent = hbm.take_at(self._at, nbytes)  # as a rule what a larger one has left behind it
        if extent is None:
            self._stays = self._planner.cursor + (position or 0) + self.uses
            window = hbm.next_window(self._at, nbytes, self._leaves, end)
            if window is None or not self._space.clear(window.victims, wait=position is None):
                return None
            extent = hbm.take_at(window.extent.offset, nbytes)
            if extent is None:
                return None
        self._at = extent.end
        return extent

    def _leaves(self, offset: int) -> bool:
        """Whether the block at an offset may leave; what :meth:`Evictor.price` asks."""
        record = self._at_offset(offset)
        if record is None or record.leases or record.fixed or not record.usable:
            return False
        planner, block_id, space = self._planner, record.block.id, self._space
        if planner.schedule.next_use(block_id, planner.cursor) <= self._stays:
            return False
        if block_id in space.residents or block_id in space.traffic.failing:
            return False
        slot = space.slots.current[block_id]
        return not slot.wanted and not slot.aliased
