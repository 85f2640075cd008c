"""Points in time on the streams: set without waiting, and read once they have passed."""

from __future__ import annotations

import time
from typing import Any, Protocol

from tiermem.core.block import Extent
from tiermem.transfer.copy import Event
from tiermem.transfer.streams import CudaCopyEngine

Stamp = Any
"""A point in time, as the clock that set it knows it."""

_MOST_EVENTS = 1 << 14


class Clock(Protocol):
    """Sets stamps and reads the time between them; nothing here makes the host wait."""

    def stamp(self) -> Stamp | None:
        """Marks where the current compute stream is; None where it cannot be marked now."""
        ...

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> Stamp | None:
        """Marks where the copies up are.

        Args:
            extent: Where the next one goes to: the mark is set after the wait for that; None
                after a copy.
            after: What it waits for besides.
        """
        ...

    def passed(self, stamp: Stamp) -> bool:
        """Whether that point in time has passed."""
        ...

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Returns the seconds between two points that have passed."""
        ...

    def free(self, stamp: Stamp) -> None:
        """Frees a stamp that is not asked about again; after an exception maybe once more."""
        ...

    def usable(self) -> bool:
        """Whether stamps may be set and asked about now."""
        ...

    def host(self) -> float:
        """Returns the host's time in seconds, where passes may be told apart by it; else 0."""
        ...

    def prepare(self, stamps: int) -> None:
        """Makes what so many stamps need, so that the first ones take no longer than others."""
        ...


class HostClock:
    """For ``device="cpu"``: the compute and the copies are on the host's time."""

    def stamp(self) -> Stamp | None:
        """Returns the time."""
        return time.perf_counter_ns()

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> Stamp | None:
        """Returns the time."""
        return time.perf_counter_ns()

    def passed(self, stamp: Stamp) -> bool:
        """Returns True: time on the host passes by itself."""
        return True

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Returns the difference."""
        return float(end - begin) / 1e9

    def free(self, stamp: Stamp) -> None:
        """Nothing to keep."""

    def usable(self) -> bool:
        """Returns True."""
        return True

    def host(self) -> float:
        """Returns 0: what else the cores do would look like a change."""
        return 0.0

    def prepare(self, stamps: int) -> None:
        """Nothing to make."""


class CudaClock:
    """Timing events on the compute stream and on the stream of the copies up.

    Events are made once and used again. While a CUDA graph is captured none is set or asked
    about: it would become part of the graph, or end the capture.
    """

    def __init__(self, engine: CudaCopyEngine) -> None:
        """Times the streams of ``engine``."""
        self._engine = engine
        self._calls = engine.calls
        self._up = engine.up_stream.cuda_stream
        self._free: set[int] = set()
        self._made = 0

    def stamp(self) -> Stamp | None:
        """Records an event on the current stream; None when too many are out."""
        return self._record(self._calls.current())

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> Stamp | None:
        """Records an event on the stream of the copies up, after what the next copy waits for."""
        if extent is not None:
            self._engine.prepare_up(extent)
            if after is not None:
                self._calls.wait(self._up, after)
        return self._record(self._up)

    def passed(self, stamp: Stamp) -> bool:
        """Asks the event, which does not wait."""
        return self._calls.passed(stamp)

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Reads the time between two events."""
        return self._calls.seconds(begin, end)

    def free(self, stamp: Stamp) -> None:
        """Keeps the event for the next stamp."""
        self._free.add(stamp)

    def host(self) -> float:
        """Returns the host's time, which in a steady state goes at the device's pace."""
        return time.perf_counter()

    def usable(self) -> bool:
        """Whether no CUDA graph is captured on the current stream."""
        return not self._engine.capturing()

    def prepare(self, stamps: int) -> None:
        """Makes events until there are so many."""
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
