"""Opens what a manager works with: the HBM arena and the file mover."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiermem.core.block import Tier
from tiermem.io.engine import IoEngine
from tiermem.io.probe import choose_engine
from tiermem.runtime.homes import Homes
from tiermem.storage.arena import Arena, DeviceArena, HostArena
from tiermem.transfer.copy import CopyEngine, CudaChunkCopier, CudaCopyEngine
from tiermem.transfer.filemover import FileMover


def open_hbm(nbytes: int, device: torch.device) -> Arena:
    """Opens the HBM arena, whole pages of it: on the device, or the stand-in for one."""
    whole = nbytes // 4096 * 4096
    return DeviceArena(whole, device) if device.type == "cuda" else HostArena(Tier.HBM, whole)


def open_mover(
    homes: Homes, copy: CopyEngine, engine: Callable[[], IoEngine] | None
) -> tuple[FileMover | None, str, str]:
    """Opens the file mover.

    Page-locked DRAM is registered with the I/O engine as a whole: its pages are there. Other
    DRAM is not, since registering would bring in every page of the budget.

    Args:
        homes: Where the swap file and the staging chunks are.
        copy: Makes the copies of chunks to and from a device.
        engine: Makes the I/O engine, or None for the best one here.

    Returns:
        The mover, the engine's name and why it was chosen; no mover without an NVMe tier.
    """
    if homes.swap is None or homes.staging is None:
        return None, "none", "there is no NVMe tier"
    if engine is None:
        factory, name, reason = choose_engine()
    else:
        factory, name, reason = engine, "given", "it was asked for"
    copier = CudaChunkCopier(copy) if isinstance(copy, CudaCopyEngine) else None
    whole = (homes.arena.address, homes.arena.capacity)
    memory = whole if copier is not None else None
    mover = FileMover(homes.swap, factory, homes.staging, homes.chunk, copier, memory=memory)
    return mover, name, reason
