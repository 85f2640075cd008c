"""Slides blocks together in HBM when what is free lies in pieces.

Blocks in use cannot be evicted, but most can be moved: those that are seen only
through parameters, which can be pointed anew. So a budget that holds what is in
use at one time is enough, wherever its pieces happen to lie. It is a last resort:
the device is waited for before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tiermem.core.block import Extent, align_up
from tiermem.core.residency import Record
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.runtime.metrics.counters import Counters
    from tiermem.runtime.placement.evictor import Evictor

_BOUNCE = 4 << 20


@dataclass(frozen=True, slots=True)
class _Slide:
    """A block on its way to a lower address.

    Attributes:
        record: The block.
        source: Where it was.
        target: Where it goes.
        begin: How many of its bytes are there.
        piece: The bytes from there on, which the target may have been written over with already.
    """

    record: Record
    source: Slot
    target: Slot
    begin: int
    piece: torch.Tensor | None


class Compactor:
    """Joins free pieces of HBM."""

    def __init__(self, space: Evictor, counters: Counters) -> None:
        """Works for ``space``, under its lock."""
        self._space = space
        self._counters = counters
        self._sliding: _Slide | None = None

    def gather(self, nbytes: int, keep: Record | None = None) -> bool:
        """Makes one gap of ``nbytes`` by evicting and moving blocks; nothing may be under way.

        Args:
            nbytes: Bytes wanted.
            keep: A block that is not to be evicted, although it could be.

        Returns:
            Whether there is such a gap now.

        Raises:
            StorageError: If what must leave cannot be written.
        """
        space = self._space
        hbm = space.table.hbm
        size = align_up(nbytes)
        region = self._best_region(size, keep)
        if region is None:
            return False
        start, records = region
        space.clear(
            [r.extent.offset for r in records if r.extent is not None and self._leaves(r, keep)],
            wait=True,
        )
        space.traffic.copy.synchronize()
        for record in records:
            extent = record.extent
            if extent is None:
                continue
            seen = space.slots.current[record.block.id].aliased
            if extent.offset != start and not (seen or self._held(record)):
                space.unpoint(record)  # pointed at without a lease of its own: it can let go
            target = Extent(start, extent.nbytes)
            if extent.offset != start and space.movable(record) and hbm.back(target):
                self._slide(record, start)
                start += extent.nbytes
            else:  # where it is already, or found in use meanwhile
                start = extent.end
        space.traffic.copy.synchronize()
        return hbm.largest_gap >= size

    def _best_region(self, size: int, keep: Record | None) -> tuple[int, list[Record]] | None:
        """Returns where the run between two immovable blocks begins that needs the fewest moves."""
        table = self._space.table
        best: tuple[int, int, list[Record]] | None = None
        start, stays, inside = 0, 0, list[Record]()
        for extent in [*table.hbm.extents(), None]:
            record = None if extent is None else table.at(extent.offset)
            if extent is not None and record is not None:
                leaves = self._leaves(record, keep)
                if leaves or self._space.movable(record):
                    inside.append(record)
                    stays += 0 if leaves else extent.nbytes
                    continue
            end = table.hbm.capacity if extent is None else extent.offset
            if end - start - stays >= size and (best is None or stays < best[0]):
                best = (stays, start, inside)
            if extent is not None:
                start, stays, inside = extent.end, 0, []
        return None if best is None else (best[1], best[2])

    def _held(self, record: Record) -> bool:
        holder = self._space.holders.get(record.block.id)
        return holder is not None and holder.leases() > 0

    def _leaves(self, record: Record, keep: Record | None) -> bool:
        if record is keep or record.extent is None:
            return False
        return self._space.price(record.extent.offset, None) is not None

    def _slide(self, record: Record, offset: int) -> None:
        """Moves a block to a lower address, which may overlap the one it has."""
        space = self._space
        block, old = record.block, record.extent
        if old is None:
            return
        source = space.slots.current[block.id]
        pointed = source.pointed
        target = space.slots.slot(block, Extent(offset, old.nbytes))
        self._move(_Slide(record, source, target, 0, None))
        space.table.relocate(block.id, offset)
        space.slots.enter(block, target.extent)
        holder = space.holders.get(block.id)
        if holder is not None and (pointed or holder.leases()):
            holder.repoint(target)
        source.pointed = 0
        self._sliding = None
        space.traffic.ready.pop(block.id, None)
        space.traffic.changes += 1
        space.traffic.quiet = False
        self._counters.relocations += 1

    def finish(self) -> None:
        """Finishes a move that an exception cut short: half of the bytes may be at either place.

        The allocator is not told: its owner makes it anew from where the blocks are.
        """
        slide = self._sliding
        if slide is None:
            return
        self._move(slide)
        record, target = slide.record, slide.target
        self._space.traffic.copy.synchronize()
        record.extent = target.extent
        holder = self._space.holders.get(record.block.id)
        if holder is not None and (slide.source.pointed or holder.leases()):
            holder.repoint(target)
        slide.source.pointed = 0
        self._sliding = None

    def _move(self, slide: _Slide) -> None:
        """Copies what is left of a block's bytes.

        The two places may overlap, so a piece that has been written cannot be read again: it is
        kept until the next one is. Cut short anywhere, this can go on with the slide kept last.
        """
        source, target = slide.source.bytes, slide.target.bytes
        begin, piece = slide.begin, slide.piece
        with torch.no_grad(), torch.inference_mode(False):
            while begin < target.numel():
                if piece is None:
                    piece = source[begin : begin + _BOUNCE].clone()
                self._sliding = replace(slide, begin=begin, piece=piece)
                target[begin : begin + piece.numel()].copy_(piece)
                begin += piece.numel()
                piece = None
