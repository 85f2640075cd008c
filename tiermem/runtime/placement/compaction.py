"""Slides blocks together in HBM when the free space is fragmented.

Blocks in use cannot be evicted, but most can be moved: those that are accessed only
through parameters, which can be pointed anew. So a budget that holds what is in
use at the same time is enough, even if the free space is fragmented. It is a last resort:
it waits for the device before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tiermem.core.block import Extent, align_up
from tiermem.core.residency import Record, ResidencyTable
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.slots import Slot, SlotCache
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.placement.leaving import LeaveRules, Why
from tiermem.runtime.placement.regions import Regions
from tiermem.runtime.transfers.transfers import Transfers

_BOUNCE = 4 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of HBM between two blocks that cannot be moved, with enough room.

    Attributes:
        start: Its first byte.
        records: The blocks inside, by offset.
        leaving: Offsets of those blocks that can leave.
    """

    start: int
    records: list[Record]
    leaving: list[int]


@dataclass(frozen=True, slots=True)
class _Slide:
    """A block that is being moved to a lower address.

    Attributes:
        record: The block.
        source: Where it was.
        target: Where it is moved to.
        begin: How many of its bytes have been moved.
        piece: The bytes from there on, which may already be overwritten at the source.
    """

    record: Record
    source: Slot
    target: Slot
    begin: int
    piece: torch.Tensor | None


class Compactor:
    """Joins free pieces of HBM."""

    def __init__(
        self,
        table: ResidencyTable,
        slots: SlotCache,
        transfers: Transfers,
        rules: LeaveRules,
        regions: Regions,
        counters: Counters,
    ) -> None:
        """Moves blocks of ``table``, under its lock, as far as ``rules`` permit."""
        self._table = table
        self._slots = slots
        self._transfers = transfers
        self._rules = rules
        self._regions = regions
        self._counters = counters
        self._sliding: _Slide | None = None

    def best_stretch(
        self, nbytes: int, keep: Record | None = None, *, failing: bool = False
    ) -> Stretch | None:
        """Returns where one gap of ``nbytes`` can be made with the fewest bytes moved.

        Args:
            nbytes: Bytes wanted.
            keep: A block that must not leave, although it could.
            failing: Whether blocks may leave whose last write-back failed.

        Returns:
            None if there is no such run. The caller evicts the blocks in ``leaving``, then
            calls :meth:`join`, which moves the rest.
        """
        table, size = self._table, align_up(nbytes)
        best: tuple[int, Stretch] | None = None
        stays, inside = 0, Stretch(0, [], [])
        for extent in [*table.hbm.extents(), None]:
            record = None if extent is None else table.at(extent.offset)
            if extent is not None and record is not None:
                leaves = record is not keep and self._rules.may_leave(record, Why.NEEDED)
                leaves = leaves and (failing or not self._rules.is_failing(record.block.id))
                if leaves or self._rules.movable(record):
                    inside.records.append(record)
                    if leaves:
                        inside.leaving.append(extent.offset)
                    stays += 0 if leaves else extent.nbytes
                    continue
            end = table.hbm.capacity if extent is None else extent.offset
            if end - inside.start - stays >= size and (best is None or stays < best[0]):
                best = (stays, inside)
            if extent is not None:
                stays, inside = 0, Stretch(extent.end, [], [])
        return None if best is None else best[1]

    def pack(self, begin: int) -> None:
        """Slides the blocks after an offset together, as far as fixed blocks allow."""
        table = self._table
        stretch = Stretch(begin, [], [])
        for extent in [*table.hbm.extents(), None]:
            if extent is not None and extent.offset < begin:
                stretch = Stretch(max(begin, extent.end), [], [])
                continue
            record = None if extent is None else table.at(extent.offset)
            if record is not None:
                stretch.records.append(record)
                continue
            if stretch.records:
                self.join(stretch)
            if extent is not None:
                stretch = Stretch(extent.end, [], [])

    def join(self, stretch: Stretch) -> None:
        """Moves the remaining blocks of a run to its begin; no transfer may be in progress."""
        self._transfers.copy.synchronize()
        start = stretch.start
        for record in stretch.records:
            extent = record.extent
            if extent is None:
                continue
            if extent.offset != start and not self._is_needed(record):
                self._rules.unpoint(record)  # leased by its own parameters only
            target = Extent(start, extent.nbytes)
            movable = extent.offset != start and self._rules.movable(record)
            if movable and self._table.hbm.back(target):
                self._slide(record, start)
                start += extent.nbytes
            else:  # it is there already, or is in use by now
                start = extent.end
        self._transfers.copy.synchronize()

    def _is_needed(self, record: Record) -> bool:
        """Whether a view of the user's, or a call of the block's own module, uses it."""
        aliased = self._slots.current[record.block.id].aliased
        return aliased or self._rules.is_leased_by_holder(record)

    def _slide(self, record: Record, offset: int) -> None:
        """Moves a block to a lower address; the two places may overlap."""
        block, old = record.block, record.extent
        if old is None:
            return
        source = self._slots.current[block.id]
        target = self._slots.slot(block, Extent(offset, old.nbytes))
        self._move(_Slide(record, source, target, 0, None))
        self._table.relocate(block.id, offset)
        self._slots.enter(block, target.extent)
        self._rules.repoint(record, source, target)
        self._sliding = None
        self._transfers.relocated(block.id)
        if record.fixed:
            self._regions.divide_anew()  # the runs for streaming blocks are beside it
        self._counters.relocations += 1

    def finish(self) -> None:
        """Finishes a move that an exception interrupted, with half of the bytes at either place.

        The allocator is not updated: its owner rebuilds it from the places of the blocks.
        """
        slide = self._sliding
        if slide is None:
            return
        self._move(slide)
        self._transfers.copy.synchronize()
        slide.record.copied = False
        slide.record.extent = slide.target.extent
        self._rules.repoint(slide.record, slide.source, slide.target)
        self._sliding = None

    def _move(self, slide: _Slide) -> None:
        """Copies the remaining bytes of a block.

        The two places may overlap, so a piece whose source was overwritten cannot be read again: it
        is kept until the next one is. After an interruption this continues with the slide kept
        last.
        """
        source, target = slide.source.bytes, slide.target.bytes
        begin, piece = slide.begin, slide.piece
        with torch.no_grad(), outside_inference():
            while begin < target.numel():
                if piece is None:
                    piece = source[begin : begin + _BOUNCE].clone()
                self._sliding = replace(slide, begin=begin, piece=piece)
                target[begin : begin + piece.numel()].copy_(piece)
                begin += piece.numel()
                piece = None
