"""Opens what a manager needs: the HBM arena and the file mover."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tiermem.config import Settings
from tiermem.errors import CapacityError
from tiermem.io.engine import IoEngine
from tiermem.io.probe import choose_engine
from tiermem.runtime.base.undisturbed import undisturbed
from tiermem.runtime.memory.device_room import CudaRoom, DeviceRoom
from tiermem.runtime.memory.homes import Homes
from tiermem.storage.arena import Arena, DeviceArena
from tiermem.storage.devicepieces import open_calls
from tiermem.storage.mapped import MappedDeviceArena, MappedHostArena
from tiermem.transfer.copy import CopyEngine
from tiermem.transfer.file.mover import FileMover
from tiermem.transfer.streams import CudaChunkCopier, CudaCopyEngine

AT_ONCE = 0.8
"""The fraction of a device's free memory that is taken if it has to be taken all at once."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenHbm:
    """The opened HBM.

    Attributes:
        arena: The memory.
        capacity: Bytes of it that may be used at first.
        most: Bytes that may ever be used.
        room: The device's memory, which others use, too; None if that is unknown.
        open: Whether the limit is still to be determined.
    """

    arena: Arena
    capacity: int
    most: int
    room: DeviceRoom | None
    open: bool


def open_hbm(settings: Settings, device: torch.device) -> OpenHbm:
    """Opens the HBM arena, in whole pages: on the device, or its stand-in.

    Raises:
        CapacityError: If the device has less memory than that.
    """
    whole = settings.hbm // 4096 * 4096
    if device.type != "cuda":
        host = MappedHostArena(whole, whole=undisturbed)
        return OpenHbm(host, host.capacity, host.capacity, None, False)
    calls = open_calls(device)
    if calls is None:  # all at once, as there is no other way here
        if settings.hbm_auto:
            whole = int(torch.cuda.mem_get_info(device)[0] * AT_ONCE) // 4096 * 4096
        single = DeviceArena(whole, device)
        return OpenHbm(single, single.capacity, single.capacity, None, False)
    room = CudaRoom(device)
    if whole > room.total:
        raise CapacityError(
            f"tier hbm: {device} has {room.total} bytes, not the {whole} asked for with hbm="
        )
    arena = MappedDeviceArena(whole, device, calls, whole=undisturbed)
    start = min(whole, room.free() // 2 // 4096 * 4096) if settings.hbm_auto else whole
    return OpenHbm(arena, start, arena.capacity, room, settings.hbm_auto)


def open_homes(settings: Settings, device: torch.device, keep: Callable[[Homes], None]) -> None:
    """Opens the tiers below HBM, in a thread that no signal interrupts.

    Args:
        settings: Budgets and paths.
        device: Where blocks are used.
        keep: Called in that thread with what was opened, so that no exception can lose it.
    """

    def call() -> None:
        with _on(device):
            keep(Homes(settings.dram, settings.nvme, settings.nvme_bytes, device))

    undisturbed(call)


def open_mover(
    homes: Homes,
    copy: CopyEngine,
    device: torch.device,
    engine: Callable[[], IoEngine] | None,
    keep: Callable[[tuple[FileMover | None, str, str]], None],
) -> None:
    """Opens a file mover in the same way; ``keep`` gets the results of :func:`make_mover`."""

    def call() -> None:
        with _on(device):
            keep(make_mover(homes, copy, engine))

    undisturbed(call)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, which it may not be in another thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def make_mover(
    homes: Homes, copy: CopyEngine, engine: Callable[[], IoEngine] | None
) -> tuple[FileMover | None, str, str]:
    """Opens the file mover.

    Args:
        homes: Where the files and the staging chunks are.
        copy: Makes the copies of chunks to and from a device.
        engine: Creates the I/O engine; None for the best one that works here.

    Returns:
        The mover, the engine's name and why it was chosen; no mover without an NVMe tier.
    """
    files = homes.files
    if files is None or homes.staging is None:
        return None, "none", "there is no NVMe tier"
    if engine is None:
        factory, name, reason = choose_engine()
    else:
        factory, name, reason = engine, "given", "it was asked for"
    copier = CudaChunkCopier(copy) if isinstance(copy, CudaCopyEngine) else None
    mover = FileMover(files, factory, homes.staging, homes.chunk, copier)
    return mover, name, reason
