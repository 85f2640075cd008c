"""Allocates bytes of a store: which are taken (extents) and which are free (gaps)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Protocol

from tiermem.core.block import ALIGNMENT, Extent
from tiermem.core.copied import CopiedRuns
from tiermem.core.windows import Window, WindowSearch
from tiermem.errors import InvariantError

__all__ = ["Allocator", "Backing", "Window"]

_NO_GAP = (-1, 0)


class Backing(Protocol):
    """The memory behind a store's addresses, not all of which need to have memory."""

    def back(self, extent: Extent) -> bool:
        """Maps memory behind an extent where there is none; returns whether all of it has some."""
        ...

    def missing(self) -> Sequence[Extent]:
        """Returns the runs that have no memory behind them, by offset."""
        ...


class Allocator(WindowSearch):
    """Extents in ``[0, capacity)``: best fit, lowest address first, gaps joined at once.

    Everything is deterministic, so that a repeated sequence of requests gets
    the same addresses again.

    If memory is mapped only when addresses are handed out, mapping may fail. From then on the runs
    without memory are *walls*: they are neither handed out nor part of a window to clear, until
    :meth:`open_walls`.

    Attributes:
        copied: Free bytes that, since compute last used them, only copies out of them have used.
    """

    def __init__(
        self, capacity: int, alignment: int = ALIGNMENT, backing: Backing | None = None
    ) -> None:
        """Starts empty.

        Args:
            capacity: Bytes, rounded down to a multiple of ``alignment``.
            alignment: Every extent begins and ends on a multiple of it.
            backing: Maps the memory; None if all of it is there already.
        """
        self.capacity = capacity // alignment * alignment
        self.alignment = alignment
        self._backing = backing
        self.copied = CopiedRuns()
        self._walls: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._order: list[int] = []
        self._gaps: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self.used = 0
        self.peak = 0

    @property
    def count(self) -> int:
        """How many extents are handed out."""
        return len(self._taken) - len(self._walls)

    @property
    def walled(self) -> int:
        """Bytes of walls: not handed out, since they have no memory."""
        return sum(self._walls.values())

    def has_gap(self, nbytes: int) -> bool:
        """Whether that many bytes are free in one run; they may not be aligned."""
        return any(size >= nbytes for _, size in self._gaps)

    def holds(self, extent: Extent) -> bool:
        """Whether ``extent`` is one that was handed out."""
        taken = self._taken.get(extent.offset) == extent.nbytes
        return taken and extent.offset not in self._walls

    def gaps(self) -> list[Extent]:
        """Returns the free runs by address; no two of them touch."""
        return [Extent(offset, size) for offset, size in self._gaps]

    def extents(self) -> Iterable[Extent]:
        """Yields the allocated extents by address, and the walls."""
        for offset in self._order:
            yield Extent(offset, self._taken[offset])

    def is_wall(self, offset: int) -> bool:
        """Whether a wall begins at an offset."""
        return offset in self._walls

    def allocate(self, nbytes: int) -> Extent | None:
        """Takes the smallest gap that fits.

        Args:
            nbytes: Requested bytes, above zero; rounded up to the alignment.

        Returns:
            The extent, or None where no gap is large enough.
        """
        return self.allocate_in(nbytes, [(0, self.capacity)])

    def allocate_in(self, nbytes: int, parts: Sequence[tuple[int, int]]) -> Extent | None:
        """Takes bytes within one of several runs, in the smallest gap that fits.

        Args:
            nbytes: Requested bytes, above zero; rounded up to the alignment.
            parts: First byte of each run and the first behind it, ascending.

        Returns:
            The extent, or None where no run has a gap that is large enough, with memory for it.
        """
        size = self._size(nbytes)
        while (start := self._best(size, parts)) is not None:
            extent = Extent(start, size)
            if self._backed(extent):
                return self.take(extent)
        return None

    def _best(self, size: int, parts: Sequence[tuple[int, int]]) -> int | None:
        """Returns the offset of the smallest gap within some runs that is large enough."""
        best: tuple[int, int] | None = None
        for offset, gap in self._gaps:
            if gap < size:
                continue
            for low, high in parts[max(0, bisect_right(parts, (offset, self.capacity)) - 1) :]:
                if low >= offset + gap:
                    break
                start = max(offset, low)
                room = min(offset + gap, high) - start
                if room >= size and (best is None or room < best[1]):
                    best = (start, room)
        return None if best is None else best[0]

    def back(self, extent: Extent) -> bool:
        """Maps memory behind bytes that are or will be taken; returns whether that succeeded."""
        return self._backing is None or self._backing.back(extent)

    def take(self, extent: Extent) -> Extent:
        """Takes exactly ``extent``, which must be free and have memory (:meth:`back`).

        Raises:
            InvariantError: If any byte of it is taken, or it is empty or not aligned.
        """
        if extent.nbytes <= 0 or extent.offset % self.alignment or extent.nbytes % self.alignment:
            raise InvariantError(f"{extent} cannot be handed out")
        index = bisect_left(self._gaps, (extent.offset + 1,)) - 1
        offset, size = self._gaps[index] if index >= 0 else (0, 0)
        end = extent.offset + extent.nbytes
        if index < 0 or offset + size < end:
            raise InvariantError(f"{extent} is not free")
        rest = []
        if offset < extent.offset:
            rest.append((offset, extent.offset - offset))
        if end < offset + size:
            rest.append((end, offset + size - end))
        self._gaps[index : index + 1] = rest
        return self._take(extent)

    def take_at(self, offset: int, nbytes: int) -> Extent | None:
        """Takes bytes from an address on, if all of them are free.

        Args:
            offset: First byte, on the alignment.
            nbytes: Requested bytes, above zero; rounded up to the alignment.

        Returns:
            The extent, or None where any byte of it is taken, or has no memory.
        """
        whole = nbytes > 0 and not nbytes % self.alignment
        size = nbytes if whole else self._size(nbytes)
        gaps = self._gaps
        index = bisect_right(gaps, (offset, self.capacity)) - 1
        if index < 0:
            return None
        start, room = gaps[index]
        behind = start + room - offset - size
        if behind < 0:
            return None
        extent, backing = Extent(offset, size), self._backing
        if backing is not None and not backing.back(extent):
            self._wall_off(backing, extent)
            return None
        rest = [(offset + size, behind)] if behind else []
        gaps[index : index + 1] = [(start, offset - start), *rest] if start < offset else rest
        return self._take(extent)

    def retake(self, extent: Extent, made: Extent) -> bool:
        """Frees an extent and takes another one that begins at the same offset, in one operation.

        Args:
            extent: One that was handed out.
            made: The extent to take instead; it has the same offset and may be shorter or longer.

        Returns:
            Whether it succeeded. If any byte that is needed behind ``extent`` is taken or has no
            memory, it does not, and nothing is changed.

        Raises:
            InvariantError: If ``extent`` was not handed out, or the other is not possible.
        """
        start, before, size, gaps = extent.offset, extent.nbytes, made.nbytes, self._gaps
        if self._taken.get(start) != before or start in self._walls:
            raise InvariantError(f"{extent} was not allocated")
        if made.offset != start or size <= 0 or size % self.alignment:
            raise InvariantError(f"{made} cannot be handed out where {extent} was")
        if size > before and self._backing is not None and not self._backed(made):
            return False
        end = start + before
        index = bisect_left(gaps, (end,))
        gap = gaps[index] if index < len(gaps) else _NO_GAP
        behind = gap[1] if gap[0] == end else 0
        left = before + behind - size
        if left < 0:
            return False
        gaps[index : index + (behind > 0)] = [(start + size, left)] if left else ()
        self.copied.take(start, start + size)
        self.copied.give_back(start)
        self._taken[start] = size
        self.used += size - before
        if self.used > self.peak:
            self.peak = self.used
        return True

    def free(self, extent: Extent, *, copied: bool = False) -> None:
        """Gives an extent back.

        Args:
            extent: One that was handed out.
            copied: Whether, since compute last used it, only a copy out of it has used it.

        Raises:
            InvariantError: If it is not one that was handed out.
        """
        start, nbytes = extent.offset, extent.nbytes
        if self._taken.get(start) != nbytes or start in self._walls:
            raise InvariantError(f"{extent} was not allocated")
        self.used -= nbytes
        self._open(start, nbytes)
        self.copied.give_back(start)
        if copied:
            self.copied.add(start, start + nbytes)

    def _open(self, start: int, nbytes: int) -> None:
        """Makes a taken run a gap, and joins it with its neighbours."""
        del self._taken[start]
        del self._order[bisect_left(self._order, start)]
        gaps = self._gaps
        first = last = bisect_left(gaps, (start,))
        end = start + nbytes
        if first:
            before, size = gaps[first - 1]
            if before + size == start:
                first, start = first - 1, before
        if last < len(gaps):
            behind, size = gaps[last]
            if behind == end:
                last, end = last + 1, behind + size
        gaps[first:last] = [(start, end - start)]

    def resize(self, capacity: int) -> None:
        """Changes the capacity; extents that have been handed out stay where they are.

        Args:
            capacity: Bytes, as for a new one.

        Raises:
            InvariantError: If anything lies behind the new end.
        """
        self.open_walls()
        self.copied.clear()
        end, old = capacity // self.alignment * self.alignment, self.capacity
        if self._order and self._order[-1] + self._taken[self._order[-1]] > end:
            raise InvariantError(f"a store of {old} bytes cannot end at {end}: it is in use there")
        begin = old
        if self._gaps and sum(self._gaps[-1]) == old:
            begin = self._gaps.pop()[0]
        if begin < end:
            self._gaps.append((begin, end - begin))
        self.capacity = end

    def open_walls(self) -> bool:
        """Turns all walls into gaps, so that mapping is tried again; returns if there were any."""
        walls, self._walls = self._walls, {}
        for offset, nbytes in walls.items():
            self._open(offset, nbytes)
            self.copied.give_back(offset)
        return bool(walls)

    def _backed(self, extent: Extent) -> bool:
        """Maps memory behind an extent that will be taken; makes walls where that fails."""
        backing = self._backing
        if backing is None or backing.back(extent):
            return True
        self._wall_off(backing, extent)
        return False

    def _wall_off(self, backing: Backing, extent: Extent) -> None:
        """Makes walls of the parts of an extent for which mapping failed."""
        for run in backing.missing():
            for gap in self.gaps_in(run.offset, run.end):
                self._walls[gap.offset] = gap.nbytes
                used, peak = self.used, self.peak
                self.take(gap)
                self.used, self.peak = used, peak
        if all(not self._cut(run, extent) for run in backing.missing()):
            raise InvariantError(f"{extent} has memory, and it was refused")

    @staticmethod
    def _cut(one: Extent, other: Extent) -> bool:
        return one.offset < other.end and other.offset < one.end

    def rebuild(self, extents: Iterable[Extent]) -> None:
        """Replaces the set of extents that are handed out; walls are opened.

        Args:
            extents: No two of them overlap.

        Raises:
            InvariantError: If two overlap, or one reaches past the capacity.
        """
        ordered = sorted(extents, key=lambda extent: extent.offset)
        gaps, at = [], 0
        for extent in ordered:
            if extent.offset < at or extent.end > self.capacity:
                raise InvariantError(f"{extent} overlaps another, or the end")
            if extent.offset > at:
                gaps.append((at, extent.offset - at))
            at = extent.end
        if at < self.capacity:
            gaps.append((at, self.capacity - at))
        self._walls = {}
        self.copied.clear()
        self._taken = {extent.offset: extent.nbytes for extent in ordered}
        self._order = [extent.offset for extent in ordered]
        self._gaps = gaps
        self.used = sum(extent.nbytes for extent in ordered)

    def _take(self, extent: Extent) -> Extent:
        offset, nbytes = extent.offset, extent.nbytes
        self._taken[offset] = nbytes
        if self.copied.runs:
            self.copied.take(offset, offset + nbytes)
        insort(self._order, offset)
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used
        return extent
