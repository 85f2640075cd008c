"""How much memory a device has left, and whether torch's allocator has run out of it."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch


class DeviceRoom(Protocol):
    """The memory of a device, which torch and other processes allocate from as well.

    Attributes:
        total: Bytes that the device has.
        watched: Whether torch reports when it runs out of memory.
    """

    total: int
    watched: bool

    def free(self) -> int:
        """Returns the bytes not allocated; what torch's allocator caches counts as allocated."""
        ...

    def ran_out(self) -> bool:
        """Whether torch has run out of memory since the last call."""
        ...


class CudaRoom:
    """The memory of a CUDA device.

    torch calls observers before it raises its error. They cannot make it retry (by then it has
    emptied its cache, and it retries once only), so the information is used in the next pass.

    Attributes:
        total: Bytes that the device has.
        index: Number of the device.
        short: Whether torch has run out since the last call of :meth:`ran_out`.
        watched: Whether torch reports it; not with
            ``PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync``.
    """

    def __init__(self, device: torch.device) -> None:
        """Registers with torch's out-of-memory observer; the device has been used before.

        Args:
            device: A CUDA device; ``cuda`` without a number is the current one.
        """
        self._device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.total: int = torch.cuda.mem_get_info(device)[1]
        self.short = False
        self.watched = _watch(self)

    def free(self) -> int:
        """Returns the bytes that are not allocated."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def ran_out(self) -> bool:
        """Whether torch has run out of memory since the last call."""
        short, self.short = self.short, False
        return short


_watching: WeakSet[CudaRoom] = WeakSet()
_attached = False


def _watch(room: CudaRoom) -> bool:
    """Notifies ``room`` when torch runs out of memory, if it can; torch never removes an observer.

    Returns:
        Whether it can.
    """
    global _attached
    _watching.add(room)
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and not _attached:
        try:
            attach(_ran_out)
        except RuntimeError:  # not every torch allocator has observers
            return False
        _attached = True
    return _attached


def _ran_out(device: int, asked: int, allocated: int, free: int) -> None:
    """Observer called by torch in the thread that ran out of memory; amounts are bytes."""
    for room in list(_watching):
        if room.index == device:
            room.short = True
