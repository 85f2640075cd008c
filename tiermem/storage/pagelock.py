"""Page-locks host memory for a device, piece by piece, as more of it is used.

A copy between a device and host memory has to be within one registered piece. So memory is
allocated within pieces (:attr:`LockedPrefix.parts`); if only a run across two of them is
left, these are joined first, which takes as long as locking them again.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from tiermem.core.block import Extent
from tiermem.errors import CapacityError

_TOUCH_UNIT = 64 << 20
_PIECE = 2 << 20
"""Pieces end at multiples of it, so no huge page is in two of them."""


class PageLocks(Protocol):
    """Locks pages for a device."""

    def lock(self, address: int, nbytes: int) -> None:
        """Locks a run of pages, none of which is locked.

        Raises:
            CapacityError: If the system refuses.
        """
        ...

    def unlock(self, address: int) -> None:
        """Unlocks the run that was locked from ``address`` on; no transfer may be using it."""
        ...

    def synchronize(self) -> None:
        """Waits for all copies of the device."""
        ...


class CudaPageLocks:
    """Registers pages with a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Registers with ``device``."""
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """Registers a run of pages.

        Raises:
            CapacityError: If CUDA refuses, as it does beyond the limit of locked memory.
        """
        with torch.cuda.device(self._device):  # torch would use the current device
            code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(code) != 0:
            self._forget_error()
            raise CapacityError(
                f"tier dram: CUDA cannot page-lock {nbytes} bytes (error {int(code)}); "
                "lower dram= or raise the limit of locked memory (ulimit -l)"
            )

    def unlock(self, address: int) -> None:
        """Unregisters a run of pages; one that is not registered is ignored."""
        code = torch.cuda.cudart().cudaHostUnregister(address)
        if int(code) != 0:
            self._forget_error()

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self._device)

    def _forget_error(self) -> None:
        """Clears the error of a failed call, which CUDA keeps, by making torch read it.

        Otherwise the next kernel launch, anywhere, would seem to have failed.
        """
        with torch.cuda.device(self._device), contextlib.suppress(RuntimeError):
            torch.cuda._sleep(0)  # torch has no call that does only that; this checks its launch


class LockedPrefix:
    """The first bytes of a run of memory, locked in pieces; they grow towards its end.

    Attributes:
        nbytes: Bytes of the whole run.
    """

    def __init__(self, locks: PageLocks, address: int, nbytes: int) -> None:
        """Locks nothing yet."""
        self._locks = locks
        self._address = address
        self.nbytes = nbytes
        self._ends: list[int] = []
        self._underway: int | None = None
        self._had = 0  # less is locked only if joining pieces was interrupted
        self._touched = 0  # the bytes before it may have been written since

    @property
    def locked(self) -> int:
        """How many of the first bytes are locked."""
        return self._ends[-1] if self._ends else 0

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Begin and end of each piece, and of what is not locked yet."""
        ends = self._ends if self.locked == self.nbytes else [*self._ends, self.nbytes]
        return list(zip([0, *ends], ends, strict=False))

    def cover(self, extents: Iterable[Extent]) -> None:
        """Locks what some extents need, and a little more; then each is within one piece.

        Raises:
            CapacityError: If pages cannot be locked; those that were locked stay locked.
        """
        self._finish()
        extents = list(extents)
        if self.locked < self._had:
            self._lock(self._had)
        end = max((extent.end for extent in extents), default=0)
        if end > self.locked:
            wanted = max(end, self.locked + self.locked // 8)
            self._lock(min(self.nbytes, -(-wanted // _PIECE) * _PIECE))
        for extent in extents:
            if any(extent.offset < mark < extent.end for mark in self._ends):
                self._join_from(extent.offset)

    def spare(self, extent: Extent) -> bool:
        """Notes that bytes will be written which are not to be locked.

        From now on nothing is cleared there, if they are locked after all.

        Returns:
            Whether some of their pages may not be backed by memory yet.
        """
        fresh = extent.end > self._touched
        self._touched = max(extent.end, self._touched)
        return fresh

    def release(self) -> None:
        """Unlocks everything; no transfer may be in progress."""
        self._finish()
        self._had = 0
        while self._ends:
            self._unlock_last()

    def _lock(self, end: int) -> None:
        """Locks the bytes between the last piece and ``end``."""
        start = self.locked
        self._touch(end)
        self._underway = start
        try:
            self._locks.lock(self._address + start, end - start)
        except CapacityError:
            self._underway = None
            raise
        self._ends.append(end)
        self._underway = None
        self._had = max(end, self._had)

    def _unlock_last(self) -> None:
        self._underway = self._ends[-2] if len(self._ends) > 1 else 0
        self._ends.pop()
        self._finish()

    def _finish(self) -> None:
        """Unlocks a piece that was being locked or unlocked when an exception occurred."""
        if self._underway is not None:
            self._locks.unlock(self._address + self._underway)
            self._underway = None

    def _join_from(self, offset: int) -> None:
        """Joins the piece that contains an offset with all pieces after it."""
        end = self.locked
        self._locks.synchronize()
        while self.locked > offset:
            self._unlock_last()
        self._lock(end)

    def _touch(self, end: int) -> None:
        """Faults pages in from several threads, which is most of the work of locking them."""
        start, self._touched = self._touched, max(end, self._touched)
        address = self._address

        def touch(first: int) -> None:
            ctypes.memset(address + first, 0, min(_TOUCH_UNIT, end - first))

        firsts = range(start, end, _TOUCH_UNIT)
        try:
            with ThreadPoolExecutor(max_workers=16) as pool:
                list(pool.map(touch, firsts))
        except RuntimeError:  # no thread can be started: this one does it all, slower
            for first in firsts:
                touch(first)
