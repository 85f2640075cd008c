"""Arenas that map memory piece by piece as it is used, and unmap it."""

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
"""Roughly the addresses that a process can have for a device: 47 bits, half of them for others."""


def _directly(call: Any) -> None:
    call()


class MappedDeviceArena(Arena):
    """Memory of a CUDA device mapped at reserved addresses, in chunks."""

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        calls: PieceCalls,
        *,
        whole: Whole = _directly,
        chunk: int = CHUNK,
    ) -> None:
        """Reserves addresses; maps no memory.

        Args:
            capacity: Maximal size in bytes.
            device: The device.
            calls: Map its memory.
            whole: Makes calls that Ctrl-C must not interrupt.
            chunk: Bytes mapped at a time.

        Raises:
            CapacityError: If the addresses cannot be reserved.
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
        """Bytes that are mapped of the device now."""
        return 0 if self._pieces is None else self._pieces.mapped

    def back(self, extent: Extent) -> bool:
        """Maps memory for an extent where it has none; returns whether it has memory now."""
        return (self._pieces or self._of()).back(extent)

    def missing(self) -> list[Extent]:
        """Returns the runs without memory, by offset."""
        return self._of().missing()

    def trim(self, begin: int, end: int) -> int:
        """Gives the chunks within ``[begin, end)`` back to the device, after its work on them."""
        return self._of().give_back(begin, end)

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, all of which is mapped.

        torch asks the driver which device the address belongs to, and the driver knows that of
        mapped addresses only.
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

    Pages that were never touched take no memory, nor do those that are given back.
    """

    def __init__(
        self,
        capacity: int,
        calls: HostPieceCalls | None = None,
        *,
        whole: Whole = _directly,
        chunk: int = CHUNK,
    ) -> None:
        """Reserves addresses.

        Args:
            capacity: Maximal size in bytes.
            calls: Map the memory, as a device would.
            whole: Makes calls that Ctrl-C must not interrupt.
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
        """Bytes that are mapped now, counted as on a device."""
        return 0 if self._pieces is None else self._pieces.mapped

    def back(self, extent: Extent) -> bool:
        """Maps memory for an extent where it has none; returns whether it has memory now."""
        return (self._pieces or self._of()).back(extent)

    def missing(self) -> list[Extent]:
        """Returns the runs without memory, by offset."""
        return self._of().missing()

    def trim(self, begin: int, end: int) -> int:
        """Gives the pages of the chunks within ``[begin, end)`` back."""
        return self._of().give_back(begin, end)

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, with its own storage."""
        if self._seen is self._map and self._map is not None:
            # tensors over the bytes keep the pieces alive, and the pieces keep the memory
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
