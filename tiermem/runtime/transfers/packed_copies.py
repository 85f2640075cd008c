"""Packed copies of homes in DRAM, from which blocks are fetched in three quarters of the time.

A packed copy is created beside a home, which is not changed; see :mod:`tiermem.core.packing`. It is
used as long as the home has the bytes from which it was made. So everything that reads or writes
homes works as if there were none, and DRAM that homes need is taken from packed copies first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.packing import Packed
from tiermem.core.residency import Record, ResidencyTable
from tiermem.runtime.memory.homes import Homes
from tiermem.transfer.copy import CopyEngine

_MOST_BY_ROWS = 1 << 14
"""Tokens up to which copies of experts take longer than their compute, in any mixture."""


@dataclass(frozen=True, slots=True)
class PackedCopy:
    """The packed copy of a block's home.

    Attributes:
        packed: What a device copies and unpacks.
        extent: Where it is in DRAM.
        stamp: The version of the bytes from which it was made.
    """

    packed: Packed
    extent: Extent
    stamp: tuple[Any, ...]


class PackedCopies:
    """The existing packed copies; under the manager's lock.

    Each extent is referred to from one place here at a time: after an interruption in between, it
    is unowned, and the repair of homes frees it.

    Attributes:
        used: Those that the current pass uses, by block id.
        by_rows: Whether parts of blocks (experts) are copied by themselves and waited for; then
            more bytes move than those in the schedule.
    """

    def __init__(self, table: ResidencyTable, homes: Homes, copy: CopyEngine) -> None:
        """Starts with none."""
        self._table = table
        self._homes = homes
        self._copy = copy
        self._copies: dict[int, PackedCopy] = {}
        self._stale: list[Extent] = []  # copies from there may be in progress
        self.used: dict[int, PackedCopy] = {}
        self.by_rows: Callable[[], bool] = bool
        homes.owners.append(self._owned)
        homes.reclaimers.append(self.release)
        homes.sparing = self.release

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def hold_dram(self) -> bool:
        """Whether there are any, or DRAM of those that were given up; otherwise passes use none."""
        return bool(self._copies or self._stale)

    def __contains__(self, block: Block) -> bool:
        return block.id in self._copies

    @property
    def nbytes(self) -> int:
        """Bytes of DRAM that they occupy."""
        return sum(extent.nbytes for _, extent in self._owned())

    def add(self, block: Block, copy: PackedCopy) -> None:
        """Adds the packed copy of a block that has none; it is used from the next pass on."""
        self._copies[block.id] = copy

    def begin(self, load: int, *, link_binds: bool) -> None:
        """Notes that a pass begins, and decides whether it uses packed copies.

        Args:
            load: Its tokens, rounded; 0 if unknown.
            link_binds: Whether the pass waits for the copies in its schedule.
        """
        use = link_binds or (load <= _MOST_BY_ROWS and self.by_rows())
        if not use:  # otherwise they are checked when they are used
            self.drop_stale()
        self.free_stale()
        wanted = self._copies if use else {}
        if self.used.keys() != wanted.keys():
            self.used.clear()
            self.used.update(wanted)

    def of(self, record: Record) -> Packed | None:
        """Returns the packed copy of a block in the current pass; None without one."""
        copy = self.used.get(record.block.id)
        if copy is None:
            return None
        if copy.stamp != record.stamp:
            self.drop(record.block)
            return None
        return copy.packed

    def drop(self, block: Block) -> None:
        """Gives up the packed copy of a block, if it has one."""
        if block.id in self._copies:
            self._give_up(block.id)

    def drop_stale(self) -> None:
        """Gives up those of blocks that have been written since."""
        for block_id, copy in list(self._copies.items()):
            record = self._table.get(block_id)
            if record is None or copy.stamp != record.stamp:
                self._give_up(block_id)

    def free_stale(self) -> None:
        """Frees the DRAM of packed copies that were given up, once no copy from there runs."""
        if self._stale:
            self._copy.synchronize()
        while self._stale:
            self._homes.release(Tier.DRAM, self._stale.pop())

    def release(self) -> bool:
        """Gives all of them up for other uses of the DRAM; returns whether there were any."""
        for block_id in list(self._copies):
            self._give_up(block_id)
        found = bool(self._stale)
        self.free_stale()
        return found

    def _give_up(self, block_id: int) -> None:
        self.used.pop(block_id, None)
        self._stale.append(self._copies.pop(block_id).extent)

    def _owned(self) -> Iterator[tuple[Tier, Extent]]:
        for copy in self._copies.values():
            yield Tier.DRAM, copy.extent
        for extent in self._stale:
            yield Tier.DRAM, extent
