"""How HBM is divided between what stays and what streams past it."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.core.block import Block, align_up
from tiermem.core.residency import Record, ResidencyTable
from tiermem.core.slots import all_fit, slots_in

Part = tuple[int, int]


class Regions:
    """Divides HBM into the region of blocks that stay and runs for blocks that stream.

    Attributes:
        residents: Blocks that shall stay while the present loop goes on.
        border: Offset where the part of what stays begins.
        parts: Bounds of the runs of HBM that other blocks stream through.
        slot: Bytes of the largest block that streams through slots; 0 where none does.
        changes: How often what is in HBM for good has changed.
    """

    def __init__(self, table: ResidencyTable) -> None:
        """Starts with all of the HBM of ``table`` for streaming."""
        self.residents: frozenset[int] = frozenset()
        self.border = table.hbm.capacity
        self.changes = 0
        self._table = table
        self._capacity = self.border
        self.slot = 0
        self.parts = [(0, self.border)]

    def reset(self) -> None:
        """Gives all of HBM to streaming, until :meth:`keep` is called again."""
        self.border = self._capacity = self._table.hbm.capacity
        self.slot = 0
        self.parts = [(0, self.border)]
        self.residents = frozenset()

    def keep(self, residents: frozenset[int], slot: int) -> bool:
        """Divides HBM anew.

        What stays lies at the end, side by side. The rest is used in slots of one size, which
        hold whole blocks, one or several: blocks of many sizes would leave holes too small for
        the next. Or each size has slots of its own.

        Args:
            residents: Blocks that shall stay from now on.
            slot: Bytes of the largest of the others.

        Returns:
            Whether that is another division than before.
        """
        capacity = self._table.hbm.capacity
        if (residents, slot, capacity) == (self.residents, self.slot, self._capacity):
            return False
        self._capacity = capacity
        self.residents = residents
        self.slot = slot
        self.border = capacity - sum(self._sizes(residents))
        runs = self.runs()
        parts = [part for run in runs for part in slots_in(*run, align_up(slot))]
        self.parts = parts if residents and len(parts) > 1 else [(0, self.border)]
        return True

    def divide_anew(self) -> None:
        """Notes that more or less is in HBM for good: :meth:`keep` divides the rest anew."""
        self._capacity = -1
        self.changes += 1

    def parts_for(self, block: Block) -> list[Part]:
        """Returns the bounds of the runs of HBM that a block belongs in."""
        if block.id in self.residents:
            return [(self.border, self._table.hbm.capacity)]
        return self.parts

    def stays(self, record: Record) -> bool:
        """Whether a block is there to stay, and need not be written as long as it does."""
        extent = record.extent
        shall = record.block.id in self.residents
        return shall and extent is not None and extent.offset >= self.border

    def misplaced(self, record: Record) -> bool:
        """Whether a block in HBM lies, in whole or in part, where it does not belong."""
        extent = record.extent
        if extent is None:
            return False
        if record.block.id in self.residents:
            return extent.offset < self.border
        return extent.end > self.border

    @property
    def kept(self) -> int:
        """Bytes of the blocks that are there to stay."""
        records = map(self._table.get, self.residents)
        return sum(r.block.nbytes for r in records if r is not None and self.stays(r))

    @property
    def complete(self) -> bool:
        """Whether all that shall stay is in HBM, wherever."""
        records = map(self._table.get, self.residents)
        return all(r is None or r.extent is not None for r in records)

    def rest_fits(self, placed: Sequence[Record]) -> bool:
        """Whether residents that are not in their region yet fit between those that are.

        Args:
            placed: Those that are, by offset.
        """
        there = {record.block.id for record in placed}
        runs, start = [], self.border
        for record in placed:
            if record.extent is not None:
                runs.append(record.extent.offset - start)
                start = record.extent.end
        runs.append(self._table.hbm.capacity - start)
        return all_fit(self._sizes(self.residents - there), runs)

    def runs(self) -> list[Part]:
        """Returns the runs below the border in which nothing lies for good, ascending."""
        fixed = sorted((r.extent.offset, r.extent.end) for r in self._table if r.fixed and r.extent)
        runs, start = [], 0
        for offset, end in fixed:
            if offset >= self.border:
                break
            runs.append((start, offset))
            start = end
        return [*runs, (start, max(start, self.border))]

    def _sizes(self, blocks: frozenset[int]) -> list[int]:
        records = map(self._table.get, blocks)
        return [align_up(record.block.nbytes) for record in records if record is not None]
