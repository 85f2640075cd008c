"""Blocks lent to host code: homes in DRAM in place, homes in files through staging memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.core.block import Block, Tier
from tiermem.core.residency import State
from tiermem.errors import InvariantError
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.parts import Parts
from tiermem.runtime.transfers.block_io import view_of
from tiermem.transfer.copy import Event


class HostLoans:
    """Lends the home copies of blocks to host code, and counts the loans of each.

    A block that is lent is not in HBM and holds no data according to the residency table, so it is
    never fetched. The borrower registers deferred work (:mod:`tiermem.runtime.transfers.deferred`)
    that gives the block back before its next use.
    """

    def __init__(self, parts: Parts) -> None:
        """Works on ``parts``."""
        self._parts = parts
        self.out: dict[int, int] = {}
        self._before: dict[int, list[Event]] = {}
        self._defined: dict[int, bool] = {}

    def can_lend(self, blocks: Sequence[Block]) -> str:
        """Returns the name of the first block that cannot be lent now, or an empty string.

        Begins to write those that have to be written to a file first.
        """
        parts = self._parts
        for block in blocks:
            record = parts.table[block.id]
            if block.id in self.out:
                continue
            parts.transfers.settle(block.id)
            there = record.extent is not None and not record.fixed
            if there and not parts.evictor.rules.let_loose(record):
                return block.name
        for block in blocks:
            record = parts.table[block.id]
            if record.home is Tier.NVME and record.in_hbm is State.DIRTY:
                parts.transfers.drain(record)
        return ""

    def settle(self, blocks: Sequence[Block]) -> None:
        """Waits until the writes that :meth:`can_lend` has begun are complete.

        Raises:
            StorageError: If one of them cannot be written; it is still in HBM.
        """
        transfers = self._parts.transfers
        for block in blocks:
            error = transfers.settle(block.id)
            record = self._parts.table[block.id]
            if error is None and record.home is Tier.NVME and record.in_hbm is State.DIRTY:
                # its write has failed, which a wait for another transfer has noticed
                transfers.drain(record)
                error = transfers.settle(block.id)
            if error is not None:
                raise error

    def lend(self, blocks: Sequence[Block]) -> tuple[list[list[torch.Tensor]], list[Event]]:
        """Evicts blocks and returns the tensors of their home copies.

        Args:
            blocks: Their homes are below HBM; :meth:`can_lend` has returned an empty string and
                :meth:`settle` was called. A block may be lent several times at once.

        Returns:
            The tensors of each block, none if its home is a file, and the events to wait for before
            they are accessed.

        Raises:
            InvariantError: If one of them has its home in HBM, or is in transfer.
        """
        parts = self._parts
        table, transfers = parts.table, parts.transfers
        for block in blocks:
            record = table[block.id]
            if record.home_extent is None:
                raise InvariantError(f"block {block.name!r} has its home in {record.home.value}")
            if record.in_hbm is State.DIRTY and record.home is Tier.DRAM:
                transfers.drain(record)
            if transfers.homes.keeper is not None:
                transfers.homes.keeper.before_write(record)
            if record.in_hbm is not State.ABSENT:
                parts.evictor.evict(record)
        events = []
        risen = parts.copy.risen()  # copies to HBM in progress still read these bytes
        for block in blocks:
            if block.id not in self.out:
                before = [risen, transfers.home_ready.get(block.id)]
                self._before[block.id] = [event for event in before if event is not None]
                self._defined[block.id] = table[block.id].defined
                table.discard(block.id)
                transfers.departures.add_home(block.id)  # a replay must not fetch it
            self.out[block.id] = self.out.get(block.id, 0) + 1
            events.extend(self._before[block.id])
        return [self.views(block) for block in blocks], events

    def defined(self, block: Block) -> bool:
        """Whether a block that is lent held data before the loan."""
        return self._defined[block.id]

    def borrowers(self, block: Block) -> int:
        """Returns how many loans of a block are open."""
        return self.out.get(block.id, 0)

    def give_back(self, blocks: Sequence[Block], *, written: bool = True) -> None:
        """Takes blocks back; when the last loan of a block ends, it is usable again.

        Args:
            blocks: What was lent.
            written: Whether they hold data now; if not, this is as before the loan.
        """
        for block in blocks:
            self._defined[block.id] = self._defined[block.id] or written
            self.out[block.id] -= 1
            if not self.out[block.id]:
                del self.out[block.id]
                self._before.pop(block.id, None)
                if self._defined[block.id]:
                    self._parts.table.home_written(block.id)
                del self._defined[block.id]

    def repair(self) -> None:
        """Ends the loans that an exception interrupted while they began or ended."""
        table = self._parts.table
        for block_id, defined in list(self._defined.items()):
            if self.out.get(block_id):
                continue
            self.out.pop(block_id, None)
            self._before.pop(block_id, None)
            record = table.get(block_id)
            if record is not None and defined and not record.defined:
                table.home_written(block_id)
            del self._defined[block_id]

    def views(self, block: Block) -> list[torch.Tensor]:
        """Returns the tensors of a lent block's home; none if that is a file."""
        record = self._parts.table[block.id]
        if record.home is not Tier.DRAM or record.home_extent is None:
            return []
        with outside_inference():
            whole = self._parts.homes.opened(record.home_extent)
            return [view_of(whole, spec) for spec in block.tensors]
