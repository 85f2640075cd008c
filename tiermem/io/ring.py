"""The C functions of liburing, and how a ring is set up.

The package's own Python calls hold the GIL, so the exported C functions are
used instead: those that may block through ``CDLL`` (the GIL is released), the
short ones through ``PyDLL`` (if each call released the GIL, a busy thread could take
it for a whole switch interval each time).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from types import SimpleNamespace

from tiermem.io.engine import PASSING

RING_NBYTES = 1024  # struct io_uring is 216 bytes; room for later versions
RING_FD = 196  # its ring_fd, after both queues (104 and 88 bytes) and the flags
_PARAMS_NBYTES = 120
_COOP_TASKRUN = 1 << 8
_SINGLE_ISSUER = 1 << 12
_DEFER_TASKRUN = 1 << 13
FLAG_CHOICES = (
    _SINGLE_ISSUER | _DEFER_TASKRUN | _COOP_TASKRUN,
    _SINGLE_ISSUER | _COOP_TASKRUN,
    _COOP_TASKRUN,
    0,
)
"""Ring flags, best first; older kernels return EINVAL for those that they do not know."""

_POPULATE_WRITE = 23
_CQE = struct.Struct("<Qi")


class Timespec(ctypes.Structure):
    """The kernel's ``struct __kernel_timespec``."""

    _fields_ = (("sec", ctypes.c_int64), ("nsec", ctypes.c_int64))


class Iovec(ctypes.Structure):
    """The kernel's ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_P, _U, _I, _U64 = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64
_BLOCKING = {
    "io_uring_queue_init_params": (_I, (_U, _P, _P)),
    "io_uring_queue_exit": (None, (_P,)),
    "io_uring_submit_and_get_events": (_I, (_P,)),
    "io_uring_submit_and_wait_timeout": (_I, (_P, _P, _U, _P, _P)),
    "io_uring_ring_dontfork": (_I, (_P,)),
    "io_uring_register_files": (_I, (_P, _P, _U)),
    "io_uring_unregister_files": (_I, (_P,)),
    "io_uring_register_buffers": (_I, (_P, _P, _U)),
}
_QUICK = {
    "io_uring_get_sqe": (_P, (_P,)),
    "io_uring_prep_read": (None, (_P, _I, _P, _U, _U64)),
    "io_uring_prep_write": (None, (_P, _I, _P, _U, _U64)),
    "io_uring_prep_read_fixed": (None, (_P, _I, _P, _U, _U64, _I)),
    "io_uring_prep_write_fixed": (None, (_P, _I, _P, _U, _U64, _I)),
    "io_uring_prep_cancel64": (None, (_P, _U64, _I)),
    "io_uring_sqe_set_flags": (None, (_P, _U)),
    "io_uring_sqe_set_data64": (None, (_P, _U64)),
    "io_uring_peek_batch_cqe": (_U, (_P, _P, _U)),
    "io_uring_cq_advance": (None, (_P, _U)),
}


def load_library() -> SimpleNamespace:
    """Binds the C functions.

    Raises:
        ImportError: If the package is missing, cannot be loaded or lacks a function.
    """
    import liburing

    path = liburing.liburing.__file__
    try:
        blocking, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        bound = SimpleNamespace()
        for library, table in ((blocking, _BLOCKING), (quick, _QUICK)):
            for name, (result, arguments) in table.items():
                function = library[name]
                function.restype = result
                function.argtypes = arguments
                setattr(bound, name.removeprefix("io_uring_"), function)
    except (OSError, AttributeError) as error:
        raise ImportError(f"package liburing at {path} is not usable: {error}") from error
    return bound


def init_ring(lib: SimpleNamespace, ring: int, entries: int) -> int:
    """Sets up a ring with the best flags that the kernel takes.

    Args:
        lib: What :func:`load_library` returned.
        ring: Address of zeroed memory for ``struct io_uring``.
        entries: Length of the submission queue.

    Returns:
        The flags in use.

    Raises:
        OSError: If the kernel refuses a ring altogether.
    """
    for flags in FLAG_CHOICES:
        ctypes.memset(ring, 0, RING_NBYTES)
        params = ctypes.create_string_buffer(_PARAMS_NBYTES)
        struct.pack_into("<I", params, 8, flags)
        code = lib.queue_init_params(entries, ring, ctypes.addressof(params))
        if code == 0:
            return flags
        if code != -errno.EINVAL:
            break
    raise OSError(-code, f"io_uring_queue_init: {os.strerror(-code)}")


class Ring:
    """One ring, and the memory through which the kernel and this process exchange entries.

    Attributes:
        lib: The C functions.
        address: Address of the ring.
        flags: The flags with which it was set up.
    """

    def __init__(self, entries: int) -> None:
        """Reserves memory for a ring whose submission queue has so many entries."""
        self.lib = load_library()
        self._memory = ctypes.create_string_buffer(RING_NBYTES)
        self.address = ctypes.addressof(self._memory)
        self.flags = 0
        self._entries = entries
        self._batch = (ctypes.c_void_p * (2 * entries))()
        self._timespec = Timespec()
        self._first = ctypes.c_void_p()

    def start(self) -> None:
        """Asks the kernel to set up the ring.

        Raises:
            OSError: If it refuses a ring.
        """
        self.flags = init_ring(self.lib, self.address, self._entries)

    def submit_and_wait(self, left: float | None) -> None:
        """Submits, and waits in the kernel for up to ``left`` seconds (0: not at all)."""
        if left == 0.0:
            # Deferred task work only runs when the kernel is asked for events.
            code = self.lib.submit_and_get_events(self.address)
            if code >= 0 or -code in PASSING:
                return
            raise OSError(-code, f"io_uring_submit: {os.strerror(-code)}")
        timespec = None
        if left is not None:
            whole = int(left)
            self._timespec.sec, self._timespec.nsec = whole, int((left - whole) * 1e9)
            timespec = ctypes.addressof(self._timespec)
        out = ctypes.addressof(self._first)
        code = self.lib.submit_and_wait_timeout(self.address, out, 1, timespec, None)
        if code < 0 and -code not in PASSING and code != -errno.ETIME:
            raise OSError(-code, f"io_uring_submit_and_wait: {os.strerror(-code)}")

    def completed(self) -> list[tuple[int, int]]:
        """Removes all entries from the completion queue; returns their data and results."""
        entries: list[tuple[int, int]] = []
        batch = ctypes.addressof(self._batch)
        while True:
            count = self.lib.peek_batch_cqe(self.address, batch, len(self._batch))
            if count == 0:
                return entries
            # Copied first and returned at once: an entry that is read twice would be a lost
            # request.
            for address in self._batch[:count]:
                entries.append(_CQE.unpack(ctypes.string_at(address or 0, 12)))
            self.lib.cq_advance(self.address, count)

    def file(self) -> int:
        """Returns the ring's descriptor."""
        (found,) = struct.unpack_from("<i", self._memory, RING_FD)
        return int(found)


def prefault(address: int, nbytes: int) -> None:
    """Faults memory in without changing it: registering cold pages is a hundred times slower."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = os.sysconf("SC_PAGESIZE")
    start = address // page * page
    length = -(-(address + nbytes - start) // page) * page
    # A kernel without MADV_POPULATE_WRITE refuses; registering then faults the pages itself.
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)
