"""Single fetches ahead of use: which are worth it, and beginning one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable

from tiermem.core.block import Tier
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.parts import Parts


class Fetcher:
    """Begins fetches of blocks that are used later.

    Attributes:
        beside: Whether copies from DRAM run beside the compute, as on a GPU. On the CPU such a
            copy is made by the thread that computes: begun early it hides behind nothing, so only
            files are worth fetching ahead.
        number: Of the pass under way.
        fill: Begins one, if that evicts nothing needed sooner: see :meth:`BlockManager.try_fill`.
    """

    def __init__(
        self, parts: Parts, lender: HostLoans, fill: Callable[[Record, int], bool]
    ) -> None:
        """Works on ``parts``.

        Args:
            parts: Of the manager.
            lender: Knows which blocks are on loan, which nothing fetches.
            fill: :meth:`BlockManager.try_fill`.
        """
        self.beside = parts.device.type == "cuda"
        self.number = 0
        self.fill = fill
        self._lender = lender
        self._planner = parts.planner
        self._waste = parts.traffic.waste
        # of the passes foreseen the one that was asked about last: begin, end, number and name
        self._pass: tuple[int, int, tuple[int, Hashable]] = (0, 0, (0, None))

    def begin_schedule(self) -> None:
        """Says that positions are of another schedule from now on."""
        self._pass = (0, 0, (0, None))

    def on_loan(self, record: Record) -> bool:
        """Whether code on the host has a block's home."""
        return self._lender.borrowers(record.block) > 0

    def is_due(self, record: Record, schedule: Schedule, position: int) -> bool:
        """Whether a block is to be fetched for its use at a position, as far as it goes."""
        if not record.defined or record.in_hbm is not State.ABSENT:
            return False
        if self._waste.stopping:
            key = self._pass_at(schedule, position)[1]
            if self._waste.stops(key, record.block.id):
                return False
        return self.beside or record.home is not Tier.DRAM

    def begin(self, record: Record, schedule: Schedule, position: int, cursor: int) -> bool:
        """Begins to fetch a block for its use at a position; returns whether there was room.

        Args:
            record: The block; :meth:`is_due` said so.
            schedule: What comes.
            position: Where in it the use is.
            cursor: Where in it the compute is.
        """
        if not self.fill(record, position - cursor):
            return False
        number, key = self._pass_at(schedule, position)
        self._waste.fetched(record.block.id, self.number + number, key)
        return True

    def _pass_at(self, schedule: Schedule, position: int) -> tuple[int, Hashable]:
        """Returns which of the passes foreseen a position is in, and that pass's name."""
        passes = schedule.passes
        if not passes:
            return 1, self._planner.key
        begin, end, found = self._pass
        if not begin <= position < end:  # as a rule it is the one asked about before
            number = bisect_right(passes, position, key=lambda entry: entry[0]) - 1
            end = passes[number + 1][0] if number + 1 < len(passes) else len(schedule)
            found = (number, passes[number][1])
            self._pass = (passes[number][0], end, found)
        return found
