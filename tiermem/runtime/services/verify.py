"""Compares a block in HBM with its copy at home, to find writes that did not mark it dirty."""

from __future__ import annotations

import torch

from tiermem.core.block import Block, Tier
from tiermem.core.residency import State
from tiermem.runtime.base.functorch import outside_inference, without_modes
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.transfers.comparing import same_bytes


def differs_from_home(manager: BlockManager, block: Block) -> bool:
    """Whether a leased block that counts as clean has been written.

    Modes that trace or create fake tensors are disabled for this.

    Raises:
        StorageError: If its home is a file that cannot be read.
    """
    with without_modes(), manager.lock, outside_inference(), torch.no_grad():
        record = manager.record(block)
        extent = record.home_extent
        if record.in_hbm is not State.VALID or record.at_home is not State.VALID or extent is None:
            return False
        slot = manager.slot_at_hand(block)
        if slot is None:
            return False
        here = slot.bytes
        if record.home is Tier.DRAM:
            transfers = manager.parts.transfers
            transfers.copy.wait(transfers.home_ready.get(block.id))
            home = manager.parts.homes.opened(extent)
        else:
            home = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
            mover = manager.parts.transfers.need_mover()
            manager.parts.transfers.wait_or_raise(
                mover.read(extent, home, label=block.name, urgent=True)
            )
        return not same_bytes(block, here, home)
