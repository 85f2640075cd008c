"""Stamps, points in time on the streams: set without waiting, read after they have passed."""

from __future__ import annotations

import time
from typing import Any, Protocol

from tiermem.core.block import Extent
from tiermem.transfer.copy import Event
from tiermem.transfer.streams import CudaCopyEngine

Stamp = Any
"""A point in time, in the form of the clock that set it."""

_MOST_EVENTS = 1 << 14


class Clock(Protocol):
    """Sets stamps and reads the time between them; nothing here makes the host wait."""

    def stamp(self) -> Stamp | None:
        """Sets a stamp on the current compute stream; None if that is impossible now."""
        ...

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> Stamp | None:
        """Sets a stamp on the stream of copies up.

        Args:
            extent: Target of the next copy: the stamp is set after the wait for it; None
                after a copy.
            after: Another event that the copy waits for.
        """
        ...

    def passed(self, stamp: Stamp) -> bool:
        """Whether that point in time has passed."""
        ...

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Returns the seconds between two points that have passed."""
        ...

    def free(self, stamp: Stamp) -> None:
        """Frees a stamp that is no longer needed; after an exception maybe a second time."""
        ...

    def usable(self) -> bool:
        """Whether stamps may be set and read now."""
        ...

    def host(self) -> float:
        """Returns the host's time in seconds if it can distinguish passes; otherwise 0."""
        ...

    def prepare(self, stamps: int) -> None:
        """Creates what so many stamps need, so that the first ones take no longer than others."""
        ...


class HostClock:
    """For ``device="cpu"``: compute and copies are timed by the host's clock."""

    def stamp(self) -> Stamp | None:
        """Returns the time."""
        return time.perf_counter_ns()

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> Stamp | None:
        """Returns the time."""
        return time.perf_counter_ns()

    def passed(self, stamp: Stamp) -> bool:
        """Returns True: its time has always passed."""
        return True

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Returns the difference."""
        return float(end - begin) / 1e9

    def free(self, stamp: Stamp) -> None:
        """Does nothing."""

    def usable(self) -> bool:
        """Returns True."""
        return True

    def host(self) -> float:
        """Returns 0: other work of the cores would look like a change."""
        return 0.0

    def prepare(self, stamps: int) -> None:
        """Does nothing."""


class CudaClock:
    """Timing events on the compute stream and on the stream of the copies up.

    Events are created once and reused. While a CUDA graph is captured none is set or
    read: it would become part of the graph, or end the capture.
    """

    def __init__(self, engine: CudaCopyEngine) -> None:
        """Times the streams of ``engine``."""
        self._engine = engine
        self._calls = engine.calls
        self._up = engine.up_stream.cuda_stream
        self._free: set[int] = set()
        self._made = 0

    def stamp(self) -> Stamp | None:
        """Records an event on the current stream; None if too many are in use."""
        return self._record(self._calls.current())

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> Stamp | None:
        """Records an event on the stream of the copies up, after what the next copy waits for."""
        if extent is not None:
            self._engine.prepare_up(extent)
            if after is not None:
                self._calls.wait(self._up, after)
        return self._record(self._up)

    def passed(self, stamp: Stamp) -> bool:
        """Queries the event without waiting."""
        return self._calls.passed(stamp)

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Reads the time between two events."""
        return self._calls.seconds(begin, end)

    def free(self, stamp: Stamp) -> None:
        """Keeps the event for the next stamp."""
        self._free.add(stamp)

    def host(self) -> float:
        """Returns the host's time, which in a steady state follows the device."""
        return time.perf_counter()

    def usable(self) -> bool:
        """Whether no CUDA graph is captured on the current stream."""
        return not self._engine.capturing()

    def prepare(self, stamps: int) -> None:
        """Creates events until there are so many."""
        while self._made < min(stamps, _MOST_EVENTS) and self.usable():
            self._made += 1
            self._free.add(self._calls.new_event(timing=True))

    def _record(self, stream: int) -> Stamp | None:
        if not self.usable():
            return None
        if self._free:
            event = self._free.pop()
        elif self._made < _MOST_EVENTS:
            self._made += 1
            event = self._calls.new_event(timing=True)
        else:
            return None
        self._calls.mark(event, stream)
        return event
