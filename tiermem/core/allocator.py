"""Which bytes of a store are taken: extents, gaps, and the cheapest window to clear."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from tiermem.core.block import ALIGNMENT, Extent, align_up
from tiermem.errors import InvariantError

_PRICE_UNIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Window:
    """A run of bytes that becomes free once its victims have left.

    Attributes:
        extent: The bytes that would be handed out.
        victims: Offsets of the allocated extents inside, ascending.
        cost: Sum of the victims' costs.
    """

    extent: Extent
    victims: tuple[int, ...]
    cost: float


class Backing(Protocol):
    """The memory behind a store, of which there may be less than the store has addresses."""

    def back(self, extent: Extent) -> bool:
        """Maps memory behind an extent where there is none; returns whether it has memory now."""
        ...

    def missing(self) -> Sequence[Extent]:
        """Returns the runs that have no memory behind them, by offset."""
        ...


class Allocator:
    """Extents in ``[0, capacity)``: best fit, lowest address first, gaps joined at once.

    Everything is deterministic, so that a repeated sequence of requests gets
    the same addresses again.

    Where memory comes behind the addresses only as they are handed out, it may be refused. From
    then on the runs without memory are *walls*: they are neither handed out nor part of a window
    to clear, until :meth:`open_walls`.
    """

    def __init__(
        self, capacity: int, alignment: int = ALIGNMENT, backing: Backing | None = None
    ) -> None:
        """Starts empty.

        Args:
            capacity: Bytes; what is beyond the last whole ``alignment`` is unused.
            alignment: Every extent begins and ends on a multiple of it.
            backing: The memory; None where it is there already.
        """
        self.capacity = capacity // alignment * alignment
        self.alignment = alignment
        self._backing = backing
        self._walls: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._order: list[int] = []
        self._gaps: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self.used = 0
        self.peak = 0

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest extent that could be had without evicting anything."""
        return max((size for _, size in self._gaps), default=0)

    @property
    def count(self) -> int:
        """How many extents are handed out."""
        return len(self._taken) - len(self._walls)

    @property
    def walled(self) -> int:
        """Bytes that are not handed out, since there is no memory for them."""
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

    def gaps_in(self, low: int, high: int) -> list[Extent]:
        """Returns the free runs within ``[low, high)``, by address."""
        first = max(0, bisect_left(self._gaps, (low,)) - 1)
        found = []
        for offset, size in self._gaps[first:]:
            if offset >= high:
                break
            start, end = max(offset, low), min(offset + size, high)
            if start < end:
                found.append(Extent(start, end - start))
        return found

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
            nbytes: Bytes asked for, above zero; rounded up to the alignment.

        Returns:
            The extent, or None where no gap is large enough.
        """
        return self.allocate_in(nbytes, [(0, self.capacity)])

    def allocate_in(self, nbytes: int, parts: Sequence[tuple[int, int]]) -> Extent | None:
        """Takes bytes within one of several runs, where the least is left over.

        Args:
            nbytes: Bytes asked for, above zero; rounded up to the alignment.
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
        """Returns where the smallest gap within some runs begins that is large enough."""
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
        """Maps memory behind bytes that are taken, or about to be; returns whether it could."""
        return self._backing is None or self._backing.back(extent)

    def take(self, extent: Extent) -> Extent:
        """Takes exactly ``extent``, all of which must be free and :meth:`back` with memory.

        Raises:
            InvariantError: If any byte of it is taken, or it is empty or not aligned.
        """
        if extent.nbytes <= 0 or extent.offset % self.alignment or extent.nbytes % self.alignment:
            raise InvariantError(f"{extent} cannot be handed out")
        index = bisect_left(self._gaps, (extent.offset + 1,)) - 1
        offset, size = self._gaps[index] if index >= 0 else (0, 0)
        if index < 0 or offset + size < extent.end:
            raise InvariantError(f"{extent} is not free")
        rest = []
        if offset < extent.offset:
            rest.append((offset, extent.offset - offset))
        if extent.end < offset + size:
            rest.append((extent.end, offset + size - extent.end))
        self._gaps[index : index + 1] = rest
        return self._take(extent)

    def take_at(self, offset: int, nbytes: int) -> Extent | None:
        """Takes bytes from an address on, if all of them are free.

        Args:
            offset: First byte, on the alignment.
            nbytes: Bytes asked for, above zero; rounded up to the alignment.

        Returns:
            The extent, or None where any byte of it is taken, or has no memory.
        """
        size = self._size(nbytes)
        gaps = self._gaps
        index = bisect_right(gaps, (offset, self.capacity)) - 1
        if index < 0:
            return None
        start, room = gaps[index]
        behind = start + room - offset - size
        if behind < 0:
            return None
        extent = Extent(offset, size)
        if self._backing is not None and not self._backed(extent):
            return None
        rest = [(offset + size, behind)] if behind else []
        gaps[index : index + 1] = [(start, offset - start), *rest] if start < offset else rest
        return self._take(extent)

    def retake(self, extent: Extent, nbytes: int) -> Extent | None:
        """Takes bytes where an extent begins that is given back: both in one.

        Args:
            extent: One that was handed out.
            nbytes: Bytes asked for instead, above zero; rounded up to the alignment.

        Returns:
            The new extent; None, and ``extent`` is as it was, where any byte behind it that is
            needed is taken, or has no memory.

        Raises:
            InvariantError: If ``extent`` was not handed out.
        """
        start, size, gaps = extent.offset, self._size(nbytes), self._gaps
        if self._taken.get(start) != extent.nbytes or start in self._walls:
            raise InvariantError(f"{extent} was not allocated")
        made = Extent(start, size)
        if size > extent.nbytes and self._backing is not None and not self._backed(made):
            return None
        end = start + extent.nbytes
        index = bisect_left(gaps, (end,))
        behind = gaps[index][1] if index < len(gaps) and gaps[index][0] == end else 0
        left = extent.nbytes + behind - size
        if left < 0:
            return None
        gaps[index : index + (behind > 0)] = [(start + size, left)] if left else []
        self._taken[start] = size
        self.used += size - extent.nbytes
        self.peak = max(self.peak, self.used)
        return made

    def free(self, extent: Extent) -> None:
        """Gives an extent back.

        Raises:
            InvariantError: If it is not one that was handed out.
        """
        start, nbytes = extent.offset, extent.nbytes
        if self._taken.get(start) != nbytes or start in self._walls:
            raise InvariantError(f"{extent} was not allocated")
        self.used -= nbytes
        self._open(start, nbytes)

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
        """Ends the store elsewhere; what has been handed out stays where it is.

        Args:
            capacity: Bytes, as for a new one.

        Raises:
            InvariantError: If anything lies behind the new end.
        """
        self.open_walls()
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
        """Turns all walls into gaps, to ask for memory again; returns whether there were any."""
        walls, self._walls = self._walls, {}
        for offset, nbytes in walls.items():
            self._open(offset, nbytes)
        return bool(walls)

    def _backed(self, extent: Extent) -> bool:
        """Maps memory behind an extent about to be taken; makes walls where that is refused."""
        backing = self._backing
        if backing is None or backing.back(extent):
            return True
        for run in backing.missing():
            for gap in self.gaps_in(run.offset, run.end):
                self._walls[gap.offset] = gap.nbytes
                used, peak = self.used, self.peak
                self.take(gap)
                self.used, self.peak = used, peak
        if all(not self._cut(run, extent) for run in backing.missing()):
            raise InvariantError(f"{extent} has memory, and it was refused")
        return False

    @staticmethod
    def _cut(one: Extent, other: Extent) -> bool:
        return one.offset < other.end and other.offset < one.end

    def rebuild(self, extents: Iterable[Extent]) -> None:
        """Sets which extents are handed out, whatever was before; walls are opened.

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
        self._taken = {extent.offset: extent.nbytes for extent in ordered}
        self._order = [extent.offset for extent in ordered]
        self._gaps = gaps
        self.used = sum(extent.nbytes for extent in ordered)

    def cheapest_window(
        self,
        nbytes: int,
        cost: Callable[[int], float | None],
        low: int = 0,
        high: int | None = None,
    ) -> Window | None:
        """Finds the run of gaps and extents that is cheapest to clear.

        Two pointers over the segments in address order: linear in their number. Prices are
        added as whole numbers, so that a dear extent leaves no rounding error behind when it
        drops out of the window.

        Args:
            nbytes: Bytes wanted; rounded up to the alignment.
            cost: Price of evicting the extent at an offset, 0 or more; None where it must stay.
            low: First byte that the window may have.
            high: First byte behind it that it may not; None for the end.

        Returns:
            The cheapest window (the lowest address among equals), or None.
        """
        size = self._size(nbytes)
        segments = self._segments(cost, low, self.capacity if high is None else high)
        best: tuple[int, int, int] | None = None
        left = total = price = 0
        for right, (_, length, fee, _) in enumerate(segments):
            if fee is None:
                left, total, price = right + 1, 0, 0
                continue
            total += length
            price += fee
            while total - segments[left][1] >= size:
                total -= segments[left][1]
                price -= segments[left][2] or 0
                left += 1
            if total >= size and (best is None or price < best[0]):
                best = (price, left, right)
        if best is None:
            return None
        price, left, right = best
        victims = tuple(s[3] for s in segments[left : right + 1] if s[3] >= 0)
        return Window(Extent(segments[left][0], size), victims, price / _PRICE_UNIT)

    def window_around(
        self,
        offset: int,
        nbytes: int,
        cost: Callable[[int], float | None],
        low: int = 0,
        high: int | None = None,
    ) -> Window | None:
        """Grows a window from one extent to whichever neighbour is cheaper, until it is enough.

        It looks at what it takes and its neighbours only, not at the whole store.

        Args:
            offset: Of an extent that is to be cleared.
            nbytes: Bytes wanted; rounded up to the alignment.
            cost: Price of evicting the extent at an offset, 0 or more; None where it must stay.
            low: First byte that the window may have.
            high: First byte behind it that it may not; None for the end.

        Returns:
            A window that touches the extent, or None if its neighbourhood has no such one.
        """
        size = self._size(nbytes)
        limit = self.capacity if high is None else high
        total = cost(offset)
        if total is None or offset not in self._taken:
            return None
        start, end = self._with_gaps(offset, offset + self._taken[offset], low, limit)
        victims = [offset]
        while end - start < size:
            before, after = self._neighbours(start, end)
            before = None if start <= low else before
            after = None if end >= limit else after
            prices = [
                (price, side)
                for price, side in (
                    (cost(before), before) if before is not None else (None, 0),
                    (cost(after), after) if after is not None else (None, 0),
                )
                if price is not None
            ]
            if not prices:
                return None
            price, taken = min(prices)
            total += price
            victims.append(taken)
            start, end = self._with_gaps(
                min(start, taken), max(end, taken + self._taken[taken]), low, limit
            )
        first = min(victims)
        begin = max(start, min(first, end - size), low)
        return Window(Extent(begin, size), tuple(sorted(victims)), total)

    def next_window(
        self, start: int, nbytes: int, leaves: Callable[[int], bool], end: int | None = None
    ) -> Window | None:
        """Finds the first run at or behind an address of gaps and extents that may leave.

        Handing out one such window behind the other goes through the store in circles: what
        leaves next has been there longest.

        Args:
            start: First byte that the window may have; if there is none, the search begins anew
                at 0.
            nbytes: Bytes wanted; rounded up to the alignment.
            leaves: Whether the extent at an offset may leave.
            end: Where the window ends at the latest; by default where the store does.

        Returns:
            A window at no cost, or None.
        """
        size, last = self._size(nbytes), self.capacity if end is None else end
        order, taken = self._order, self._taken
        for low in (start, 0) if start else (0,):
            index = bisect_left(order, low)
            begin = low
            if index:
                before = order[index - 1]
                begin = max(low, before + taken[before])
            victims: list[int] = []
            for offset in islice(order, index, None):
                if offset - begin >= size:
                    break
                until = offset + taken[offset]
                if leaves(offset):
                    victims.append(offset)
                    if until - begin >= size:
                        break
                else:
                    begin, victims = until, []
            if last - begin < size:
                continue
            return Window(Extent(begin, size), tuple(victims), 0.0)
        return None

    def _with_gaps(self, start: int, end: int, low: int, high: int) -> tuple[int, int]:
        """Returns a run together with the gaps that touch it, all within ``[low, high)``."""
        index = bisect_left(self._gaps, (start,))
        if index > 0 and sum(self._gaps[index - 1]) == start:
            start = self._gaps[index - 1][0]
        index = bisect_left(self._gaps, (end,))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = sum(self._gaps[index])
        return max(start, low), min(end, high)

    def _neighbours(self, start: int, end: int) -> tuple[int | None, int | None]:
        """Returns the offsets of the extents just before and just after a run."""
        index = bisect_left(self._order, start)
        before = self._order[index - 1] if index > 0 else None
        index = bisect_left(self._order, end)
        after = self._order[index] if index < len(self._order) else None
        return before, after

    def _segments(
        self, cost: Callable[[int], float | None], low: int, high: int
    ) -> list[tuple[int, int, int | None, int]]:
        """Returns the gaps and extents within bounds, by address.

        Returns:
            First byte, length and price of every gap and extent as far as it is inside, and the
            extent's own offset, or -1 for a gap.
        """
        parts: list[tuple[int, int, int | None, int]] = []
        for gap in self.gaps_in(low, high):
            parts.append((gap.offset, gap.nbytes, 0, -1))
        first = max(0, bisect_left(self._order, low) - 1)
        for offset in self._order[first:]:
            if offset >= high:
                break
            start, end = max(offset, low), min(offset + self._taken[offset], high)
            if start >= end:
                continue
            fee = cost(offset)
            price = None if fee is None else int(fee * _PRICE_UNIT)
            parts.append((start, end - start, price, offset))
        parts.sort(key=lambda part: part[0])
        return parts

    def _size(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise InvariantError(f"cannot hand out {nbytes} bytes")
        return align_up(nbytes, self.alignment)

    def _take(self, extent: Extent) -> Extent:
        offset, nbytes = extent.offset, extent.nbytes
        self._taken[offset] = nbytes
        insort(self._order, offset)
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used
        return extent
