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
    from tiermem.runtime.space import Space


_MOST_STARTS = 32


class Turns:
    """The circle through HBM.

    Attributes:
        uses: What is used again within so many uses stays; 0 where there is no circle.
    """

    def __init__(self, space: Space, planner: Planner) -> None:
        """Begins at the first byte.

        Args:
            space: Whose HBM it is, and who may leave it; this is its part, under its lock.
            planner: Knows when blocks are used again.
        """
        self.uses = 0
        self._space = space
        self._planner = planner
        self._at = 0
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
        space, hbm, soon = self._space, self._space.table.hbm, position or 0

        def leaves(offset: int) -> bool:
            record = space.table.at(offset)
            if record is None or space.price(offset, soon) is None:
                return False
            return self._planner.distance(record.block.id) > soon + self.uses

        window = hbm.next_window(self._at, block.nbytes, leaves)
        if window is None or not space.clear(window.victims, wait=position is None):
            return None
        if not hbm.is_free(window.extent):
            return None
        self._at = window.extent.end
        return hbm.take(window.extent)
