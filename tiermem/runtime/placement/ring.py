"""Allocating HBM in a ring: the block that has been there longest leaves first.

In a loop that writes the blocks it streams (steps of an optimizer), the block that was just used
has the furthest next use, and by that rule it would leave first. But its copy home has just begun,
so its place is free last: copies to HBM would wait for copies home, and compute for both, with most
of HBM idle. The block that has been there longest is already home. If HBM holds a small part of the
loop, hardly a byte more moves.
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
        uses: A block that is used again within so many uses stays; 0 if there is no ring.
        at: Lowest offset of the next place; whoever takes a place advances it.
    """

    def __init__(
        self, table: ResidencyTable, planner: Planner, regions: Regions, order: LeavingOrder
    ) -> None:
        """Begins at the first byte.

        Args:
            table: The residency table.
            planner: Knows when blocks are used again.
            regions: The ring ends where the region of residents begins.
            order: Knows which blocks may leave.
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
        """Begins a pass where an earlier one with the same schedule began.

        So blocks get the same places in every round, for which slots already exist.

        Args:
            uses: A block that is used again within so many uses stays; 0 for no ring.
            number: Number of the pass; only the first call for it moves the ring.
            schedule: The schedule of the pass.
        """
        self.uses = uses
        if not uses or number == self._pass:
            return
        self._pass = number
        self.at = self._starts.setdefault(schedule, self.at)
        if len(self._starts) > _MOST_STARTS:
            del self._starts[next(iter(self._starts))]

    def next_run(self, nbytes: int, position: int | None) -> tuple[int, list[int]] | None:
        """Returns where the next place of ``nbytes`` begins, and which blocks to evict from it.

        There are none if it is free, usually as the rest of a larger place.

        Args:
            nbytes: Size of the place.
            position: Uses until it is needed; None if now.

        Returns:
            Its offset, and those of the blocks; None if a block there is needed soon, or must
            not leave.
        """
        end = self._regions.border  # the first byte behind the ring
        if self.at + nbytes > end:
            self.at = 0
        soon = self._planner.cursor + (position or 0) + self.uses
        leaves = partial(self._order.unused_until, position=soon)
        return self._hbm.next_run(self.at, nbytes, leaves, end)
