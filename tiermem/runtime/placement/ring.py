"""Handing HBM out in a ring: what has been there longest leaves first.

In a loop that writes what it streams (steps of an optimizer), what was just used has the furthest
next use of all, and by that rule it would leave first. But it has just begun to go down, and so its
place is free last: copies up would wait for copies down, and compute for both, with most of HBM
idle. What has been there longest is down already. Where HBM holds a small part of the loop, hardly
a byte more moves.
"""

from __future__ import annotations

from functools import partial

from tiermem.core.residency import ResidencyTable
from tiermem.core.schedule import Planner, Schedule
from tiermem.runtime.placement.leaving import LeavingOrder
from tiermem.runtime.placement.regions import Regions

_MOST_STARTS = 32


class Ring:
    """Finds the next place in HBM, in the order of addresses, and the blocks to evict from it.

    Attributes:
        uses: What is used again within so many uses stays; 0 where HBM is not handed out so.
        at: Where the next place begins at the earliest: who takes one moves it on behind that.
    """

    def __init__(
        self, table: ResidencyTable, planner: Planner, regions: Regions, order: LeavingOrder
    ) -> None:
        """Begins at the first byte.

        Args:
            table: Where the blocks are.
            planner: Knows when blocks are used again.
            regions: The ring ends where the region of what stays begins.
            order: Says which blocks may leave.
        """
        self.uses = 0
        self._hbm = table.hbm
        self._planner = planner
        self._regions = regions
        self._order = order
        self.at = 0
        self._pass = -1
        self._starts: dict[Schedule, int] = {}

    def begin(self, uses: int, number: int, schedule: Schedule) -> None:
        """Begins a pass, where one of the same schedule has begun before.

        So blocks come to the same places in every round, where their slots are known already.

        Args:
            uses: What is used again within so many uses stays; 0 for no ring.
            number: Of the pass; only its first call moves the ring.
            schedule: What comes.
        """
        self.uses = uses
        if not uses or number == self._pass:
            return
        self._pass = number
        self.at = self._starts.setdefault(schedule, self.at)
        if len(self._starts) > _MOST_STARTS:
            del self._starts[next(iter(self._starts))]

    def next_run(self, nbytes: int, position: int | None) -> tuple[int, list[int]] | None:
        """Returns where the next place of ``nbytes`` begins, and whom to evict from it.

        That is nobody where it is free: as a rule it is what a larger block has left behind it.

        Args:
            nbytes: Bytes wanted.
            position: Uses until they are needed; None for now.

        Returns:
            Its offset, and those of the blocks; None where a block there is needed soon, or may
            not leave.
        """
        end = self._regions.border  # the first byte behind the ring
        if self.at + nbytes > end:
            self.at = 0
        soon = self._planner.cursor + (position or 0) + self.uses
        leaves = partial(self._order.unused_until, position=soon)
        return self._hbm.next_run(self.at, nbytes, leaves, end)
