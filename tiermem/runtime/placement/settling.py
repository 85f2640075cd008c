"""Which blocks are in the wrong region of HBM after a round of a loop."""

from __future__ import annotations

from tiermem.core.residency import Record, ResidencyTable
from tiermem.runtime.placement.regions import Regions

_ATTEMPTS = 3
_MOST_LOOPS = 16


class Settling:
    """Finds the blocks to evict so that residents get side by side in their region."""

    def __init__(self, table: ResidencyTable, regions: Regions) -> None:
        """Starts without a loop.

        Args:
            table: The residency table.
            regions: Which region each block belongs in.
        """
        self._table = table
        self._regions = regions
        self._attempts = 0
        self._streamed = False
        self._loops: dict[object, None] = {}

    def try_again(self) -> None:
        """Allows as many attempts as at first, since HBM has been divided again."""
        self._attempts = 0

    def repair(self) -> None:
        """Forgets the loops, after an exception anywhere."""
        self._loops.clear()
        self._attempts = 0
        self._streamed = False

    def misplaced(self, loop: object, *, streams: bool) -> tuple[list[Record], bool]:
        """Returns the blocks that should leave now, to be fetched into the right region later.

        A block that is in use stays; it is checked again in the next round.

        Args:
            loop: The current loop; no block has to leave before its second round.
            streams: Whether blocks stream beside residents. Until they do, in this loop or another,
                a resident may be anywhere.

        Returns:
            Those blocks, and whether the gaps between residents are too small for the missing ones.
        """
        self._streamed |= streams
        if loop not in self._loops:  # a loop of several passes has one schedule for each
            self._loops[loop] = None
            if len(self._loops) > _MOST_LOOPS:
                del self._loops[next(iter(self._loops))]
            self._attempts = 0
            return [], False
        regions = self._regions
        if not regions.residents or self._attempts >= _ATTEMPTS:
            return [], False
        if not self._streamed and regions.complete:
            self._attempts = _ATTEMPTS
            return [], False
        misplaced, placed = self._look()
        loose = not regions.rest_fits(placed)
        self._attempts = self._attempts + 1 if misplaced or loose else _ATTEMPTS
        return misplaced, loose

    def _look(self) -> tuple[list[Record], list[Record]]:
        """Returns the blocks in the wrong region, and the residents in theirs, by offset."""
        misplaced, placed = [], []
        for extent in self._table.hbm.extents():
            record = self._table.at(extent.offset)
            if record is None or record.fixed or not record.usable:
                continue
            if self._regions.misplaced(record):
                misplaced.append(record)
            elif record.block.id in self._regions.residents:
                placed.append(record)
        return misplaced, placed
