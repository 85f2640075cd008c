"""File I/O through io_uring, on the C library inside the ``liburing`` package."""

from __future__ import annotations

import bisect
import ctypes
import errno
import heapq
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from tiermem.errors import ClosedError
from tiermem.io.engine import (
    PASSING,
    IoCompletion,
    IoEngine,
    IoOp,
    IoRequest,
    Progress,
    check_request,
)
from tiermem.io.ring import (
    RING_FD,
    RING_NBYTES,
    Iovec,
    Timespec,
    init_ring,
    load_library,
    prefault,
)

MAX_AREA = 1 << 30
"""Bytes that one registered buffer may have."""
MAX_PIECE = 1 << 30
"""Bytes asked of the kernel at once (it stops at 2 GiB - 4 KiB by itself)."""

_WAKE = (1 << 63) | 1
_CANCEL = (1 << 63) | 2
_CQE = struct.Struct("<Qi")
_FIXED_FILE = 1 << 0
_END_MILLISECONDS = 120_000  # longer than disks take to answer, or the kernel to give them up


class UringEngine(IoEngine):
    """One ring, used by the thread that opened it.

    Args:
        depth: Requests that may be inside the kernel at once; the rest is held back.
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
        self._witness = -1
        self._files: list[int] = []
        self._fixed_files = False
        self._areas: list[tuple[int, int]] = []
        self._area_starts: list[int] = []
        self._notes: list[str] = []

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
        self._lib = load_library()
        self._ring_memory = ctypes.create_string_buffer(RING_NBYTES)
        self._ring = ctypes.addressof(self._ring_memory)
        entries = 1 << (self._depth + 1).bit_length()
        self.flags = init_ring(self._lib, self._ring, entries)
        self._open = True
        self._batch = (ctypes.c_void_p * (2 * entries))()
        self._batch_address = ctypes.addressof(self._batch)
        self._event_value = ctypes.c_uint64()
        self._timespec = Timespec()
        self._cqe_out = ctypes.c_void_p()
        try:
            self._lib.ring_dontfork(self._ring)  # a mapping would keep the ring open in a child
            self._event = os.eventfd(0, os.EFD_CLOEXEC)
            self._files = list(files)
            self._register_files()
            self._register_buffers(buffers)
        except BaseException:
            self.close()
            raise

    def _register_files(self) -> None:
        if not self._files:
            return
        # The ring's own end of a pipe goes with the ring: when nothing is under way any more.
        self._witness, end = os.pipe()
        try:
            array = (ctypes.c_int * (len(self._files) + 1))(*self._files, end)
            code = self._lib.register_files(self._ring, ctypes.addressof(array), len(array))
        finally:
            os.close(end)
        self._fixed_files = code == 0
        if code != 0:
            self._notes.append(f"files not registered: {os.strerror(-code)}")

    def _register_buffers(self, buffers: Sequence[tuple[int, int]]) -> None:
        """Registers all of them or, where the kernel refuses, the first alone."""
        code = self._try_buffers(buffers)
        if code != 0 and len(buffers) > 1:
            self._notes.append(f"only the first buffer registered: {os.strerror(-code)}")
            code = self._try_buffers(buffers[:1])
        if code != 0:
            self._notes.append(f"buffers not registered: {os.strerror(-code)}")

    def _try_buffers(self, buffers: Sequence[tuple[int, int]]) -> int:
        areas = []
        for address, nbytes in buffers:
            for start in range(address, address + nbytes, MAX_AREA):
                areas.append((start, min(MAX_AREA, address + nbytes - start)))
        if not areas:
            return 0
        for address, nbytes in areas:
            prefault(address, nbytes)
        areas.sort()
        array = (Iovec * len(areas))(*(Iovec(*area) for area in areas))
        code = self._lib.register_buffers(self._ring, ctypes.addressof(array), len(areas))
        if code == 0:
            self._areas = areas
            self._area_starts = [start for start, _ in areas]
        return int(code)

    def describe(self) -> str:
        """Returns the flags and registrations in use."""
        notes = "; ".join(self._notes) or "files and buffers registered"
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
            check_request(request, len(self._files))
        self._waiting.extend(map(Progress, requests))
        if self._fill():
            self._enter(0.0)

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed or not self._open:
            raise ClosedError("this I/O engine is not open")

    def _fill(self) -> int:
        """Puts what waits into the submission queue; returns how many requests went in."""
        if self._delayed:
            now = time.monotonic()
            while self._delayed and self._delayed[0][0] <= now:
                self._waiting.append(heapq.heappop(self._delayed)[2])
        count = 0
        while self._waiting and len(self._inside) < self._depth:
            sqe = self._lib.get_sqe(self._ring)
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
        file = request.file if self._fixed_files else self._files[request.file]
        area = self._area_of(address, nbytes)
        lib, read = self._lib, request.op is IoOp.READ
        if area >= 0:
            prepare = lib.prep_read_fixed if read else lib.prep_write_fixed
            prepare(sqe, file, address, nbytes, offset, area)
        else:
            prepare = lib.prep_read if read else lib.prep_write
            prepare(sqe, file, address, nbytes, offset)
        if self._fixed_files:
            lib.sqe_set_flags(sqe, _FIXED_FILE)
        self._sequence += 1
        lib.sqe_set_data64(sqe, self._sequence)
        self._inside[self._sequence] = progress

    def _area_of(self, address: int, nbytes: int) -> int:
        index = bisect.bisect_right(self._area_starts, address) - 1
        if index >= 0:
            start, length = self._areas[index]
            if address + nbytes <= start + length:
                return index
        return -1

    def _arm_wake(self) -> None:
        if self._wake_armed:
            return
        sqe = self._lib.get_sqe(self._ring)
        if not sqe:
            return
        self._lib.prep_read(sqe, self._event, ctypes.addressof(self._event_value), 8, 0)
        self._lib.sqe_set_data64(sqe, _WAKE)
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
            self._enter(left)
            woken = self._reap() or woken
            if self._ready or woken:
                break
            if deadline is not None and time.monotonic() >= deadline:
                break
        done, self._ready = self._ready, []
        return done

    def _left(self, deadline: float | None) -> float | None:
        """Returns the seconds that this round may sleep; retries that fall due shorten it."""
        ends = [] if deadline is None else [deadline]
        if self._delayed:
            ends.append(self._delayed[0][0])
        if not ends:
            return None
        return max(0.0, min(ends) - time.monotonic())

    def _enter(self, left: float | None) -> None:
        """Submits, and sleeps in the kernel for up to ``left`` seconds (0: not at all)."""
        lib = self._lib
        if left == 0.0:
            # Deferred task work only runs when the kernel is asked for events.
            code = lib.submit_and_get_events(self._ring)
            if code >= 0 or -code in PASSING:
                return
            raise OSError(-code, f"io_uring_submit: {os.strerror(-code)}")
        timespec = None
        if left is not None:
            whole = int(left)
            self._timespec.sec, self._timespec.nsec = whole, int((left - whole) * 1e9)
            timespec = ctypes.addressof(self._timespec)
        out = ctypes.addressof(self._cqe_out)
        code = lib.submit_and_wait_timeout(self._ring, out, 1, timespec, None)
        if code < 0 and -code not in PASSING and code != -errno.ETIME:
            raise OSError(-code, f"io_uring_submit_and_wait: {os.strerror(-code)}")

    def _reap(self) -> bool:
        """Takes every entry out of the completion queue; returns whether a wake was among them."""
        entries: list[tuple[int, int]] = []
        while True:
            count = self._lib.peek_batch_cqe(self._ring, self._batch_address, len(self._batch))
            if count == 0:
                break
            # Copied first and given back at once: an entry seen twice would be a lost request.
            for address in self._batch[:count]:
                entries.append(_CQE.unpack(ctypes.string_at(address or 0, 12)))
            self._lib.cq_advance(self._ring, count)
        woken = False
        for data, result in entries:
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
        completion = progress.settle(result)
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
        with self._event_lock:  # a closed descriptor's number may be another file's by now
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
        self._enter(0.0)

    def _ask_cancel(self, data: int) -> None:
        sqe = self._lib.get_sqe(self._ring)
        if not sqe:
            self._enter(0.0)
            sqe = self._lib.get_sqe(self._ring)
        if sqe:  # without room the request simply runs to its end
            self._lib.prep_cancel64(sqe, data, 0)
            self._lib.sqe_set_data64(sqe, _CANCEL)
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
            pass  # the kernel takes no more calls; it ends what it has all the same
        finally:
            self._closed = True
            if self._open:
                self._lib.queue_exit(self._ring)
                if not drained:
                    self._await_the_end()
            self._close_event()

    def abandon(self) -> tuple[list[IoCompletion], list[Progress]]:
        """Closes a ring that the kernel refuses to work on, once it writes to no memory any more.

        Returns:
            What has completed, and what has not and may be done again by another engine.
        """
        self._check_usable()
        self._reap()
        self._closed = True
        self._lib.queue_exit(self._ring)
        self._await_the_end()
        self._close_event()
        left = [*self._inside.values(), *self._waiting, *(entry[2] for entry in self._delayed)]
        for held in (self._inside, self._waiting, self._delayed):
            held.clear()
        done, self._ready = self._ready, []
        return done, left

    def _await_the_end(self) -> None:
        """Waits until the kernel has ended what a closed ring had under way.

        It does so by itself, after the ring's descriptor is closed, and lets go of the files last.
        """
        if self._fixed_files and (self._inside or self._wake_armed or self._cancels):
            poll = select.poll()
            poll.register(self._witness, select.POLLIN)
            poll.poll(_END_MILLISECONDS)

    def _close_event(self) -> None:
        with self._event_lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)
        witness, self._witness = self._witness, -1
        if witness >= 0:
            os.close(witness)

    def forked(self) -> None:
        """Closes the child's copies of the ring and its event.

        The ring has the files registered: with it open their space would stay taken. Its memory
        is not mapped here (see :meth:`open`), and nothing is told to the kernel.
        """
        was_open, self._open, self._closed = self._open, False, True
        self._event_lock = threading.RLock()  # a thread of the parent may have had it
        self._close_event()
        if not was_open:
            return
        (ring_file,) = struct.unpack_from("<i", self._ring_memory, RING_FD)
        try:
            if "io_uring" in os.readlink(f"/proc/self/fd/{ring_file}"):
                os.close(ring_file)
        except OSError:
            return  # no such descriptor, or no way to tell what it is: then it stays open

    def _drain(self) -> None:
        self.cancel()
        if self._wake_armed:
            os.eventfd_write(self._event, 1)  # ends the read that waits for a wake
        # The kernel may still write into the memory until its last entry has been read.
        while self._inside or self._wake_armed or self._cancels:
            self._enter(1.0)
            self._reap()
        self._ready.clear()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._closed and os.getpid() == self._pid:
            self._closed = True
            # Dropping the memory alone would leak the ring's descriptor.
            self._lib.queue_exit(self._ring)
            self._close_event()
