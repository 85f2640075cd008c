"""How HBM is divided between blocks that stay and blocks that stream."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.core.block import Block, align_up
from tiermem.core.residency import Record, ResidencyTable
from tiermem.core.slots import all_fit, slots_in

Part = tuple[int, int]


class Regions:
    """Divides HBM into the region of blocks that stay and runs for blocks that stream.

    Attributes:
        residents: Blocks that should stay during the present loop.
        border: Offset where the region of residents begins.
        parts: Bounds of the runs of HBM that other blocks stream through.
        slot: Bytes of the largest block that streams through slots; 0 if none does.
        changes: How often the set of permanent blocks in HBM has changed.
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
        """Uses all of HBM for streaming, until :meth:`keep` is called again."""
        self.border = self._capacity = self._table.hbm.capacity
        self.slot = 0
        self.parts = [(0, self.border)]
        self.residents = frozenset()

    def keep(self, residents: frozenset[int], slot: int) -> bool:
        """Divides HBM again.

        Residents are at the end, side by side. The rest is used in slots of one size, each of
        which holds one or several whole blocks: blocks of many sizes would leave holes too small
        for the next. Or each size has its own slots.

        Args:
            residents: Blocks that shall stay from now on.
            slot: Bytes of the largest of the others.

        Returns:
            Whether the division has changed.
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
        """Notes that the permanent blocks have changed: :meth:`keep` divides the rest again."""
        self._capacity = -1
        self.changes += 1

    def parts_for(self, block: Block) -> list[Part]:
        """Returns the bounds of the runs of HBM where a block may be placed."""
        if block.id in self.residents:
            return [(self.border, self._table.hbm.capacity)]
        return self.parts

    def stays(self, record: Record) -> bool:
        """Whether a block stays in HBM, so that it need not be written home."""
        extent = record.extent
        shall = record.block.id in self.residents
        return shall and extent is not None and extent.offset >= self.border

    def misplaced(self, record: Record) -> bool:
        """Whether a block in HBM is outside the runs where it belongs, at least in part."""
        extent = record.extent
        if extent is None:
            return False
        if record.block.id in self.residents:
            return extent.offset < self.border
        return extent.end > self.border

    @property
    def kept(self) -> int:
        """Bytes of the blocks that stay in HBM."""
        records = map(self._table.get, self.residents)
        return sum(r.block.nbytes for r in records if r is not None and self.stays(r))

    @property
    def complete(self) -> bool:
        """Whether all residents are in HBM, at any place."""
        records = map(self._table.get, self.residents)
        return all(r is None or r.extent is not None for r in records)

    def rest_fits(self, placed: Sequence[Record]) -> bool:
        """Whether the residents that are not in their region yet fit between those that are.

        Args:
            placed: The residents in their region, by offset.
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
        """Returns the runs below the border without permanent blocks, ascending."""
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
