"""Which runs of an address space are free: best fit; freed neighbours are joined."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from tiermem.core.block import Extent


class FreeList:
    """Free runs of a space that is empty at first and can only grow.

    Offsets and lengths are bytes; the caller keeps them aligned.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self.capacity = 0
        self.used = 0

    @property
    def largest(self) -> int:
        """Bytes of the longest free run."""
        return max(self._lengths.values(), default=0)

    def grow(self, nbytes: int) -> None:
        """Adds ``nbytes`` free bytes at the end."""
        if nbytes > 0:
            self._give(self.capacity, nbytes)
            self.capacity += nbytes

    def take(self, nbytes: int) -> Extent | None:
        """Returns the best-fitting run, cut to size, or ``None`` if none is long enough."""
        best = -1
        for start in self._starts:
            length = self._lengths[start]
            if length >= nbytes and (best < 0 or length < self._lengths[best]):
                best = start
                if length == nbytes:
                    break
        if best < 0:
            return None
        self._cut(best, nbytes)
        self._taken[best] = nbytes
        self.used += nbytes
        return Extent(best, nbytes)

    def holds(self, extent: Extent) -> bool:
        """Returns whether exactly this extent is in use."""
        return self._taken.get(extent.offset) == extent.nbytes

    def give_back(self, extent: Extent) -> None:
        """Takes an extent back.

        Raises:
            ValueError: If it is not in use (or was given back already).
        """
        if not self.holds(extent):
            raise ValueError(f"{extent} is not handed out")
        del self._taken[extent.offset]
        self.used -= extent.nbytes
        self._give(extent.offset, extent.nbytes)

    def rebuild(self, extents: Iterable[Extent]) -> None:
        """Sets which extents are in use, whatever was before.

        Args:
            extents: The extents, which do not overlap.
        """
        self._starts, self._lengths, self._taken = [], {}, {}
        at = 0
        for extent in sorted(extents, key=lambda extent: extent.offset):
            if extent.offset > at:
                self._give(at, extent.offset - at)
            self._taken[extent.offset] = extent.nbytes
            at = extent.end
        if at < self.capacity:
            self._give(at, self.capacity - at)
        self.used = sum(self._taken.values())

    def _cut(self, start: int, nbytes: int) -> None:
        length = self._lengths.pop(start)
        index = bisect.bisect_left(self._starts, start)
        if length > nbytes:
            self._starts[index] = start + nbytes
            self._lengths[start + nbytes] = length - nbytes
        else:
            del self._starts[index]

    def _give(self, start: int, nbytes: int) -> None:
        index = bisect.bisect_left(self._starts, start)
        after = self._starts[index] if index < len(self._starts) else -1
        if after == start + nbytes:
            nbytes += self._lengths.pop(after)
            del self._starts[index]
        before = self._starts[index - 1] if index else -1
        if before >= 0 and before + self._lengths[before] == start:
            self._lengths[before] += nbytes
            return
        self._starts.insert(index, start)
        self._lengths[start] = nbytes
