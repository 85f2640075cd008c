"""Shadows: second places in DRAM for blocks, so that a change of a block can be undone.

A block that is changed provisionally gets its shadow as its home before it is written; the former
home keeps the former bytes. For the table, transfers and the evictor it is an ordinary
block. The change is then either confirmed, which costs nothing, or undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.runtime.base.undisturbed import undisturbed

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager


class Shadows:
    """Shadows of blocks, in DRAM that no home needs; under the manager's lock.

    Whether a shadow holds the former bytes of its block, or is free, follows from one set.
    """

    def __init__(self, manager: BlockManager, give_up: Callable[[], bool]) -> None:
        """Starts without shadows.

        Args:
            manager: The manager of the blocks.
            give_up: Called when a home needs room; calls :meth:`release` if the shadows can be
                spared, and returns whether that freed any.
        """
        self._manager = manager
        self._spare: dict[int, Extent] = {}
        # blocks whose shadow holds their former bytes; entered without a call
        self._turned: dict[int, None] = {}
        self._give_up = give_up
        manager.parts.homes.owners.append(self._owned)
        manager.parts.homes.reclaimers.append(give_up)

    def __contains__(self, block: Block) -> bool:
        """Whether a block is changed provisionally."""
        return block.id in self._turned

    @property
    def in_use(self) -> bool:
        """Whether any block is changed provisionally."""
        return bool(self._turned)

    @property
    def nbytes(self) -> int:
        """Bytes of DRAM that they occupy."""
        return sum(extent.nbytes for extent in self._spare.values())

    def can_have(self, *records: Record) -> bool:
        """Whether blocks may have one: their home is DRAM, to which they can be evicted."""
        for record in records:
            if record.home is not Tier.DRAM or not record.defined or record.fixed:
                return False
        return True

    def reserve(self, blocks: Iterable[Block]) -> bool:
        """Reserves a shadow for each of some blocks, which :meth:`can_have` one.

        Returns:
            Whether there was room for all of them.
        """
        homes = self._manager.parts.homes
        for block in blocks:
            if block.id not in self._spare:
                extent = homes.lend(block.nbytes)
                if extent is None:
                    return False
                self._spare[block.id] = extent
        return True

    def turn(self, blocks: Iterable[Block]) -> None:
        """Keeps the present bytes of blocks; later writes go to their shadows.

        Args:
            blocks: They are leased, and have shadows.
        """
        manager, transfers = self._manager, self._manager.parts.transfers
        records = [
            manager.parts.table[block.id] for block in blocks if block.id not in self._turned
        ]
        for record in records:
            if record.at_home is not State.VALID:
                transfers.copy_home(record)
        for record in records:
            # the copy to the former home may have been submitted long ago and not have run yet:
            # it would copy the bytes that are written from now on
            transfers.copy.use(transfers.home_ready.get(record.block.id))
            if record.home_extent is not None:
                manager.parts.table.exchange_home(record.block.id, self._spare, self._turned)

    def turn_lent(self, blocks: Iterable[Block]) -> None:
        """Makes shadows the homes of blocks; code that borrowed them reads the former ones.

        Args:
            blocks: They are lent to host code, and have shadows.
        """
        table = self._manager.parts.table
        for block in blocks:
            if table[block.id].home_extent is not None and block.id not in self._turned:
                self._ask(block.id)
                table.exchange_lent(block.id, self._spare, self._turned)

    def put_back(self) -> None:
        """Restores the former bytes of every changed block; leased blocks are skipped.

        If interrupted, it may be called again, and has to be before the blocks are used.
        """
        manager, table = self._manager, self._manager.parts.table
        for block_id in [i for i in self._turned if table.get(i) is None]:
            del self._turned[block_id]
        records = [table[i] for i in self._turned if not table[i].leases]
        for record in records:
            manager.parts.transfers.settle(record.block.id)
            manager.parts.evictor.forget(record, gone=False)
            manager.parts.transfers.departures.add_home(record.block.id)
        undisturbed(partial(self._turn_back, records))

    def confirm(self) -> None:
        """Makes the changes of all blocks final."""
        self._turned = {}

    def release(self) -> bool:
        """Frees all shadows that are not needed; returns whether there were any.

        The shadow of a lent block may still be read: it holds the former bytes.
        """
        manager = self._manager
        spare = [i for i in self._spare if i not in self._turned and not self._is_lent(i)]
        if spare:
            manager.parts.copy.synchronize()  # copies to or from there
        for block_id in spare:
            self._ask(block_id)
            extent = self._spare.pop(block_id)
            manager.parts.homes.release(Tier.DRAM, extent)
        return bool(spare)

    def forget_removed(self) -> None:
        """Frees the shadows of blocks that were removed."""
        table, homes = self._manager.parts.table, self._manager.parts.homes
        gone = [block_id for block_id in self._spare if table.get(block_id) is None]
        if gone:
            self._manager.parts.copy.synchronize()
        for block_id in gone:
            self._turned.pop(block_id, None)
            self._ask(block_id)
            homes.release(Tier.DRAM, self._spare.pop(block_id))

    def close(self) -> None:
        """Frees all shadows; no block is changed provisionally."""
        self.release()
        homes = self._manager.parts.homes
        for entered, mine in ((homes.owners, self._owned), (homes.reclaimers, self._give_up)):
            if mine in entered:
                entered.remove(mine)  # type: ignore[arg-type]

    # -- inside ----------------------------------------------------------

    def _is_lent(self, block_id: int) -> bool:
        record = self._manager.parts.table.get(block_id)
        return record is not None and self._manager.host_loans.borrowers(record.block) > 0

    def _ask(self, block_id: int) -> None:
        """Notifies those who need the bytes of a shadow, before it is written or freed."""
        keeper = self._manager.parts.homes.keeper
        if keeper is not None:
            keeper.before_reuse(block_id, self._spare[block_id])

    def _turn_back(self, records: Iterable[Record]) -> None:
        for record in records:
            later, block_id = record.home_extent, record.block.id
            if later is not None and block_id in self._turned:
                self._manager.parts.table.put_back(block_id, self._spare[block_id])
                self._spare[block_id] = later
                self._turned.pop(block_id, None)

    def _owned(self) -> list[tuple[Tier, Extent]]:
        return [(Tier.DRAM, extent) for extent in self._spare.values()]
