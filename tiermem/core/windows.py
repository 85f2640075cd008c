"""Finds the best run of bytes of a store to clear: gaps, and extents that would have to leave."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from tiermem.core.block import Extent, align_up
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


class WindowSearch:
    """Finds windows in a store; changes nothing.

    Attributes:
        capacity: Bytes of the store.
        alignment: Every extent begins and ends on a multiple of it.
    """

    capacity: int
    alignment: int
    _taken: dict[int, int]
    """Bytes of each extent that is handed out, and of each wall, by offset."""
    _order: list[int]
    """Their offsets, ascending."""
    _gaps: list[tuple[int, int]]
    """Offset and bytes of the free runs, ascending."""

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

    def cheapest_window(
        self,
        nbytes: int,
        cost: Callable[[int], float | None],
        low: int = 0,
        high: int | None = None,
    ) -> Window | None:
        """Finds the run of gaps and extents that is cheapest to clear.

        Two pointers over the segments in address order: linear in their number. Prices are
        added as integers, so that an expensive extent leaves no rounding error behind when it
        drops out of the window.

        Args:
            nbytes: Bytes wanted; rounded up to the alignment.
            cost: Price of evicting the extent at an offset, 0 or more; None where it must stay.
            low: First byte that the window may have.
            high: End of the bytes that it may have; None for the end of the store.

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
        """Grows a window from one extent, by the cheaper neighbour each time, until it is enough.

        It visits only the window and its neighbours, not the whole store.

        Args:
            offset: Offset of the extent from which it grows.
            nbytes: Bytes wanted; rounded up to the alignment.
            cost: Price of evicting the extent at an offset, 0 or more; None where it must stay.
            low: First byte that the window may have.
            high: End of the bytes that it may have; None for the end of the store.

        Returns:
            A window around the extent, or None if there is none.
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

    def next_run(
        self, start: int, nbytes: int, leaves: Callable[[int], bool], end: int | None = None
    ) -> tuple[int, list[int]] | None:
        """Finds the first run of gaps and extents that may leave at or behind an address.

        If runs are handed out one behind the other, the store is used as a ring buffer: the next
        extents to leave are those that have been there longest.

        Args:
            start: First byte that the run may have; if none is found, the search continues at 0.
            nbytes: Bytes wanted; rounded up to the alignment.
            leaves: Returns whether the extent at an offset may leave.
            end: Latest end of the run; by default the end of the store.

        Returns:
            Its first byte, and the offsets of the extents inside, ascending; None if there is
            no such run.
        """
        whole = nbytes > 0 and not nbytes % self.alignment
        size, last = nbytes if whole else self._size(nbytes), self.capacity if end is None else end
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
            return begin, victims
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
        return align_up(nbytes, self.alignment) if nbytes % self.alignment else nbytes
