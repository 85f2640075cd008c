"""Which copies may still be under way where."""

from __future__ import annotations

from tiermem.core.block import Extent
from tiermem.transfer.driver import Signal

_FENCES = 16


class Fences:
    """Copies from or to HBM on one stream that may not be over yet, by where they begin.

    Attributes:
        fences: End and event of each, by where it begins.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.fences: dict[int, tuple[int, Signal]] = {}
        self._most = _FENCES

    def add(self, extent: Extent, event: Signal) -> None:
        """Remembers a copy until a later one takes its place, or there are many."""
        fences = self.fences
        offset = extent.offset
        end = offset + extent.nbytes
        before = fences.pop(offset, None)
        if before is not None and before[0] > end:
            end = before[0]
        fences[offset] = (end, event)  # the last in order: copies of a stream end in order
        if len(fences) > self._most:
            self._tidy()

    def last(self, extent: Extent) -> Signal | None:
        """Returns the last copy that touches ``extent``; the earlier ones are over when it is."""
        first = extent.offset
        behind = first + extent.nbytes
        for start, (end, event) in reversed(self.fences.items()):
            if start < behind and first < end:
                return event
        return None

    def _tidy(self) -> None:
        """Forgets the copies that are over."""
        for start, (_, event) in list(self.fences.items()):
            if event.done():
                del self.fences[start]
        self._most = max(_FENCES, 2 * len(self.fences))
