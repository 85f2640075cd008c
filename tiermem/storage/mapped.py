"""Arenas that take memory piece by piece, as more of them is used, and give it back."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from tiermem.core.block import Extent, Tier
from tiermem.errors import CapacityError, ClosedError
from tiermem.storage.arena import Arena, DeviceBytes, HostArena
from tiermem.storage.pieces import CHUNK, HostPieceCalls, PieceCalls, Pieces, Whole

_MOST = 1 << 46
"""Addresses that a process can have for a device, about: 47 bits, and half of them for others."""


def _directly(call: Any) -> None:
    call()


class MappedDeviceArena(Arena):
    """Memory of a CUDA device behind addresses of its own, in chunks."""

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        calls: PieceCalls,
        *,
        whole: Whole = _directly,
        chunk: int = CHUNK,
    ) -> None:
        """Reserves addresses; no memory is taken.

        Args:
            capacity: Bytes that it may come to.
            device: The device.
            calls: Map its memory.
            whole: Makes calls that Ctrl-C may not cut in two.
            chunk: Bytes mapped at a time.

        Raises:
            CapacityError: If there are no such addresses.
        """
        super().__init__(Tier.HBM, capacity)
        self.device = device
        if self.capacity > _MOST:
            raise CapacityError(f"tier hbm: no {capacity} bytes on {device}, as asked with hbm=")
        self._pieces: Pieces | None = Pieces(calls, max(1, self.capacity), chunk, whole)
        self.address = self._pieces.address
        self.chunk = self._pieces.chunk

    @property
    def mapped(self) -> int:
        """Bytes that are taken from the device now."""
        return 0 if self._pieces is None else self._pieces.mapped

    def back(self, extent: Extent) -> bool:
        """Maps memory behind an extent where there is none; returns whether it has memory now."""
        return (self._pieces or self._of()).back(extent)

    def missing(self) -> list[Extent]:
        """Returns the runs that have no memory behind them, by offset."""
        return self._of().missing()

    def trim(self, begin: int, end: int) -> int:
        """Gives the chunks within ``[begin, end)`` back to the device, once it is through."""
        return self._of().give_back(begin, end)

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, all of which is mapped.

        torch asks the driver which device the address is of, and the driver knows that of what
        is mapped only.
        """
        found = DeviceBytes(self._of(), self.address + extent.offset, extent.nbytes)
        return torch.as_tensor(found, device=self.device)

    def close(self) -> None:
        """Drops the arena's reference; the memory is freed with its last tensor."""
        super().close()
        self._pieces = None

    def _of(self) -> Pieces:
        if self._pieces is None:
            raise ClosedError("the hbm arena is closed")
        return self._pieces


class MappedHostArena(HostArena):
    """Host memory that stands in for such an arena of a device, chunk by chunk.

    Pages that were never touched take no memory, and those that are given back take none again.
    """

    def __init__(
        self,
        capacity: int,
        calls: HostPieceCalls | None = None,
        *,
        whole: Whole = _directly,
        chunk: int = CHUNK,
    ) -> None:
        """Maps addresses.

        Args:
            capacity: Bytes that it may come to.
            calls: Map the memory, as a device would.
            whole: Makes calls that Ctrl-C may not cut in two.
            chunk: Bytes mapped at a time.

        Raises:
            CapacityError: If the system refuses.
        """
        self._calls = calls or HostPieceCalls()
        self._how = whole, chunk
        self._pieces: Pieces | None = None
        super().__init__(Tier.HBM, capacity)

    def _open(self, nbytes: int) -> mmap.mmap:
        whole, chunk = self._how
        self._pieces = Pieces(self._calls, nbytes, chunk, whole)
        self.chunk = self._pieces.chunk
        if self._calls.memory is None:
            raise CapacityError(f"tier hbm: no {nbytes} bytes of host memory")
        return self._calls.memory

    @property
    def mapped(self) -> int:
        """Bytes that are taken now, counted as a device would."""
        return 0 if self._pieces is None else self._pieces.mapped

    def back(self, extent: Extent) -> bool:
        """Maps memory behind an extent where there is none; returns whether it has memory now."""
        return (self._pieces or self._of()).back(extent)

    def missing(self) -> list[Extent]:
        """Returns the runs that have no memory behind them, by offset."""
        return self._of().missing()

    def trim(self, begin: int, end: int) -> int:
        """Gives the pages of the chunks within ``[begin, end)`` back."""
        return self._of().give_back(begin, end)

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, with a storage of its own."""
        if self._seen is self._map and self._map is not None:
            # tensors over the bytes keep the pieces alive: with these the memory goes
            self._seen = (ctypes.c_ubyte * len(self._map)).from_buffer(self._map)
            self._seen.pieces = self._pieces
        return super().bytes_of(extent)

    def close(self) -> None:
        """Drops the arena's reference; the memory is freed with its last tensor."""
        super().close()
        self._pieces = None

    def _of(self) -> Pieces:
        if self._pieces is None:
            raise ClosedError("the hbm arena is closed")
        return self._pieces
