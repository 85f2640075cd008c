"""Keeps disks busy while HBM has no room: they read ahead into DRAM, or begin one read early."""

from __future__ import annotations

from collections.abc import Set

from tiermem.core.block import Tier, align_up
from tiermem.core.residency import Record
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.lookahead.walks import Fetcher
from tiermem.runtime.parts import Parts
from tiermem.transfer.file.mover import FileMover


class DiskAhead:
    """Keeps the disk busy while HBM has no room; does nothing without an NVMe tier.

    Attributes:
        through_dram: Whether blocks are read from files through DRAM.
        shared: Whether a plan decides the use of spare DRAM; otherwise the order of use does.
        parks: Whether the next read straight into HBM begins before it has a place there.
    """

    def __init__(self, parts: Parts, fetcher: Fetcher) -> None:
        """Works on ``parts``; ``fetcher`` says which reads are due."""
        self.through_dram = True
        self.shared = False
        self.parks = False
        self._parts = parts
        self._fetcher = fetcher
        self._ahead = parts.transfers.ahead
        self._read_to = 0
        self._parked_to = 0
        # blocks that are read from files again and again in this pass; None if others are, too
        self._streamed: frozenset[int] | None = None

    @property
    def reads_into(self) -> str:
        """Where blocks that stream from files are read into: ``"hbm"``, ``"dram"``, ``"none"``."""
        if self._parts.mover is None:
            return "none"
        return "dram" if self._fetcher.beside and self.through_dram else "hbm"

    def plan(self, schedule: Schedule, outlook: StreamPlan) -> None:
        """Follows a plan from now on, and divides spare DRAM as it says."""
        plan, mover = outlook.plan, self._parts.mover
        if self._parts.planner.last < 0:
            self._ahead.begin_pass()
        self.shared = plan.in_dram is not None and self._fetcher.beside
        self.parks = self.shared and plan.parks and mover is not None and mover.parks
        beside = self._fetcher.beside and mover is not None
        self._streamed = self._leaving(schedule, plan.residents) if beside else None
        if not self.shared or plan.in_dram is None:
            self.through_dram = outlook.through_dram or not self._fetcher.beside
            self._ahead.share(None)
            return
        self.through_dram = False
        self._ahead.share(self._sizes(plan.in_dram), mover, plan.residents)

    def repair(self) -> None:
        """Forgets the plan, after an exception anywhere."""
        self.shared = self.parks = False

    def restart(self, cursor: int) -> None:
        """Visits every use again from a cursor on."""
        self._read_to = self._parked_to = cursor

    def take_up(self, block_id: int, cursor: int) -> None:
        """Handles the reads that the disk has finished.

        Args:
            block_id: The block used last.
            cursor: The present position of the compute.
        """
        transfers, ahead = self._parts.transfers, self._ahead
        if transfers.flights or ahead.reading:
            transfers.poll()
        if ahead.staged:
            ahead.used(block_id, cursor)
        if ahead.unsettled and ahead.lay_out(self._parts.mover):
            self.restart(cursor)  # there are places now for what was passed over

    def go_on(self, schedule: Schedule, begin: int, end: int, cursor: int) -> None:
        """Begins what the disk can do now for the uses from ``begin`` to ``end``.

        Args:
            schedule: The schedule.
            begin: The first use for which HBM has no room yet.
            end: The use up to which to look.
            cursor: The position of the compute.
        """
        mover = self._parts.mover
        if mover is None:
            return
        if (self.through_dram or self.shared) and not self._all_staged():
            self._read_on(schedule, begin, end, cursor, mover)
        if self.parks:
            self._park(schedule, begin, end, mover)

    def staged(self, record: Record, position: int) -> bool:
        """Whether a block at home in a file can be fetched to HBM now.

        A read straight into HBM uses staging chunks, which wait for the compute that used the slot
        before, and the disk waits with them. So with a GPU, blocks are read into spare DRAM first,
        if the plan says so or there is no plan.

        Args:
            record: The block.
            position: Uses until it is needed.

        Returns:
            False while it is being read into DRAM; True if it is there, or has to be read straight
            into HBM.
        """
        ahead, mover = self._ahead, self._parts.mover
        entry = ahead.look(record)
        if entry is None and mover is not None and self._fetcher.beside and self._by_dram(record):
            planner = self._parts.planner
            schedule, cursor = planner.schedule, planner.cursor
            ahead.begin(record, mover, schedule, cursor, cursor + position)
            entry = ahead.look(record)
        return entry is None or entry.transfer is None or entry.transfer.finished

    def stage_now(self, record: Record) -> bool:
        """Begins to read a block for which a caller waits; returns whether it begins only now."""
        ahead = self._ahead
        begins = ahead.look(record) is None
        if begins and record.home is Tier.NVME:
            self.staged(record, 0)
        return begins

    def _by_dram(self, record: Record) -> bool:
        """Whether a block should be read into DRAM first."""
        return self._ahead.keeps(record.block.id) if self.shared else self.through_dram

    def _read_on(
        self, schedule: Schedule, begin: int, end: int, cursor: int, mover: FileMover
    ) -> None:
        """Reads blocks for which HBM has no room yet into spare DRAM."""
        table, ahead, order = self._parts.table, self._ahead, schedule.order
        position = max(self._read_to, begin)
        if position < end:
            end = self._before_the_next_pass(schedule, begin, end)
        while position < end:
            block_id = order[position]
            if block_id not in ahead.staged:
                record = table.get(block_id)
                if (
                    record is not None
                    and record.home is Tier.NVME
                    and self._by_dram(record)
                    and self._fetcher.is_due(record, schedule, position)
                    and not ahead.begin(record, mover, schedule, cursor, position)
                    and not ahead.keeps(block_id)
                ):
                    break
            position += 1
        self._read_to = position

    def _before_the_next_pass(self, schedule: Schedule, begin: int, end: int) -> int:
        """Returns the use up to which blocks may be read; reads of the present pass come first.

        Args:
            schedule: What comes.
            begin: The first use for which HBM has no room yet.
            end: The use to which to look.

        Returns:
            The end of the pass while a block in it still has to be read straight into HBM.
        """
        last = schedule.passes[1][0] if self.shared and len(schedule.passes) > 1 else 0
        for position in range(begin, min(last, end)):
            record = self._parts.table.get(schedule.order[position])
            if (
                record is not None
                and record.home is Tier.NVME
                and not self._ahead.keeps(record.block.id)
                and record.block.id not in self._ahead.staged
                and self._fetcher.is_due(record, schedule, position)
            ):
                return min(last, end)
        return end

    def _park(self, schedule: Schedule, begin: int, end: int, mover: FileMover) -> None:
        """Begins to read the next block that goes straight into HBM."""
        table, ahead, order = self._parts.table, self._ahead, schedule.order
        position = max(self._parked_to, begin)
        while position < end:
            record = table.get(order[position])
            if (
                record is not None
                and record.home is Tier.NVME
                and record.block.id not in ahead.staged
                and not ahead.keeps(record.block.id)
                and record.block.id not in self._fetcher.lent
                and self._fetcher.is_due(record, schedule, position)
            ):
                if record.block.id not in ahead.parked:
                    ahead.park(record, mover)
                break
            position += 1
        self._parked_to = position

    def _leaving(self, schedule: Schedule, residents: Set[int]) -> frozenset[int] | None:
        """Returns the blocks at home in files that stream; None while residents are missing."""
        if self._parts.mover is None:
            return frozenset()
        table, found = self._parts.table, []
        for block_id in set(schedule.order):
            record = table.get(block_id)
            if record is not None and record.home is Tier.NVME:
                if block_id not in residents:
                    found.append(block_id)
                elif not record.usable:
                    return None
        return frozenset(found)

    def _all_staged(self) -> bool:
        """Whether everything that streams from files is in DRAM or being read into it."""
        return self._streamed is not None and self._streamed <= self._ahead.staged.keys()

    def _sizes(self, blocks: Set[int]) -> dict[int, int]:
        """Returns the bytes of those blocks whose home is a file."""
        records = (self._parts.table.get(block) for block in sorted(blocks))
        return {r.block.id: align_up(r.block.nbytes) for r in records if r and r.home is Tier.NVME}
