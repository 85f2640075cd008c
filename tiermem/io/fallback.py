"""io_uring as long as the kernel permits it, then threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

from tiermem.io.engine import IoCompletion, IoEngine, IoRequest
from tiermem.io.threads import ThreadEngine
from tiermem.io.uring import UringEngine


class FallbackEngine(IoEngine):
    """io_uring until the kernel refuses it, as after a later seccomp filter; then threads.

    Requests in progress are repeated: a read returns the same bytes, and the bytes to be written do
    not change before the completion. They are repeated only after the kernel has ended them.

    Attributes:
        note: Why threads are used now, or "".
    """

    def __init__(
        self,
        first: Callable[[], UringEngine] = UringEngine,
        second: Callable[[], IoEngine] = ThreadEngine,
    ) -> None:
        super().__init__()
        self._engine: IoEngine = first()
        self._second = second
        self._lock = threading.RLock()  # a collected mover may wake from anywhere
        self._done: list[IoCompletion] = []
        self._files: list[int] = []
        self._buffers: list[tuple[int, int]] = []
        self.note = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the engine in use."""
        return self._engine.name

    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """See :meth:`IoEngine.open`."""
        self._files, self._buffers = list(files), list(buffers)
        try:
            self._engine.open(files, buffers)
        except (ImportError, OSError) as error:
            self._engine.close()
            self._engine = self._opened(error)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """See :meth:`IoEngine.submit`."""
        try:
            self._engine.submit(requests)
        except OSError as error:  # these requests are among those in progress
            self._switch(error)

    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """See :meth:`IoEngine.wait`."""
        if self._done:
            timeout = 0.0
        try:
            found = self._engine.wait(timeout)
        except OSError as error:
            self._switch(error)
            found = []
        done, self._done = self._done, []
        return [*done, *found]

    def wake(self) -> None:
        """See :meth:`IoEngine.wake`."""
        self._check_owner()
        with self._lock:
            self._engine.wake()

    @property
    def in_flight(self) -> int:
        """See :meth:`IoEngine.in_flight`."""
        return len(self._done) + self._engine.in_flight

    def cancel(self) -> None:
        """See :meth:`IoEngine.cancel`."""
        try:
            self._engine.cancel()
        except OSError as error:
            self._switch(error)
            self._engine.cancel()

    def close(self) -> None:
        """See :meth:`IoEngine.close`."""
        self._done.clear()
        self._engine.close()

    def forked(self) -> None:
        """See :meth:`IoEngine.forked`."""
        self._lock = threading.RLock()
        self._engine.forked()

    def describe(self) -> str:
        """Returns how the engine in use runs."""
        return self._engine.describe()

    def _opened(self, error: Exception) -> IoEngine:
        engine = self._second()
        engine.open(self._files, self._buffers)
        self.note = f"threads do the file I/O because io_uring failed ({error})"
        return engine

    def _switch(self, error: OSError) -> None:
        """Passes all requests to threads.

        Raises:
            OSError: The given error, if threads were used already.
        """
        ring = self._engine
        if not isinstance(ring, UringEngine):
            raise error
        engine = self._opened(error)
        with self._lock:  # a wake that the ring has not seen must not be lost
            done, left = ring.abandon()
            self._engine = engine
            engine.wake()
        self._done += done
        self._done += [held.fail(errno.ECANCELED) for held in left if held.cancelled]
        engine.submit([held.request for held in left if not held.cancelled])
