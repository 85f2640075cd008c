"""Files and memory registered with an io_uring ring, which saves a look-up per request."""

from __future__ import annotations

import bisect
import ctypes
import os
import select
from collections.abc import Sequence

from tiermem.io.ring import Iovec, Ring, prefault

MAX_AREA = 1 << 30
"""Maximal bytes of one registered buffer."""
_END_MILLISECONDS = 120_000  # longer than disks take to answer, or the kernel to give up on them


class Registered:
    """What was registered with one ring, as far as the kernel permitted.

    Attributes:
        files: Descriptors, as they were given.
        fixed: Whether requests name files by their index in that list.
        areas: Addresses and bytes of the registered memory, in order.
        notes: What the kernel refused, and why.
    """

    def __init__(self) -> None:
        self.files: list[int] = []
        self.fixed = False
        self.areas: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self._starts: list[int] = []
        self._witness = -1

    def add_files(self, ring: Ring, files: Sequence[int]) -> None:
        """Registers files, and the end of a pipe that closes when the kernel releases them."""
        self.files = list(files)
        if not self.files:
            return
        # The ring's end of the pipe is closed with the ring: when no request is in progress any
        # more.
        self._witness, end = os.pipe()
        try:
            array = (ctypes.c_int * (len(self.files) + 1))(*self.files, end)
            code = ring.lib.register_files(ring.address, ctypes.addressof(array), len(array))
        finally:
            os.close(end)
        self.fixed = code == 0
        if code != 0:
            self.notes.append(f"files not registered: {os.strerror(-code)}")

    def add_buffers(self, ring: Ring, buffers: Sequence[tuple[int, int]]) -> None:
        """Registers all of them or, if the kernel refuses, only the first."""
        code = self._try_buffers(ring, buffers)
        if code != 0 and len(buffers) > 1:
            self.notes.append(f"only the first buffer registered: {os.strerror(-code)}")
            code = self._try_buffers(ring, buffers[:1])
        if code != 0:
            self.notes.append(f"buffers not registered: {os.strerror(-code)}")

    def _try_buffers(self, ring: Ring, buffers: Sequence[tuple[int, int]]) -> int:
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
        code = ring.lib.register_buffers(ring.address, ctypes.addressof(array), len(areas))
        if code == 0:
            self.areas = areas
            self._starts = [start for start, _ in areas]
        return int(code)

    def area_of(self, address: int, nbytes: int) -> int:
        """Returns the number of the registered area that contains some memory; -1 for none."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0:
            start, length = self.areas[index]
            if address + nbytes <= start + length:
                return index
        return -1

    def let_go(self, ring: Ring) -> None:
        """Unregisters the files of a ring that has no request in progress.

        Otherwise the kernel keeps them, and the space of those without a name, until it has
        destroyed the ring, some time after that was closed.
        """
        if self.fixed:
            ring.lib.unregister_files(ring.address)

    def await_the_end(self) -> None:
        """Waits until the kernel has released the files of a ring that was closed."""
        if self.fixed:
            poll = select.poll()
            poll.register(self._witness, select.POLLIN)
            poll.poll(_END_MILLISECONDS)

    def close(self) -> None:
        """Closes this process's end of the pipe."""
        witness, self._witness = self._witness, -1
        if witness >= 0:
            os.close(witness)
