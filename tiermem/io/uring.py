"""File I/O through io_uring, with the C library in the ``liburing`` package."""

from __future__ import annotations

import ctypes
import errno
import heapq
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
)
from tiermem.io.registered import Registered
from tiermem.io.ring import Ring

MAX_PIECE = 1 << 30
"""Maximal bytes per request to the kernel (its own limit is 2 GiB - 4 KiB)."""

_WAKE = (1 << 63) | 1
_CANCEL = (1 << 63) | 2
_FIXED_FILE = 1 << 0


class UringEngine(IoEngine):
    """One ring, used by the thread that opened it.

    Args:
        depth: Requests that may be inside the kernel at once; the rest is queued.
    """

    name = "uring"

    def __init__(self, depth: int = 64) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._depth = depth
        self._open = False
        self._closed = False
        self._waiting: deque[Progress] = deque()
        self._delayed: list[tuple[float, int, Progress]] = []
        self._inside: dict[int, Progress] = {}
        self._cancels = 0
        self._wake_armed = False
        self._ready: list[IoCompletion] = []
        self._sequence = 0
        self._event = -1
        self._event_lock = threading.RLock()  # a collected mover may wake from anywhere
        self._event_value = ctypes.c_uint64()
        self._known = Registered()

    # Opening -------------------------------------------------------------------------

    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """See :meth:`IoEngine.open`.

        Raises:
            ImportError: If the ``liburing`` package cannot be used.
            OSError: If the kernel refuses a ring.
        """
        self._check_owner()
        if self._open or self._closed:
            raise ClosedError("an I/O engine is opened once")
        self._ring = Ring(1 << (self._depth + 1).bit_length())
        self._ring.start()
        self._open = True
        try:
            self._ring.lib.ring_dontfork(
                self._ring.address
            )  # a mapping would keep the ring open in a child
            self._event = os.eventfd(0, os.EFD_CLOEXEC)
            self._known.add_files(self._ring, files)
            self._known.add_buffers(self._ring, buffers)
        except BaseException:
            self.close()
            raise

    @property
    def flags(self) -> int:
        """The flags with which the ring was set up."""
        return self._ring.flags

    def describe(self) -> str:
        """Returns the flags and registrations in use."""
        notes = "; ".join(self._known.notes) or "files and buffers registered"
        return f"io_uring, flags {self.flags:#x}, {notes}" if self._open else "io_uring, not open"

    # Submitting ----------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """See :meth:`IoEngine.in_flight`."""
        return len(self._waiting) + len(self._delayed) + len(self._inside) + len(self._ready)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """See :meth:`IoEngine.submit`."""
        self._check_usable()
        for request in requests:
            check_request(request, len(self._known.files))
        self._waiting.extend(map(Progress, requests))
        if self._fill():
            self._ring.submit_and_wait(0.0)

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed or not self._open:
            raise ClosedError("this I/O engine is not open")

    def _fill(self) -> int:
        """Puts queued requests into the submission queue; returns how many."""
        if self._delayed:
            now = time.monotonic()
            while self._delayed and self._delayed[0][0] <= now:
                self._waiting.append(heapq.heappop(self._delayed)[2])
        lib, ring = self._ring.lib, self._ring.address
        count = 0
        while self._waiting and len(self._inside) < self._depth:
            sqe = lib.get_sqe(ring)
            if not sqe:
                break
            self._prepare(sqe, self._waiting.popleft())
            count += 1
        return count

    def _prepare(self, sqe: int, progress: Progress) -> None:
        request = progress.request
        address = request.address + progress.done
        nbytes = min(request.nbytes - progress.done, MAX_PIECE)
        offset = request.offset + progress.done
        known = self._known
        file = request.file if known.fixed else known.files[request.file]
        area = known.area_of(address, nbytes)
        lib, read = self._ring.lib, request.op is IoOp.READ
        if area >= 0:
            prepare = lib.prep_read_fixed if read else lib.prep_write_fixed
            prepare(sqe, file, address, nbytes, offset, area)
        else:
            prepare = lib.prep_read if read else lib.prep_write
            prepare(sqe, file, address, nbytes, offset)
        if known.fixed:
            lib.sqe_set_flags(sqe, _FIXED_FILE)
        self._sequence += 1
        lib.sqe_set_data64(sqe, self._sequence)
        self._inside[self._sequence] = progress

    def _arm_wake(self) -> None:
        if self._wake_armed:
            return
        lib = self._ring.lib
        sqe = lib.get_sqe(self._ring.address)
        if not sqe:
            return
        lib.prep_read(sqe, self._event, ctypes.addressof(self._event_value), 8, 0)
        lib.sqe_set_data64(sqe, _WAKE)
        self._wake_armed = True

    # Waiting -------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """See :meth:`IoEngine.wait`."""
        self._check_usable()
        deadline = None if timeout is None else time.monotonic() + timeout
        woken = False
        while True:
            self._arm_wake()
            self._fill()
            idle = bool(self._ready) or woken
            left = 0.0 if idle else self._left(deadline)
            self._ring.submit_and_wait(left)
            woken = self._reap() or woken
            if self._ready or woken:
                break
            if deadline is not None and time.monotonic() >= deadline:
                break
        done, self._ready = self._ready, []
        return done

    def _left(self, deadline: float | None) -> float | None:
        """Returns the seconds that this iteration may sleep; a due retry shortens that."""
        ends = [] if deadline is None else [deadline]
        if self._delayed:
            ends.append(self._delayed[0][0])
        if not ends:
            return None
        return max(0.0, min(ends) - time.monotonic())

    def _reap(self) -> bool:
        """Removes all entries from the completion queue; returns whether one was a wake."""
        woken = False
        for data, result in self._ring.completed():
            if data == _WAKE:
                self._wake_armed = False
                woken = True
            elif data == _CANCEL:
                self._cancels -= 1
            else:
                progress = self._inside.pop(data, None)
                if progress is not None:
                    self._settle(progress, result)
        return woken

    def _settle(self, progress: Progress, result: int) -> None:
        completion = progress.note_result(result)
        if completion is not None:
            self._ready.append(completion)
            return
        delay = progress.delay()
        if delay > 0.0:
            self._sequence += 1
            heapq.heappush(self._delayed, (time.monotonic() + delay, self._sequence, progress))
        else:
            self._waiting.appendleft(progress)

    def wake(self) -> None:
        """See :meth:`IoEngine.wake`."""
        self._check_owner()
        with self._event_lock:  # after closing, the descriptor's number may belong to another file
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    # Ending --------------------------------------------------------------------------

    def cancel(self) -> None:
        """See :meth:`IoEngine.cancel`."""
        self._check_usable()
        held = [*self._waiting, *(entry[2] for entry in self._delayed)]
        self._waiting.clear()
        self._delayed.clear()
        self._ready.extend(progress.fail(errno.ECANCELED) for progress in held)
        for data, progress in self._inside.items():
            progress.cancelled = True
            self._ask_cancel(data)
        self._ring.submit_and_wait(0.0)

    def _ask_cancel(self, data: int) -> None:
        lib, ring = self._ring.lib, self._ring.address
        sqe = lib.get_sqe(ring)
        if not sqe:
            self._ring.submit_and_wait(0.0)
            sqe = lib.get_sqe(ring)
        if sqe:  # without room the request runs to its end
            lib.prep_cancel64(sqe, data, 0)
            lib.sqe_set_data64(sqe, _CANCEL)
            self._cancels += 1

    def close(self) -> None:
        """See :meth:`IoEngine.close`."""
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._closed = True
            return
        drained = False
        try:
            if self._open:
                self._drain()
            drained = True
        except OSError:
            pass  # the kernel accepts no more calls, but still ends its requests
        finally:
            self._closed = True
            if self._open:
                if drained:
                    self._known.let_go(self._ring)
                self._ring.lib.queue_exit(self._ring.address)
                if not drained:
                    self._await_the_end()
            self._close_event()

    def abandon(self) -> tuple[list[IoCompletion], list[Progress]]:
        """Closes a ring on which the kernel refuses to work, once it writes to no memory any more.

        Returns:
            The completions, and the requests without one, which another engine may repeat.
        """
        self._check_usable()
        self._reap()
        self._closed = True
        self._ring.lib.queue_exit(self._ring.address)
        self._await_the_end()
        self._close_event()
        left = [*self._inside.values(), *self._waiting, *(entry[2] for entry in self._delayed)]
        for held in (self._inside, self._waiting, self._delayed):
            held.clear()
        done, self._ready = self._ready, []
        return done, left

    def _await_the_end(self) -> None:
        """Waits until the kernel has ended the requests of a closed ring.

        It does so by itself after the ring's descriptor is closed, and releases the files last.
        """
        if self._inside or self._wake_armed or self._cancels:
            self._known.await_the_end()

    def _close_event(self) -> None:
        with self._event_lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)
        self._known.close()

    def forked(self) -> None:
        """Closes the child's copies of the ring and its event.

        The ring has the files registered: as long as it is open, their space stays taken. Its
        memory is not mapped here (see :meth:`open`), and no call is made to the kernel.
        """
        was_open, self._open, self._closed = self._open, False, True
        self._event_lock = threading.RLock()  # a thread of the parent may have held it
        self._close_event()
        if not was_open:
            return
        ring_file = self._ring.file()
        try:
            if "io_uring" in os.readlink(f"/proc/self/fd/{ring_file}"):
                os.close(ring_file)
        except OSError:
            return  # there is no such descriptor, or its kind is unknown: then it stays open

    def _drain(self) -> None:
        self.cancel()
        if self._wake_armed:
            os.eventfd_write(self._event, 1)  # ends the read that waits for a wake
        # The kernel may still write into the memory until its last entry has been read.
        while self._inside or self._wake_armed or self._cancels:
            self._ring.submit_and_wait(1.0)
            self._reap()
        self._ready.clear()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._closed and os.getpid() == self._pid:
            self._closed = True
            # Freeing only the memory would leak the ring's descriptor.
            self._ring.lib.queue_exit(self._ring.address)
            self._close_event()
