"""A disk in simulated time: real bytes, and a clock that moves only when no thread has work.

Tests cannot observe on a real disk whether reads, updates and writes overlap: it is too
fast, or the machine too busy. Here a sweep takes the same simulated seconds on any machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tiermem.errors import ClosedError
from tiermem.io.engine import (
    IoCompletion,
    IoEngine,
    IoOp,
    IoRequest,
    check_request,
    memory_view,
)
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.helpers import ScriptedHelpers
from tiermem.transfer.file.copiers import ChunkCopier
from tiermem.transfer.file.jobs import FileTransfer
from tiermem.transfer.file.mover import FileMover


class SimulatedTime:
    """A clock for one working thread and one disk.

    It moves while the thread computes (:meth:`spend`) or waits for the disk
    (:meth:`waiting`), and stands still while the thread does anything else.

    Attributes:
        now: Seconds.
        changed: Guards all state; the disk waits on it.
    """

    def __init__(self) -> None:
        """Begins at zero."""
        self.now = 0.0
        self.changed = threading.Condition()
        self._until: float | None = None
        self._transfers: Sequence[FileTransfer] = ()

    def spend(self, seconds: float) -> None:
        """Computes for a while; the disk continues meanwhile."""
        with self.changed:
            self._until = until = self.now + seconds
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.now >= until)

    @contextmanager
    def waiting(self, transfers: Sequence[FileTransfer]) -> Iterator[None]:
        """Notes that the thread is idle until one of some transfers has finished."""
        with self.changed:
            self._transfers = transfers
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._transfers = ()

    def limit(self) -> float | None:
        """Returns how far the clock may move before the thread continues; None for not at all."""
        if self._until is not None:
            return self._until
        if self._transfers and not any(transfer.finished for transfer in self._transfers):
            return float("inf")
        return None

    def move(self, now: float) -> None:
        """Moves the clock; called by the disk, which has ``changed``."""
        self.now = now
        if self._until is not None and now >= self._until:
            self._until = None
            self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per simulated second.

    Attributes:
        read: Maximum for reads.
        write: Maximum for writes.
        both: Maximum for reads and writes together; requests in flight share it evenly.
    """

    read: float
    write: float
    both: float

    def bound(self, read: int, written: int) -> float:
        """Returns the least seconds in which so many bytes can be moved."""
        alone = abs(read - written)
        least = alone / (self.read if read > written else self.write)
        paired = min(read, written)
        rate = min(self.read, self.write, self.both / 2)
        together = paired / rate + least
        return min(together, read / self.read + written / self.write)


class SimulatedDisk(IoEngine):
    """An engine whose requests end in simulated time.

    Attributes:
        read: Bytes read.
        written: Bytes written.
        writes: Offset and length of every write, in the order of their ends.
    """

    name = "simulated"

    def __init__(self, time: SimulatedTime, speeds: Speeds) -> None:
        """Moves bytes as fast as ``speeds`` says, by the clock ``time``."""
        super().__init__()
        self._time = time
        self._speeds = speeds
        self._files: list[int] = []
        self._pending: list[tuple[IoRequest, list[float]]] = []
        self._woken = False
        self._state = "new"
        self.read = 0
        self.written = 0
        self.writes: list[tuple[int, int]] = []

    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """See :meth:`IoEngine.open`."""
        self._check_owner()
        self._files = list(files)
        self._state = "open"

    @property
    def in_flight(self) -> int:
        """See :meth:`IoEngine.in_flight`."""
        return len(self._pending)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """See :meth:`IoEngine.submit`."""
        self._check_usable()
        for request in requests:
            check_request(request, len(self._files))
        with self._time.changed:
            self._pending.extend((request, [float(request.nbytes)]) for request in requests)

    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """See :meth:`IoEngine.wait`; a time limit above zero counts as no limit."""
        self._check_usable()
        time = self._time
        with time.changed:
            while not self._woken and timeout != 0:
                limit = time.limit()
                if limit is None or (limit == float("inf") and not self._pending):
                    time.changed.wait()
                    continue
                done = self._advance(limit)
                if done:
                    return done
            self._woken = False
            return []

    def wake(self) -> None:
        """See :meth:`IoEngine.wake`."""
        self._check_owner()
        with self._time.changed:
            self._woken = True
            self._time.changed.notify_all()

    def cancel(self) -> None:
        """See :meth:`IoEngine.cancel`; what is pending never ends."""
        self._pending.clear()

    def close(self) -> None:
        """See :meth:`IoEngine.close`."""
        self._state = "closed"
        self._pending.clear()

    def _check_usable(self) -> None:
        self._check_owner()
        if self._state != "open":
            raise ClosedError("this I/O engine is not open")

    def _advance(self, limit: float) -> list[IoCompletion]:
        """Moves the clock to the next end of a request, or to ``limit``."""
        rates = self._rates()
        left = [left[0] / rates[request.op] for request, left in self._pending]
        step = min([*left, limit - self._time.now])
        for (request, remaining), seconds in zip(self._pending, left, strict=True):
            remaining[0] = 0.0 if seconds <= step else remaining[0] - step * rates[request.op]
        self._time.move(limit if step == limit - self._time.now else self._time.now + step)
        ended = [request for request, remaining in self._pending if remaining[0] <= 0.0]
        self._pending = [entry for entry in self._pending if entry[1][0] > 0.0]
        return [self._carry_out(request) for request in ended]

    def _rates(self) -> dict[IoOp, float]:
        """Returns the speed of each read and each write in progress."""
        reads = sum(request.op is IoOp.READ for request, _ in self._pending)
        writes = len(self._pending) - reads
        share = self._speeds.both / max(1, len(self._pending))
        if not (reads and writes):
            share = float("inf")
        return {
            IoOp.READ: min(self._speeds.read / max(1, reads), share),
            IoOp.WRITE: min(self._speeds.write / max(1, writes), share),
        }

    def _carry_out(self, request: IoRequest) -> IoCompletion:
        view = memory_view(request.address, request.nbytes)
        if request.op is IoOp.READ:
            os.preadv(self._files[request.file], [view], request.offset)
            self.read += request.nbytes
        else:
            os.pwritev(self._files[request.file], [view], request.offset)
            self.written += request.nbytes
            self.writes.append((request.offset, request.nbytes))
        return IoCompletion(request.token, request.nbytes, 0)


class SimulatedMover(FileMover):
    """A file mover on a simulated disk, whose checksums and copies take no time.

    Use it as a manager's file mover: every wait for a transfer moves the clock.
    """

    time: SimulatedTime

    def __init__(
        self,
        store: SwapFile,
        engine_factory: Callable[[], IoEngine],
        staging: torch.Tensor,
        chunk_nbytes: int,
        copier: ChunkCopier | None = None,
    ) -> None:
        """See :class:`FileMover`."""
        super().__init__(
            store,
            engine_factory,
            staging,
            chunk_nbytes,
            copier,
            helpers=ScriptedHelpers,
        )

    def wait(self, transfer: FileTransfer, *, hurry: bool = True) -> None:
        """See :meth:`FileMover.wait`."""
        with self.time.waiting([transfer]):
            super().wait(transfer, hurry=hurry)

    def wait_any(self, transfers: Sequence[FileTransfer]) -> None:
        """See :meth:`FileMover.wait_any`."""
        with self.time.waiting(transfers):
            super().wait_any(transfers)
