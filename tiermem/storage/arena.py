"""Memory arenas: one run of bytes, allocated once, accessed through tensors.

A tensor of an arena has its own storage that covers just its extent. So
the storage's reference count tells whether anything (a view, a saved tensor, a
user's variable) still has access to those bytes; the manager relies on it. The
memory itself is freed with the last such tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from tiermem.config import exact_size
from tiermem.core.block import ALIGNMENT, Extent, Tier, align_up
from tiermem.errors import CapacityError, ClosedError
from tiermem.storage.pagelock import CudaPageLocks, LockedPrefix, PageLocks

_MOST = 1 << 62  # torch takes no larger sizes
_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19  # MADV_WIPEONFORK, MADV_KEEPONFORK: not in Python's mmap


def unmapped(tier: Tier, nbytes: int, error: Exception) -> CapacityError:
    """Returns the error about memory of the host that cannot be mapped.

    Args:
        tier: What it was to be.
        nbytes: How many bytes were requested.
        error: Says why.
    """
    return CapacityError(
        f"tier {tier.value}: no {exact_size(nbytes)} of host memory: {error}",
        f"give {tier.value}= less, or raise the limit of addresses (ulimit -v) where there is one",
    )


class Arena:
    """One run of bytes in one tier.

    Attributes:
        tier: HBM or DRAM.
        capacity: Bytes.
        address: First byte in memory.
        chunk: Bytes of the pieces in which memory is taken and given back.
        grows: Whether memory is taken as it is used, and not all at once.
    """

    address = 0
    chunk = ALIGNMENT
    grows = True

    def __init__(self, tier: Tier, capacity: int) -> None:
        """Keeps the numbers; subclasses allocate."""
        self.tier = tier
        self.capacity = align_up(capacity)
        self.closed = False

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, with its own storage."""
        raise NotImplementedError

    def show_to_children(self, extents: Iterable[Extent] | None) -> None:
        """Sets which bytes children forked from now on see; they see zeros in the rest.

        Args:
            extents: Page-aligned, or None for the whole arena.
        """
        return

    @property
    def mapped(self) -> int:
        """Bytes that are allocated from the device or the host now."""
        return self.capacity

    def back(self, extent: Extent) -> bool:
        """Maps memory for an extent where it has none; returns whether it has memory now."""
        return True

    def missing(self) -> Sequence[Extent]:
        """Returns the runs without memory, by offset."""
        return ()

    def trim(self, begin: int, end: int) -> int:
        """Frees memory in ``[begin, end)`` as far as possible; its bytes are not needed.

        Returns:
            How many bytes were freed.
        """
        return 0

    def close(self) -> None:
        """Drops the arena's own reference to the memory."""
        self.closed = True


