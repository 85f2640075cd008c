"""A pool of extents below HBM for data that lives less than a step; they are reused by size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakSet

from tiermem.config import Home
from tiermem.core.block import Extent, Tier, align_up
from tiermem.errors import CapacityError, StorageError
from tiermem.runtime.memory.homes import HomeRequest, Homes
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileTransfer


class Place:
    """An extent below HBM.

    Attributes:
        tier: DRAM or NVMe.
        extent: The extent.
        written: Event of the last copy into it.
        read: Event of the last copy out of it.
        transfer: The last file transfer of it.
    """

    __slots__ = ("__weakref__", "extent", "read", "tier", "transfer", "written")

    def __init__(self, tier: Tier, extent: Extent) -> None:
        self.tier = tier
        self.extent = extent
        self.written: Event | None = None
        self.read: Event | None = None
        self.transfer: FileTransfer | None = None


class ExtentPool:
    """Hands out places, and keeps returned ones for the next request of the same size.

    Each training step asks for the same sizes, so from the second step on
    nothing is allocated. Unused places are given up when space is short elsewhere.

    Attributes:
        used: Bytes in places that are handed out.
        peak: Most bytes ever handed out.
    """

    def __init__(self, homes: Homes, settle: Callable[[Place], None]) -> None:
        """Takes extents from ``homes``; every call is made under the manager's lock.

        Args:
            homes: The source of the space.
            settle: Makes the host wait until nothing reads or writes a place.
        """
        self._homes = homes
        self._settle = settle
        self._idle: dict[tuple[Tier, int], list[Place]] = {}
        self.used = 0
        self.peak = 0
        self._all: WeakSet[Place] = WeakSet()
        homes.reclaimers.append(self.trim)
        homes.owners.append(self._owned)

    @property
    def idle(self) -> int:
        """Bytes kept for later requests."""
        return sum(size * len(places) for (_, size), places in self._idle.items())

    def take(self, nbytes: int, home: Home, name: str) -> Place | None:
        """Returns a place of at least ``nbytes`` bytes (rounded up to 4,096), or None.

        Args:
            nbytes: Bytes, above zero.
            home: ``"dram"`` or ``"nvme"``.
            name: What it is for, for messages.

        Returns:
            The place; None if the budget or the disk has no room.
        """
        size = align_up(nbytes)
        idle = self._idle.get((Tier(home), size))
        if idle:
            place = idle.pop()
        else:
            try:
                ((tier, extent),) = self._homes.reserve([HomeRequest(name, size, home)])
            except (CapacityError, StorageError):
                return None
            if extent is None:
                return None
            place = Place(tier, extent)
            self._all.add(place)
        self.used += size
        self.peak = max(self.peak, self.used)
        return place

    def give_back(self, place: Place) -> None:
        """Takes a place back; copies out of it may still be in progress."""
        self.used -= place.extent.nbytes
        self._idle.setdefault((place.tier, place.extent.nbytes), []).append(place)

    def trim(self) -> bool:
        """Gives up all unused places; returns whether there were any."""
        found = False
        for places in self._idle.values():
            while places:
                place = places.pop()
                self._settle(place)
                self._all.discard(place)
                self._homes.release(place.tier, place.extent)
                found = True
        self._idle.clear()
        return found

    def _owned(self) -> Iterator[tuple[Tier, Extent]]:
        """Yields the extents of all places, idle or handed out."""
        for place in self._all:
            yield place.tier, place.extent

    def repair(self) -> None:
        """Counts again what is handed out, after an exception anywhere."""
        self.used = sum(place.extent.nbytes for place in self._all) - self.idle
