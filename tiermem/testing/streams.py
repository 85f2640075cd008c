"""A device whose streams run when, and in whichever order, a test determines.

It replaces the CUDA driver below the copy engine. Work submitted
to a stream runs in order; between streams only events impose an order. So a
missing wait shows as wrong bytes, on any machine.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from tiermem.core import packedhome
from tiermem.core.packing import GROWS, PACKED_TILE, TILE, pack_tile, unpack_tile
from tiermem.transfer.hosthomes import pack_home_tile, unpack_home_tile


class _Mark:
    """A position in a stream, and whether the stream has reached it."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False


class SimulatedEvent:
    """A point in the work of a stream."""

    def __init__(self, device: SimulatedDevice) -> None:
        """Starts with a position that the stream has not reached."""
        self._device = device
        self.anew()

    def anew(self) -> _Mark:
        """Uses a new position from now on; earlier waits keep the old one."""
        self.waiter = -1
        self.mark = _Mark()
        return self.mark

    @property
    def passed(self) -> bool:
        """Whether the stream has reached it."""
        return self.mark.passed

    def done(self) -> bool:
        """Whether the stream has reached it."""
        return self.passed

    def synchronize(self) -> None:
        """Runs the device until the stream has reached it."""
        while not self.passed:
            self._device.advance()


@dataclass(slots=True)
class _Work:
    """Submitted work: what has to end before it, and what it does."""

    after: _Mark | None
    run: Callable[[], object]


class SimulatedDevice:
    """Streams over host memory, for :class:`~tiermem.transfer.streams.StreamCopyEngine`.

    Attributes:
        stream: The compute stream that is current.
        captured: Whether a graph is being captured.
    """

    def __init__(self, random: Random, stream: int = 0) -> None:
        """Starts idle.

        Args:
            random: Decides which stream runs next.
            stream: The compute stream.
        """
        self.stream = stream
        self.captured = False
        self._random = random
        self._queues: dict[int, deque[_Work]] = {}

    def current(self) -> int:
        """Returns the compute stream that is current."""
        return self.stream

    def submit(
        self, stream: int, run: Callable[[], object], after: SimulatedEvent | None = None
    ) -> None:
        """Submits anything, such as a kernel that reads memory."""
        mark = None if after is None else after.mark
        self._queues.setdefault(stream, deque()).append(_Work(mark, run))

    def record(self, stream: int, again: SimulatedEvent | None = None) -> SimulatedEvent:
        """Marks the end of what was submitted to ``stream`` so far."""
        event = SimulatedEvent(self) if again is None else again
        mark = event.anew()

        def past() -> None:
            mark.passed = True

        if self._queues.get(stream):
            self.submit(stream, past)
        else:
            past()
        return event

    def wait(self, stream: int, event: SimulatedEvent) -> None:
        """Makes ``stream`` wait for ``event`` from now on."""
        if event.waiter != stream and not event.passed:
            event.waiter = stream
            self.submit(stream, lambda: None, after=event)

    def follow(self, stream: int, other: int) -> None:
        """Makes ``stream`` wait from now on for what was submitted to ``other`` so far."""
        self.wait(stream, self.record(other))

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Submits a copy; it runs in two halves, and others may run in between."""
        half = nbytes // 2
        self.submit(stream, lambda: ctypes.memmove(target, source, half))
        self.submit(stream, lambda: ctypes.memmove(target + half, source + half, nbytes - half))

    def copy_behind(
        self,
        stream: int,
        others: Iterable[int],
        target: int,
        source: int,
        nbytes: int,
        again: SimulatedEvent | None = None,
        after: Iterable[SimulatedEvent] = (),
    ) -> SimulatedEvent:
        """Submits a copy that waits for events and for the work so far of other streams."""
        for event in after:
            self.wait(stream, event)
        for other in others:
            self.follow(stream, other)
        self.copy(stream, target, source, nbytes)
        return self.record(stream, again)

    def fill(self, stream: int, target: int, value: int, nbytes: int) -> None:
        """Submits setting every byte to ``value``."""
        self.submit(stream, lambda: ctypes.memset(target, value, nbytes))

    def can_pack(self) -> bool:
        """Whether there are kernels: those of the reference."""
        return True

    def pack(self, stream: int, target: int, source: int, tiles: int, spoiled: int) -> None:
        """Submits packing tiles, one by one; others may run in between."""

        def run(tile: int) -> None:
            words = np.frombuffer(ctypes.string_at(source + tile * TILE, TILE), dtype="<u2")
            packed = pack_tile(words)
            if packed is None:
                ctypes.memset(spoiled, 1, 1)
            else:
                ctypes.memmove(target + tile * PACKED_TILE, packed.tobytes(), PACKED_TILE)

        for tile in range(tiles):
            self.submit(stream, partial(run, tile))

    def unpack(self, stream: int, target: int, tiles: int) -> None:
        """Submits unpacking tiles in place, one by one; others may run in between."""

        def run(tile: int) -> None:
            source = target + tiles * GROWS + tile * PACKED_TILE
            packed = np.frombuffer(ctypes.string_at(source, PACKED_TILE), dtype=np.uint8)
            ctypes.memmove(target + tile * TILE, unpack_tile(packed).tobytes(), TILE)

        for tile in range(tiles):
            self.submit(stream, partial(run, tile))

    def can_pack_homes(self) -> bool:
        """Whether there are kernels: those of the reference."""
        return True

    def pack_home(
        self,
        stream: int,
        target: int,
        source: int,
        tiles: int,
        rest: int,
        spill: int,
        raw: int,
        seen: int,
    ) -> None:
        """Submits the packing of a piece of a home, tile by tile; others may run in between."""
        for tile in range(tiles):
            self.submit(stream, partial(pack_home_tile, tile, target, source, spill, raw, seen))
        if rest:
            behind = target + tiles * packedhome.PACKED_TILE, source + tiles * packedhome.TILE
            self.submit(stream, lambda: ctypes.memmove(*behind, rest))

    def unpack_home(self, stream: int, target: int, tiles: int, spill: int, seen: int) -> None:
        """Submits the unpacking of tiles in place, one by one; others may run in between."""
        for tile in range(tiles):
            self.submit(stream, partial(unpack_home_tile, tile, target, tiles, spill, seen))

    def synchronize(self) -> None:
        """Runs everything."""
        while self.advance():
            pass

    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.captured

    def advance(self, stream: int | None = None) -> bool:
        """Runs one piece of work.

        Args:
            stream: The stream; by default any that can run.

        Returns:
            Whether there was any.

        Raises:
            RuntimeError: If there is work and none of it can ever run.
        """
        able = [
            name
            for name, queue in self._queues.items()
            if queue and (queue[0].after is None or queue[0].after.passed)
        ]
        if stream is not None:
            able = [name for name in able if name == stream]
        elif not able and any(self._queues.values()):
            raise RuntimeError("streams wait for each other in a circle")
        if not able:
            return False
        self._queues[self._random.choice(able)].popleft().run()
        return True
