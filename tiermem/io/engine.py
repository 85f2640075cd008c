"""The interface of file I/O: requests, completions, and what every engine guarantees.

An engine is created, used and closed by one thread; only :meth:`IoEngine.wake`
may be called from another. It returns exactly one completion for every
request: short reads and writes are continued internally, transient refusals
(EAGAIN, EINTR, EBUSY) are retried, and any other failure is returned with its
error number.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.core.block import ALIGNMENT
from tiermem.errors import CapacityError, ClosedError

PASSING = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY})
"""Transient refusals, which are retried."""

MAX_RETRIES = 400
"""How often in a row a request may be refused (about two seconds in all)."""

MAX_STALLS = 4
"""Short results in a row without an aligned byte, before a request fails."""

_FIRST_DELAY = 50e-6
_LAST_DELAY = 5e-3


class IoOp(enum.Enum):
    """What a request does to the file."""

    READ = "read"
    WRITE = "write"


@dataclass(slots=True)
class IoRequest:
    """One read or write of a run of bytes.

    Attributes:
        op: Read or write.
        file: Index into the files given to :meth:`IoEngine.open`.
        offset: First byte in the file.
        address: First byte in host memory; it must stay valid until the completion.
        nbytes: Bytes to move, at least 1.
        token: A number of the caller's, returned in the completion.
    """

    op: IoOp
    file: int
    offset: int
    address: int
    nbytes: int
    token: int


@dataclass(frozen=True, slots=True)
class IoCompletion:
    """The end of one request.

    Attributes:
        token: The request's token.
        nbytes: Bytes that were moved: all of them when ``errno`` is 0.
        errno: 0, or the system's error number.
    """

    token: int
    nbytes: int
    errno: int


class Progress:
    """The progress of one request; shared by all engines.

    Attributes:
        request: The request.
        done: Bytes moved so far, always aligned until the end.
        retries: Refusals in a row.
        cancelled: Whether it has to stop as soon as possible.
    """

    __slots__ = ("cancelled", "done", "request", "retries", "stalls")

    def __init__(self, request: IoRequest) -> None:
        self.request = request
        self.done = 0
        self.retries = 0
        self.stalls = 0
        self.cancelled = False

    def note_result(self, result: int) -> IoCompletion | None:
        """Processes the result of one try.

        Args:
            result: Bytes moved, or a negative error number.

        Returns:
            The completion, or ``None`` if the rest must be tried (again).
        """
        if result < 0:
            return self._refused(-result)
        request = self.request
        self.retries = 0
        if self.done + result >= request.nbytes:
            return IoCompletion(request.token, request.nbytes, 0)
        if result == 0:
            return self.fail(errno.EIO if request.op is IoOp.READ else errno.ENOSPC)
        # O_DIRECT can only continue from an aligned offset: bytes after it are transferred again.
        aligned = result // ALIGNMENT * ALIGNMENT
        self.done += aligned
        self.stalls = 0 if aligned else self.stalls + 1
        if self.stalls > MAX_STALLS:
            return self.fail(errno.EIO if request.op is IoOp.READ else errno.ENOSPC)
        return self.fail(errno.ECANCELED) if self.cancelled else None

    def _refused(self, code: int) -> IoCompletion | None:
        if self.cancelled and code in PASSING:
            return self.fail(errno.ECANCELED)
        if code in PASSING and self.retries < MAX_RETRIES:
            self.retries += 1
            return None
        return self.fail(code)

    def fail(self, code: int) -> IoCompletion:
        """Returns the completion that ends this request with an error number."""
        return IoCompletion(self.request.token, self.done, code)

    def delay(self) -> float:
        """Returns how many seconds to wait before the next try (0.0 after a short result)."""
        if self.retries == 0:
            return 0.0
        return min(_LAST_DELAY, _FIRST_DELAY * float(1 << min(self.retries, 10)))


def memory_view(address: int, nbytes: int) -> memoryview:
    """Returns a writable view of ``nbytes`` raw host memory bytes; nothing is copied or kept."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def start_threads(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Starts threads of which each can do all the work; returns those that could be started.

    Raises:
        CapacityError: If none could be started.
    """
    started: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if started:
                break
            raise CapacityError(
                f"the system starts no thread for file I/O ({error}); raise the limit of processes "
                "(ulimit -u, or pids.max of the cgroup) or of address space (ulimit -v)"
            ) from error
        started.append(thread)
    return started


class IoEngine(ABC):
    """Submits and polls file I/O.

    Attributes:
        name: Short name for statistics: ``"uring"``, ``"threads"``, ...
        note: Why another engine than the chosen one is used, or "".
    """

    name: str = "engine"
    note: str = ""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @abstractmethod
    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """Prepares the engine for use.

        Args:
            files: Descriptors that requests refer to by index. The caller still owns them.
            buffers: ``(address, nbytes)`` of memory that most requests will use; it is
                registered as far as the system's limits allow. Other memory works as well.

        Raises:
            OSError: If the system refuses the engine.
        """

    @abstractmethod
    def submit(self, requests: Sequence[IoRequest]) -> None:
        """Starts requests, or queues them until there is room; never waits for them.

        Raises:
            ClosedError: If the engine is closed or belongs to another process.
            ValueError: If a request names no registered file or is empty.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """Waits, without the GIL, for a completion, a :meth:`wake` or the timeout.

        Args:
            timeout: Seconds; 0 only polls, ``None`` waits without limit.

        Returns:
            Everything that has completed; empty after a wake or a timeout.

        Raises:
            ClosedError: If the engine is closed or belongs to another process.
            OSError: If the engine itself has failed.
        """

    @abstractmethod
    def wake(self) -> None:
        """Ends a :meth:`wait`, the present or the next one. Any thread may call it."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests submitted whose completion has not been returned yet."""

    @abstractmethod
    def cancel(self) -> None:
        """Asks all outstanding requests to stop.

        Each request still gets one completion: ECANCELED if it was stopped, or
        its true result if it was too late for that.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancels, waits until the system no longer uses the memory, releases everything.

        Works in any state and any number of times; in a forked child it does nothing.
        """

    def forked(self) -> None:
        """Closes the parent's descriptors; called in a forked child, before it opens its own."""
        return

    def describe(self) -> str:
        """Returns one line about how the engine runs, for ``doctor`` and ``stats()``."""
        return self.name

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this I/O engine belongs to the parent process: after fork the child must "
                "make its own TierManager"
            )


def check_request(request: IoRequest, n_files: int) -> None:
    """Refuses a request that no engine could serve.

    Raises:
        ValueError: If it names no registered file, or has no bytes or a bad offset.
    """
    if not 0 <= request.file < n_files:
        raise ValueError(f"request names file {request.file}, but {n_files} are registered")
    if request.nbytes <= 0 or request.offset < 0 or request.address <= 0:
        raise ValueError(f"request is empty or out of range: {request}")
