"""Homes in DRAM, lent to host code that works on their bytes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tiermem.core.block import Block, Tier
from tiermem.core.residency import State
from tiermem.errors import InvariantError
from tiermem.runtime.contents import view_of
from tiermem.transfer.copy import Event

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager


class HomeLender:
    """Lends the home copies of blocks, and knows which are out.

    A block that is lent is nowhere in HBM and holds no data as far as the table knows, so nothing
    fetches it. Whoever borrows owes it to the block (:mod:`tiermem.runtime.debts`) to give it
    back before its next use.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Works for ``manager``, under its lock."""
        self._manager = manager
        self._out: dict[int, int] = {}
        self._before: dict[int, list[Event]] = {}

    def can_lend(self, blocks: Sequence[Block]) -> str:
        """Returns the name of the first block that cannot be lent now, or nothing."""
        manager = self._manager
        for block in blocks:
            record = manager.table[block.id]
            if block.id in self._out:
                continue
            manager.traffic.settle(block.id)
            manager.space.unpoint(record)
            slot = manager.slots.current.get(block.id)
            if record.leases or (slot is not None and slot.aliased):
                return block.name
        return ""

    def lend(self, blocks: Sequence[Block]) -> tuple[list[list[torch.Tensor]], list[Event]]:
        """Takes blocks out of HBM and hands their homes out.

        Args:
            blocks: At home in DRAM; :meth:`can_lend` found nothing against it. One that is out
                already is lent once more.

        Returns:
            The tensors of each block, and what to wait for before they are touched.

        Raises:
            InvariantError: If one of them has its home elsewhere.
        """
        manager = self._manager
        table, traffic = manager.table, manager.traffic
        for block in blocks:
            record = table[block.id]
            if record.home is not Tier.DRAM or record.home_extent is None:
                raise InvariantError(f"block {block.name!r} has its home in {record.home.value}")
            if record.in_hbm is State.DIRTY:
                traffic.drain(record)
            if record.in_hbm is not State.ABSENT:
                manager.space.evict(record)
        events = []
        risen = manager.copy.risen()  # what is still being copied up reads these bytes
        for block in blocks:
            if block.id not in self._out:
                before = [risen, traffic.home_ready.get(block.id)]
                self._before[block.id] = [event for event in before if event is not None]
                table.discard(block.id)
            self._out[block.id] = self._out.get(block.id, 0) + 1
            events.extend(self._before[block.id])
        return [self._views(block) for block in blocks], events

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Takes blocks back, written; the last borrower's return makes them usable again."""
        for block in blocks:
            self._out[block.id] -= 1
            if not self._out[block.id]:
                del self._out[block.id], self._before[block.id]
                self._manager.table.home_written(block.id)

    def _views(self, block: Block) -> list[torch.Tensor]:
        extent = self._manager.table[block.id].home_extent
        if extent is None:
            raise InvariantError(f"block {block.name!r} has no home below HBM")
        with torch.inference_mode(False):
            whole = self._manager.homes.arena.bytes_of(extent)
            return [view_of(whole, spec) for spec in block.tensors]
