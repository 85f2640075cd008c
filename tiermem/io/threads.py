"""File I/O through threads that call preadv and pwritev: where io_uring is not available."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from tiermem.errors import ClosedError
from tiermem.io.engine import (
    IoCompletion,
    IoEngine,
    IoOp,
    IoRequest,
    Progress,
    check_request,
    memory_view,
    start_threads,
)


class ThreadEngine(IoEngine):
    """A few daemon threads, one request each at a time.

    Args:
        n_threads: How many; eight keep a fast disk busy.
    """

    name = "threads"

    def __init__(self, n_threads: int = 8) -> None:
        super().__init__()
        if n_threads < 1:
            raise ValueError(f"n_threads must be at least 1, not {n_threads}")
        self._n_threads = n_threads
        self._lock = threading.RLock()  # a collected mover may wake from anywhere
        self._work = threading.Condition(self._lock)
        self._news = threading.Condition(self._lock)
        self._queue: deque[Progress] = deque()
        self._running: set[Progress] = set()
        self._ready: list[IoCompletion] = []
        self._woken = False
        self._open = False
        self._closed = False
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._files: list[int] = []

    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """See :meth:`IoEngine.open`; nothing needs to be registered."""
        self._check_owner()
        if self._open or self._closed:
            raise ClosedError("an I/O engine is opened once")
        self._files = list(files)
        self._open = True
        self._threads = start_threads(
            [
                threading.Thread(target=self._serve, name=f"tiermem-io-{index}", daemon=True)
                for index in range(self._n_threads)
            ]
        )

    def describe(self) -> str:
        """Returns how many threads serve."""
        return f"{len(self._threads)} threads with preadv and pwritev"

    @property
    def in_flight(self) -> int:
        """See :meth:`IoEngine.in_flight`."""
        with self._lock:
            return len(self._queue) + len(self._running) + len(self._ready)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """See :meth:`IoEngine.submit`."""
        self._check_usable()
        for request in requests:
            check_request(request, len(self._files))
        with self._lock:
            self._queue.extend(map(Progress, requests))
            self._work.notify(len(requests))

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed or not self._open:
            raise ClosedError("this I/O engine is not open")

    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """See :meth:`IoEngine.wait`."""
        self._check_usable()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not (self._ready or self._woken):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0.0:
                    break
                self._news.wait(left)
            self._woken = False
            done, self._ready = self._ready, []
        return done

    def wake(self) -> None:
        """See :meth:`IoEngine.wake`."""
        self._check_owner()
        with self._lock:
            self._woken = True
            self._news.notify_all()

    def cancel(self) -> None:
        """See :meth:`IoEngine.cancel`."""
        self._check_usable()
        with self._lock:
            self._cancel_locked()

    def _cancel_locked(self) -> None:
        self._ready.extend(progress.fail(errno.ECANCELED) for progress in self._queue)
        self._queue.clear()
        for progress in self._running:
            progress.cancelled = True
        self._news.notify_all()

    def close(self) -> None:
        """See :meth:`IoEngine.close`."""
        if os.getpid() != self._pid:
            self._closed = True
            return
        if self._closed:
            return
        with self._lock:
            self._cancel_locked()
            self._stopping.set()
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._ready.clear()
        self._closed = True

    # In the threads ------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._stopping.is_set():
                        return
                    self._work.wait()
                progress = self._queue.popleft()
                self._running.add(progress)
            completion = self._carry_out(progress)
            with self._lock:
                self._running.discard(progress)
                self._ready.append(completion)
                self._news.notify()

    def _carry_out(self, progress: Progress) -> IoCompletion:
        while True:
            try:
                result = self._once(progress)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            completion = progress.note_result(result)
            if completion is not None:
                return completion
            delay = progress.delay()
            if delay > 0.0:
                self._stopping.wait(delay)

    def _once(self, progress: Progress) -> int:
        request = progress.request
        view = memory_view(request.address + progress.done, request.nbytes - progress.done)
        offset = request.offset + progress.done
        file = self._files[request.file]
        if request.op is IoOp.READ:
            return os.preadv(file, [view], offset)
        return os.pwritev(file, [view], offset)
