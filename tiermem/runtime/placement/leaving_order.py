"""Blocks in HBM in the order in which they may leave: what is used last comes first."""

from __future__ import annotations

from collections.abc import Callable

from tiermem.core.residency import ResidencyTable
from tiermem.core.schedule import Planner
from tiermem.core.victims import NextUseQueue
from tiermem.runtime.placement.regions import Regions


class LeavingOrder:
    """Keeps a queue by next use in step with the planner, without looking at every block."""

    def __init__(self, table: ResidencyTable, planner: Planner, regions: Regions) -> None:
        """Starts with nothing known.

        Args:
            table: Who is in HBM.
            planner: Knows the next uses.
            regions: Knows which blocks are in HBM to stay; they are not in the queue.
        """
        self._table = table
        self._planner = planner
        self._regions = regions
        self._queue = NextUseQueue()
        self._reached = 0
        self._stale: set[int] = set()

    def note_use(self, block_id: int) -> None:
        """Says that a block was used or has come into HBM, so that its next use is another."""
        self._stale.add(block_id)

    def note_departure(self, block_id: int) -> None:
        """Says that a block has left HBM."""
        self._queue.drop(block_id)
        self._stale.discard(block_id)

    def lose_track(self) -> None:
        """Says that blocks come and go unannounced: the queue is made anew when it is asked."""
        self._queue.schedule = None

    def repair(self) -> None:
        """Forgets everything, after an exception anywhere."""
        self._stale.clear()
        self.lose_track()

    def last(self, most: int, beyond: int, accept: Callable[[int], bool]) -> list[int]:
        """Returns up to ``most`` acceptable blocks, the one used last first.

        Args:
            most: How many to look for.
            beyond: Only blocks used after this position of the schedule count.
            accept: Whether the block of an id may leave now.
        """
        return self._queue.last(most, beyond, accept)

    def catch_up(self) -> None:
        """Orders what is in HBM by the schedule of now."""
        queue, planner, residents = self._queue, self._planner, self._regions.residents
        if queue.schedule is planner.schedule and planner.cursor >= self._reached:
            for block_id in self._stale:
                if block_id not in residents:
                    queue.put(block_id, planner.cursor)
        else:
            inside = (self._table.at(extent.offset) for extent in self._table.hbm.extents())
            loose = (r.block.id for r in inside if r is not None and not r.fixed)
            queue.rebuild(
                planner.schedule, planner.cursor, [b for b in loose if b not in residents]
            )
        self._stale.clear()
        self._reached = planner.cursor
