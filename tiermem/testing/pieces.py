"""A device that maps memory piece by piece, and refuses what the CUDA driver refuses.

Its memory is host memory. Bytes written where nothing was mapped are lost, as are those written
before the memory was given back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from tiermem.errors import TierError
from tiermem.storage.pieces import HostPieceCalls

_NEW = 0xA5  # contents of new memory: code must not rely on zeros


class FakeDevice:
    """Memory that arenas, torch and others share.

    Attributes:
        total: Bytes.
        others: Bytes allocated by other processes.
        short: Whether torch has run out of memory since the last call of :meth:`ran_out`.
        watched: Whether torch reports that.
        arenas: The calls of each arena.
    """

    def __init__(self, total: int) -> None:
        """Starts with all memory free."""
        self.total = total
        self.others = 0
        self.short = False
        self.watched = True
        self.arenas: list[FakePieceCalls] = []

    def free(self) -> int:
        """Returns the bytes that are not allocated."""
        return self.total - self.others - sum(calls.taken for calls in self.arenas)

    def ran_out(self) -> bool:
        """Whether torch has run out of memory since the last call."""
        short, self.short = self.short, False
        return short


class FakePieceCalls(HostPieceCalls):
    """The calls for one arena of such a device.

    Attributes:
        taken: Bytes of memory that have a handle.
        mapped: Bytes and handle of each mapping, by address.
        allowed: Addresses of the mappings that may be used.
        before: Called with the name of each call, before it is made; may raise.
    """

    def __init__(self, device: FakeDevice, granularity: int = 4096) -> None:
        """Joins the arenas of a device."""
        super().__init__(granularity)
        device.arenas.append(self)
        self.taken = 0
        self.mapped: dict[int, tuple[int, int]] = {}
        self.allowed: set[int] = set()
        self.before: Callable[[str], None] = lambda name: None
        self._device = device
        self._sizes: dict[int, int] = {}
        self._reserved: tuple[int, int] | None = None
        self._busy = False

    def reserve(self, nbytes: int) -> int:
        """Reserves addresses, once."""
        self._rule(self._reserved is None, "addresses are reserved twice")
        self._even(nbytes)
        address = super().reserve(nbytes)
        self._reserved = address, nbytes
        return address

    def create(self, nbytes: int) -> int | None:
        """Allocates memory, if the device has any."""
        self.before("create")
        self._even(nbytes)
        if nbytes > self._device.free():
            return None
        handle = super().create(nbytes)
        if handle is not None:
            self._sizes[handle] = nbytes
            self.taken += nbytes
        return handle

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Maps memory that is not mapped at addresses where nothing is mapped."""
        self.before("map")
        begin, size = self._reserved or (0, 0)
        self._rule(begin <= address and address + nbytes <= begin + size, "outside")
        self._even(address - begin)
        self._rule(self._sizes.get(handle) == nbytes, "another size than that of the memory")
        self._rule(all(known != handle for _, known in self.mapped.values()), "mapped twice")
        for other, (length, _) in self.mapped.items():
            apart = address + nbytes <= other or other + length <= address
            self._rule(apart, "something is mapped there")
        self.mapped[address] = nbytes, handle
        ctypes.memset(address, _NEW, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Permits access to mapped addresses; all of them have to be mapped."""
        self.before("allow")
        at = address
        while at < address + nbytes:
            self._rule(at in self.mapped, "access to what is not mapped")
            self.allowed.add(at)
            at += self.mapped[at][0]
        self._rule(at == address + nbytes, "access to a part of a mapping")

    def use(self, address: int, nbytes: int) -> None:
        """Notes that the device uses some bytes from now on."""
        at = address
        while at < address + nbytes:
            found = [a for a, (size, _) in self.mapped.items() if a <= at < a + size]
            self._rule(bool(found) and found[0] in self.allowed, "used and not mapped")
            at = found[0] + self.mapped[found[0]][0]
        self._busy = True

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps memory at exactly the addresses at which it was mapped."""
        self.before("unmap")
        self._rule(self.mapped.get(address, (0, 0))[0] == nbytes, "unmapped otherwise than mapped")
        self._rule(not self._busy, "unmapped while the device may be using it")
        del self.mapped[address]
        self.allowed.discard(address)
        super().unmap(address, nbytes)

    def release(self, handle: int) -> None:
        """Frees memory that is not mapped."""
        self.before("release")
        self._rule(handle in self._sizes, "given back twice")
        self._rule(all(known != handle for _, known in self.mapped.values()), "mapped still")
        self.taken -= self._sizes.pop(handle)

    def free(self, address: int, nbytes: int) -> None:
        """Frees addresses, none of which is mapped."""
        self._rule(self._reserved == (address, nbytes), "other addresses than were reserved")
        self._rule(not self.mapped, "addresses given back while memory is mapped there")
        self._reserved = None
        super().free(address, nbytes)

    def synchronize(self) -> None:
        """Waits until the device uses no bytes."""
        self._busy = False

    @property
    def closed(self) -> bool:
        """Whether everything has been given back."""
        return self._reserved is None and not self.taken and not self.mapped

    def _even(self, nbytes: int) -> None:
        self._rule(nbytes >= 0 and nbytes % self.granularity == 0, "not whole units")

    @staticmethod
    def _rule(kept: bool, otherwise: str) -> None:
        if not kept:
            raise TierError(f"the driver refuses: {otherwise}")
