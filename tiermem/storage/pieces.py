"""A run of addresses at which memory is mapped and unmapped piece by piece.

A tensor over such addresses stays valid, whatever is mapped or unmapped in the rest of the run.
The calls that map memory are :class:`PieceCalls`: the CUDA driver
(:mod:`tiermem.storage.devicepieces`), or host memory that stands in for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from tiermem.core.block import Extent, Tier
from tiermem.errors import CapacityError, TierError
from tiermem.storage.arena import unmapped

CHUNK = 16 << 20
"""Bytes mapped at a time.

A small model uses at most three places of HBM (where it streams, and a run at the
end that may be in two chunks): 48 MiB of such chunks, less than 64 MiB. With the device's own
2 MiB there would be eight times as many calls; larger chunks would save few of them."""
_MOST = 1 << 47
"""Maximal bytes of addresses of any process; lists of chunks are as long as the run."""
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: not in Python's mmap before 3.13

Whole = Callable[[Callable[[], object]], None]
"""Makes a call that no exception of a signal handler interrupts."""


class PieceCalls(Protocol):
    """Calls that reserve addresses and map memory there.

    Attributes:
        granularity: Every address and size is a multiple of it.
    """

    granularity: int

    def reserve(self, nbytes: int) -> int:
        """Reserves ``nbytes`` addresses; returns the first.

        Raises:
            CapacityError: If there are none.
        """
        ...

    def create(self, nbytes: int) -> int | None:
        """Allocates memory; returns its handle, above zero, or None if there is no more."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Maps memory at reserved addresses; it must not be used before :meth:`allow`."""
        ...

    def allow(self, address: int, nbytes: int) -> None:
        """Gives the device read and write access to mapped addresses."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps the memory at addresses: exactly those of one :meth:`map`."""
        ...

    def release(self, handle: int) -> None:
        """Frees memory that is not mapped."""
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Frees reserved addresses, none of which is mapped."""
        ...

    def synchronize(self) -> None:
        """Waits for all work of the device, which may use what is unmapped next."""
        ...


def _whole(call: Callable[[], object]) -> None:
    call()


class Pieces:
    """Maps and unmaps memory in a run of addresses, chunk by chunk.

    Memory and addresses are freed with this object; tensors over the bytes keep it alive.

    Attributes:
        nbytes: Bytes of the run.
        chunk: Bytes that are mapped and unmapped together; fewer at the end of the run.
        address: First address.
        refused: How often no memory was available.
    """

    def __init__(
        self, calls: PieceCalls, nbytes: int, chunk: int = CHUNK, whole: Whole = _whole
    ) -> None:
        """Reserves addresses; maps nothing.

        Args:
            calls: Map and unmap.
            nbytes: Bytes of the run, above zero; rounded up to the granularity of the calls.
            chunk: Bytes of a chunk, likewise.
            whole: Makes the mapping calls uninterruptible, so that nothing is lost in between.

        Raises:
            CapacityError: If the addresses cannot be reserved.
        """
        unit = calls.granularity
        self.nbytes = -(-nbytes // unit) * unit
        self.chunk = min(self.nbytes, -(-chunk // unit) * unit)
        self.refused = 0
        self._calls = calls
        self._whole = whole
        if self.nbytes > _MOST:
            raise CapacityError(
                f"tier hbm: no {nbytes} bytes of addresses; give hbm= what a device can have"
            )
        number = -(-self.nbytes // self.chunk)
        self._there = bytearray(number)  # what callers may use: read at every place in HBM
        self._handles = [0] * number
        self.address = 0

        def reserve() -> None:
            self.address = calls.reserve(self.nbytes)
            run = self.address, self.nbytes, self.chunk
            last = weakref.finalize(
                self, _free, calls, whole, self._there, self._handles, *run, os.getpid()
            )
            last.atexit = False  # device memory ends with the process

        whole(reserve)

    @property
    def mapped(self) -> int:
        """Bytes that are mapped."""
        number = len(self._there)
        return sum(self._size(at) for at in range(number) if self._there[at])

    def missing(self) -> list[Extent]:
        """Returns the runs without memory, by offset."""
        return [
            Extent(begin * self.chunk, min(end * self.chunk, self.nbytes) - begin * self.chunk)
            for begin, end in self._runs(0, len(self._there), 0)
        ]

    def back(self, extent: Extent) -> bool:
        """Maps memory for every byte of an extent.

        Returns:
            False if there is not enough; what could be mapped stays mapped.
        """
        offset, chunk = extent.offset, self.chunk
        first, behind = offset // chunk, -(-(offset + extent.nbytes) // chunk)
        if self._there.find(0, first, behind) < 0:
            return True
        self._whole(lambda: self._map(first, behind))
        if self._there.find(0, first, behind) < 0:
            return True
        self.refused += 1
        return False

    def give_back(self, begin: int, end: int) -> int:
        """Unmaps the chunks that are entirely within ``[begin, end)``; their bytes are lost.

        It waits for the device first.

        Args:
            begin: Offset.
            end: End offset; at the end of the run or beyond, it includes the last, shorter chunk.

        Returns:
            How many bytes were given back.
        """
        first = -(-begin // self.chunk)
        behind = len(self._there) if end >= self.nbytes else end // self.chunk
        before = self.mapped
        if self._there.find(1, first, max(first, behind)) >= 0:
            self._whole(lambda: self._unmap(first, behind))
        return before - self.mapped

    def _map(self, first: int, behind: int) -> None:
        """Maps the chunks of a range that are not mapped, as long as there is memory."""
        for begin, end in self._runs(first, behind, 0):
            at = begin
            try:
                while at < end and self._create(at):
                    at += 1
                if at > begin:
                    start = begin * self.chunk
                    nbytes = min(at * self.chunk, self.nbytes) - start
                    self._calls.allow(self.address + start, nbytes)
            except BaseException:  # memory without access is useless
                for made in range(begin, end):
                    _drop(self._calls, self._handles, made, *self._place(made))
                raise
            self._there[begin:at] = b"\1" * (at - begin)
            if at < end:
                return

    def _create(self, at: int) -> bool:
        """Maps memory for a chunk; returns whether there was any."""
        address, nbytes = self._place(at)
        handle = self._calls.create(nbytes)
        if handle is None:
            return False
        try:
            self._calls.map(address, nbytes, handle)
        except BaseException:
            self._calls.release(handle)
            raise
        self._handles[at] = handle
        return True

    def _unmap(self, first: int, behind: int) -> None:
        self._calls.synchronize()
        for at in range(first, behind):
            if self._there[at]:
                self._there[at] = 0
                _drop(self._calls, self._handles, at, *self._place(at))

    def _runs(self, first: int, behind: int, state: int) -> Iterator[tuple[int, int]]:
        """Yields the runs of chunks that are mapped (1) or not (0): begin and end."""
        at = first
        while (begin := self._there.find(state, at, behind)) >= 0:
            end = self._there.find(1 - state, begin, behind)
            at = behind if end < 0 else end
            yield begin, at

    def _size(self, at: int) -> int:
        return min(self.chunk, self.nbytes - at * self.chunk)

    def _place(self, at: int) -> tuple[int, int]:
        """Returns the address and the bytes of a chunk."""
        return self.address + at * self.chunk, self._size(at)


def _drop(calls: PieceCalls, handles: list[int], at: int, address: int, nbytes: int) -> None:
    """Unmaps and frees the memory of a chunk, if it has any."""
    if handles[at]:
        calls.unmap(address, nbytes)
        handle, handles[at] = handles[at], 0
        calls.release(handle)


def _free(
    calls: PieceCalls,
    whole: Whole,
    there: bytearray,
    handles: list[int],
    address: int,
    nbytes: int,
    chunk: int,
    process: int,
) -> None:
    """Frees memory and addresses, once no tensor is over them any more."""
    if os.getpid() != process:
        return  # a forked child has no driver

    def call() -> None:
        if any(handles):
            calls.synchronize()
        for at in range(len(handles)):
            there[at] = 0
            start = at * chunk
            _drop(calls, handles, at, address + start, min(chunk, nbytes - start))
        calls.free(address, nbytes)

    with suppress(TierError, RuntimeError):  # the device is in a state in which nothing helps
        whole(call)


class HostPieceCalls:
    """Host memory, for the stand-in of a device: pages are allocated at the first touch anyway.

    Attributes:
        granularity: A huge page, as on a device.
        memory: The mapping.
    """

    def __init__(self, granularity: int = 2 << 20) -> None:
        """Maps nothing yet."""
        self.granularity = granularity
        self.memory: mmap.mmap | None = None
        self._first = 0
        self._handles = 0

    def reserve(self, nbytes: int) -> int:
        """Reserves addresses that take no memory and do not count as committed."""
        try:
            self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise unmapped(Tier.HBM, nbytes, error) from error
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        return self._first

    def create(self, nbytes: int) -> int | None:
        """Returns another number."""
        self._handles += 1
        return self._handles

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Does nothing: pages are allocated when they are touched."""

    def allow(self, address: int, nbytes: int) -> None:
        """Does nothing."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Gives the pages back to the system."""
        if self.memory is not None:
            self.memory.madvise(mmap.MADV_DONTNEED, address - self._first, nbytes)

    def release(self, handle: int) -> None:
        """Does nothing: the pages are freed already."""

    def free(self, address: int, nbytes: int) -> None:
        """Drops the mapping, which is unmapped with its last tensor."""
        self.memory = None

    def synchronize(self) -> None:
        """Nothing to wait for."""
