"""Opens what a manager works with: the HBM arena and the file mover."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from tiermem.core.block import Tier
from tiermem.io.engine import IoEngine
from tiermem.io.probe import choose_engine
from tiermem.runtime.base.undisturbed import undisturbed
from tiermem.runtime.memory.homes import Homes
from tiermem.storage.arena import Arena, DeviceArena, HostArena
from tiermem.transfer.copy import CopyEngine, CudaChunkCopier, CudaCopyEngine
from tiermem.transfer.filemover import FileMover

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager


def open_hbm(nbytes: int, device: torch.device) -> Arena:
    """Opens the HBM arena, whole pages of it: on the device, or the stand-in for one."""
    whole = nbytes // 4096 * 4096
    return DeviceArena(whole, device) if device.type == "cuda" else HostArena(Tier.HBM, whole)


def open_homes(manager: BlockManager) -> None:
    """Opens what a manager has below HBM, in a thread that no signal reaches."""
    settings = manager.settings

    def call() -> None:
        with _on(manager.device):
            manager.homes = Homes(settings.dram, settings.nvme, settings.nvme_bytes, manager.device)

    undisturbed(call)


def open_mover(manager: BlockManager, engine: Callable[[], IoEngine] | None) -> None:
    """Opens a manager's file mover, likewise; see :func:`make_mover`."""

    def call() -> None:
        with _on(manager.device):
            made = make_mover(manager.homes, manager.copy, engine)
            manager.mover, manager.io_engine, manager.io_reason = made

    undisturbed(call)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, as it need not be in another thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def make_mover(
    homes: Homes, copy: CopyEngine, engine: Callable[[], IoEngine] | None
) -> tuple[FileMover | None, str, str]:
    """Opens the file mover.

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
    mover = FileMover(homes.swap, factory, homes.staging, homes.chunk, copier)
    return mover, name, reason
