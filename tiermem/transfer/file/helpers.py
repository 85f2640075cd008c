"""Helper threads of the pump: checksums and host copies, beside the thread that drives the disk.

Both run without the GIL for a tenth of a millisecond or more at a time, so a helper
and the pump compete for it only between two chunks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from tiermem.io.engine import start_threads
from tiermem.storage.checksum import checksum
from tiermem.transfer.file.copiers import ChunkCopier
from tiermem.transfer.file.jobs import Chunk, Task

_MOST_HELPERS = 4
_CORES_PER_HELPER = 4


class Helpers(Protocol):
    """Works on chunks while the pump continues. Only the pump makes calls.

    Attributes:
        eager: Whether the pump has to be woken for every chunk that is done. If not, it
            checks by itself before long.
    """

    eager: bool

    def start(self) -> None:
        """Prepares for work.

        Raises:
            CapacityError: If the system has no thread left.
        """

    def give(self, chunk: Chunk) -> None:
        """Passes a chunk, whose ``task`` says what to do; never blocks."""

    def collect(self) -> list[Chunk]:
        """Returns the chunks done since the last call; never blocks.

        Raises:
            BaseException: The error of any of them.
        """

    def close(self) -> None:
        """Drops chunks that are not begun, waits for the rest and ends the threads."""


HelperFactory = Callable[[Callable[[Chunk], None], Callable[[], None]], Helpers]
"""Creates helpers from a function that processes a chunk, and one that wakes the pump."""


def carry_out(chunk: Chunk, copier: ChunkCopier) -> None:
    """Does a chunk's task; only the caller uses the chunk meanwhile.

    Wrong bytes are never copied further: each piece is checked while it is in the core's cache,
    and copied from there.

    Args:
        chunk: The chunk; ``check`` and the times are stored in it.
        copier: Makes the copies.
    """
    started = time.perf_counter_ns()
    if chunk.task is Task.FILL:
        copier.from_source(chunk.memory, chunk.part()).wait()
        chunk.copy_ns = time.perf_counter_ns() - started
    if chunk.check.wanted:
        before = time.perf_counter_ns()
        chunk.check.found = checksum(chunk.address, chunk.piece.nbytes)
        chunk.check.ns = time.perf_counter_ns() - before
    if chunk.task is Task.LAND and not chunk.check.wrong:
        before = time.perf_counter_ns()
        for target, source in chunk.parts():
            copier.to_target(target, source, chunk.job.after).wait()
        chunk.copy_ns = time.perf_counter_ns() - before


def usual_count() -> int:
    """Returns how many helpers suit this machine: one per four cores, one to four."""
    cores = len(os.sched_getaffinity(0))
    return min(_MOST_HELPERS, max(1, cores // _CORES_PER_HELPER))


class HelperThreads:
    """Helpers that are daemon threads.

    Args:
        work: Processes a chunk.
        wake: Wakes the pump; any thread may call it.
        count: How many threads.
    """

    def __init__(
        self, work: Callable[[Chunk], None], wake: Callable[[], None], count: int | None = None
    ) -> None:
        self.eager = False
        self._work = work
        self._wake = wake
        self._count = usual_count() if count is None else count
        self._todo: SimpleQueue[Chunk | None] = SimpleQueue()
        self._done: deque[Chunk] = deque()
        self._failure: BaseException | None = None
        self._stopping = False
        self._woken = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """See :meth:`Helpers.start`."""
        names = [f"tiermem-file-helper-{index}" for index in range(self._count)]
        self._threads = start_threads(
            [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        )

    def give(self, chunk: Chunk) -> None:
        """See :meth:`Helpers.give`."""
        self._todo.put(chunk)

    def collect(self) -> list[Chunk]:
        """See :meth:`Helpers.collect`."""
        self._woken = False  # before the check: what is done after this wakes the pump again
        if self._failure is not None:
            raise self._failure
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """See :meth:`Helpers.close`."""
        self._stopping = True
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # In the threads ------------------------------------------------------------------

    def _serve(self) -> None:
        while (chunk := self._todo.get()) is not None:
            if self._stopping:
                continue
            try:
                self._work(chunk)
            except BaseException as error:
                self._failure = error
            self._done.append(chunk)
            del chunk  # only its owner refers to its tensor while this thread sleeps
            if (self.eager or self._failure is not None) and not self._woken:
                self._woken = True
                self._wake()


def threads(count: int | None = None) -> HelperFactory:
    """Returns the factory of that many helper threads; by default as many as suit the cores."""
    return partial(HelperThreads, count=count)
