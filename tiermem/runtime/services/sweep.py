"""A sweep over blocks: the next is fetched and the last is written while one is processed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tiermem.core.block import Block, Role, Tier
from tiermem.core.residency import State
from tiermem.runtime.placement.leaving import Why

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager


class BlockSweep:
    """Keeps the links busy while one step of a sweep is processed.

    What a step has written would otherwise be written home only when its room is needed, and the
    next step would wait for that. If everything fits in HBM, no block has to leave, and
    nothing is written.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Compares the bytes of all blocks with the room in HBM."""
        self._manager = manager
        # as in the prefetcher: on the CPU a copy from DRAM does not overlap with compute
        self._dram = manager.parts.device.type == "cuda"
        self.leaves = not manager.parts.table.all_fit

    def sweeping(self) -> AbstractContextManager[None]:
        """Makes reads and writes share the disk evenly, even if one of them is waited for."""
        return self._manager.parts.transfers.sharing_disk()

    def fetch(self, blocks: Sequence[Block]) -> None:
        """Begins to fetch blocks that are used next; evicts nothing that is used sooner."""
        manager = self._manager
        with manager.lock:
            if manager.parts.transfers.mover is not None:
                manager.parts.transfers.poll()
            for position, block in enumerate(blocks):
                record = manager.parts.table.get(block.id)
                if record is None or record.in_hbm is not State.ABSENT or not record.defined:
                    continue
                if record.home is Tier.DRAM and not self._dram:
                    continue
                if block.id in manager.parts.deferred or not manager.try_fill(record, position + 1):
                    return

    def write(
        self, blocks: Sequence[Block], *, gradients: bool = False, staying: bool = False
    ) -> None:
        """Begins to write home blocks that are dirty and do not stay.

        Args:
            blocks: Blocks that are not used for now.
            gradients: Whether gradients are included, if that costs nothing: those of a step will
                soon be forgotten, and on the CPU a copy to DRAM does not overlap with compute.
            staying: Whether blocks that stay in HBM are written, too.
        """
        manager, why = self._manager, Why.NEEDED if staying else Why.WRITTEN
        if not self.leaves or (gradients and not self._dram):
            return
        with manager.lock:
            for block in blocks:
                record = manager.parts.table.get(block.id)
                if record is None or record.in_hbm is not State.DIRTY:
                    continue
                if block.role is Role.GRAD and not gradients:
                    continue
                if manager.parts.evictor.rules.may_leave(record, why):
                    manager.parts.transfers.drain(record)