class HostArena(Arena):
    """An anonymous private mapping, page-aligned and of exact size.

    A forked child sees zeros, which take no memory. Otherwise the kernel would keep the contents
    at the time of the fork for the child, page by page as the parent writes, and copy pages that
    are registered with a device or with io_uring immediately.
    """

    def __init__(
        self,
        tier: Tier,
        capacity: int,
        *,
        device: torch.device | None = None,
        locks: PageLocks | None = None,
        as_needed: bool = False,
    ) -> None:
        """Maps the memory.

        Args:
            tier: DRAM, or HBM if host memory stands in for it.
            capacity: Bytes.
            device: The device of the copies; for a CUDA device pages are locked.
            locks: Locks them; by default the one that fits ``device``.
            as_needed: Whether pages are locked by :meth:`need`, and not all at once.

        Raises:
            CapacityError: If the system refuses the mapping or the locking of pages.
        """
        super().__init__(tier, capacity)
        size = max(self.capacity, ALIGNMENT)
        self._map: mmap.mmap | None = self._open(size)
        self._seen: Any = self._map
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages works, too, only slower
        self._wiped = True
        self.show_to_children(())
        self.address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        if locks is None and device is not None and device.type == "cuda":
            locks = CudaPageLocks(device)
        self._locked = None if locks is None else LockedPrefix(locks, self.address, size)
        if not as_needed:
            self.need([Extent(0, size)])

    def _open(self, nbytes: int) -> mmap.mmap:
        """Maps the memory."""
        try:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
        except (OSError, ValueError, OverflowError) as error:
            raise unmapped(self.tier, nbytes, error) from error

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Begin and end of each run within which an extent should be."""
        return [(0, self.capacity)] if self._locked is None else self._locked.parts

    def need(self, extents: Iterable[Extent]) -> None:
        """Locks the pages of extentsif this arena locks pages.

        Raises:
            CapacityError: If the system refuses.
        """
        if self._locked is not None:
            self._locked.cover(extents)

    def spare(self, extent: Extent) -> bool:
        """Notes that only the host uses an extent, whose pages need not be locked.

        Returns:
            Whether some of its pages may not be backed yet; False if none are locked.
        """
        return self._locked is not None and self._locked.spare(extent)

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, with its own storage."""
        if self._map is None:
            raise ClosedError(f"the {self.tier.value} arena is closed")
        return torch.frombuffer(
            self._seen, dtype=torch.uint8, offset=extent.offset, count=extent.nbytes
        )

    def show_to_children(self, extents: Iterable[Extent] | None) -> None:
        """Sets which bytes children forked from now on see; they see zeros in the rest.

        With kernels before 4.14 they see everything.
        """
        if self._map is None or not self._wiped:
            return
        try:
            self._map.madvise(_KEEP_ON_FORK if extents is None else _WIPE_ON_FORK)
            for extent in extents or ():
                self._map.madvise(_KEEP_ON_FORK, extent.offset, extent.nbytes)
        except OSError:
            self._wiped = False

    @property
    def locked(self) -> int:
        """Bytes that are page-locked, so that none of these pages can be given back."""
        return 0 if self._locked is None else self._locked.locked

    def unlock(self) -> None:
        """Unlocks the memory; no transfer may be using it."""
        if self._locked is not None:
            self._locked.release()

    def give_back(self, extent: Extent) -> None:
        """Gives the pages of an extent back to the systemif they are not locked.

        Its bytes are lost; a later write there gets new pages.
        """
        if self._map is None or self.locked:
            return
        with suppress(OSError, ValueError):  # pages larger than the alignment: they are kept
            self._map.madvise(mmap.MADV_DONTNEED, extent.offset, extent.nbytes)

    def close(self) -> None:
        """Unregisters the memory; it is unmapped with its last tensor."""
        super().close()
        self.unlock()
        self._map = self._seen = None


class DeviceBytes:
    """Presents device-accessible bytes to torch, for ``torch.as_tensor``; keeps them alive."""

    def __init__(self, keeper: object, address: int, nbytes: int) -> None:
        """Describes ``nbytes`` bytes from ``address`` on, which exist as long as ``keeper``."""
        self._keeper = keeper
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class DeviceArena(Arena):
    """Memory of a CUDA device, allocated once by torch's allocator.

    For devices and drivers that cannot map it piece by piece; see
    :class:`~tiermem.storage.mapped.MappedDeviceArena`.
    """

    grows = False

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Allocates the memory.

        Raises:
            CapacityError: If the device does not have that much free.
        """
        super().__init__(Tier.HBM, capacity)
        self.device = device
        if self.capacity > _MOST:
            raise CapacityError(f"tier hbm: no {capacity} bytes on {device}, as asked with hbm=")
        try:
            self._whole: torch.Tensor | None = torch.empty(
                max(self.capacity, ALIGNMENT), dtype=torch.uint8, device=device
            )
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise CapacityError(
                f"tier hbm: {device} has {free} of {total} bytes free, not the {capacity} "
                "asked for with hbm="
            ) from error
        self.address = self._whole.data_ptr()

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns a new 1-D uint8 tensor over ``extent``, with its own storage."""
        if self._whole is None:
            raise ClosedError("the hbm arena is closed")
        found = DeviceBytes(self._whole, self.address + extent.offset, extent.nbytes)
        return torch.as_tensor(found, device=self.device)

    def close(self) -> None:
        """Drops the arena's reference; the memory is freed with its last tensor."""
        super().close()
        self._whole = None
