"""The contract of file I/O: what is asked, what comes back, and what every engine keeps.

An engine is made, used and closed by one thread; only :meth:`IoEngine.wake`
may be called from another. It hands back exactly one completion for every
request: short reads and writes are carried on inside, passing refusals
(EAGAIN, EINTR, EBUSY) are retried, and whatever else fails comes back with its
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
"""Refusals that say "not now": worth another try."""

MAX_RETRIES = 400
"""Tries of one request that may be refused in a row (about two seconds in all)."""

MAX_STALLS = 4
"""Short results in a row that may bring no aligned byte before a request fails."""

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
        token: The caller's own number, handed back in the completion.
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
    """How far one request has come; shared by every engine.

    Attributes:
        request: What was asked.
        done: Bytes moved so far, always aligned until the end.
        retries: Refusals in a row.
        cancelled: Whether it is to stop at the next occasion.
    """

    __slots__ = ("cancelled", "done", "request", "retries", "stalls")

    def __init__(self, request: IoRequest) -> None:
        self.request = request
        self.done = 0
        self.retries = 0
        self.stalls = 0
        self.cancelled = False

    def note_result(self, result: int) -> IoCompletion | None:
        """Takes in the result of one try.

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
        # O_DIRECT can only go on from an aligned offset: what lies past it is done again.
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
        """Returns how many seconds to leave before the next try (0.0 after a short result)."""
        if self.retries == 0:
            return 0.0
        return min(_LAST_DELAY, _FIRST_DELAY * float(1 << min(self.retries, 10)))


def memory_view(address: int, nbytes: int) -> memoryview:
    """Returns a writable view of ``nbytes`` raw host memory bytes; nothing is copied or kept."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def start_threads(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Starts threads that can do each other's work; returns those that the system let start.

    Raises:
        CapacityError: If that is none of them.
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
    """Submit and poll of file I/O.

    Attributes:
        name: Short name for statistics: ``"uring"``, ``"threads"``, ...
        note: Why it is not the engine that was chosen, or "".
    """

    name: str = "engine"
    note: str = ""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @abstractmethod
    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """Makes the engine ready.

        Args:
            files: Descriptors that requests refer to by index. They stay the caller's.
            buffers: ``(address, nbytes)`` of memory that most requests will use; it is
                registered where the system's limits allow. Other memory works as well.

        Raises:
            OSError: If the system refuses the engine.
        """

    @abstractmethod
    def submit(self, requests: Sequence[IoRequest]) -> None:
        """Starts requests, or holds them back until there is room; never waits for them.

        Raises:
            ClosedError: If the engine is closed or belongs to another process.
            ValueError: If a request names no registered file or is empty.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """Waits, without the GIL, for a completion, a :meth:`wake` or the timeout.

        Args:
            timeout: Seconds; 0 only looks, ``None`` waits without end.

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
        """Requests submitted whose completion has not been handed out."""

    @abstractmethod
    def cancel(self) -> None:
        """Asks everything outstanding to stop.

        Each request still gets one completion: ECANCELED if it was stopped, or
        its true result when it was too late for that.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancels, waits until the system is done with the memory, gives everything back.

        Works in any state and any number of times; in a forked child it does nothing.
        """

    def forked(self) -> None:
        """Closes the parent's descriptors; for a forked child, before it opens its own."""
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
