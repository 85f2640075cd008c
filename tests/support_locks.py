"""Page locks of a device that is not there."""

from __future__ import annotations

from collections.abc import Callable

from tiermem.errors import CapacityError


class FakeLocks:
    """Keeps the locked runs as a device does, and refuses what one refuses."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.runs: dict[int, int] = {}
        self.calls = 0
        self.before: Callable[[str], None] = lambda what: None
        self.after: Callable[[str], None] = lambda what: None

    def lock(self, address: int, nbytes: int) -> None:
        self.before("lock")
        assert address % 4096 == 0
        assert nbytes > 0
        for start, size in self.runs.items():
            assert address + nbytes <= start or start + size <= address, "locked twice"
        if sum(self.runs.values()) + nbytes > self.most:
            raise CapacityError("tier dram: no more pages can be locked")
        self.runs[address] = nbytes
        self.calls += 1
        self.after("lock")

    def unlock(self, address: int) -> None:
        self.before("unlock")
        self.runs.pop(address, None)
        self.after("unlock")

    def synchronize(self) -> None:
        self.before("synchronize")
        self.after("synchronize")

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether a copy from or to these bytes is one that a device makes."""
        return any(
            start <= address and address + nbytes <= start + size
            for start, size in self.runs.items()
        )
