"""Opens the tiers, creates the parts of a manager, and closes what was opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from tiermem.config import Settings
from tiermem.core.residency import ResidencyTable
from tiermem.core.schedule import Planner
from tiermem.errors import InvariantError
from tiermem.io.engine import IoEngine
from tiermem.runtime.memory.homes import Homes
from tiermem.runtime.memory.opening import OpenHbm, open_homes, open_mover
from tiermem.runtime.memory.slots import Holder, SlotCache
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.metrics.pass_timer import open_pass_timer
from tiermem.runtime.metrics.timeline import Timeline
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.evictor import Evictor
from tiermem.runtime.placement.limit import HbmLimit
from tiermem.runtime.transfers.deferred import DeferredWork
from tiermem.runtime.transfers.transfer_log import TransferLog
from tiermem.runtime.transfers.transfers import Transfers
from tiermem.storage.arena import Arena
from tiermem.transfer.copy import CopyEngine, HostCopyEngine
from tiermem.transfer.file.mover import FileMover
from tiermem.transfer.streams import CudaCopyEngine


class OpenTiers:
    """The parts of a manager that hold memory, files or threads.

    Each is None until it has been opened.

    Attributes:
        homes: Space below HBM.
        arena: HBM.
        copy: Copies between HBM and host memory.
        slots: Views into HBM.
        transfers: Owns the file mover.
        chosen: Name of the I/O engine, and why it was chosen.
    """

    def __init__(self, settings: Settings, engine: Callable[[], IoEngine] | None) -> None:
        """Stores the settings; opens nothing yet.

        Args:
            settings: Budgets, paths and policy.
            engine: Creates the I/O engine; None for the best one that works here.
        """
        self._settings = settings
        self._engine = engine
        self.homes: Homes | None = None
        self.arena: Arena | None = None
        self.copy: CopyEngine | None = None
        self.slots: SlotCache | None = None
        self.transfers: Transfers | None = None
        self.chosen = ("none", "")

    def make_parts(self, hbm: Callable[[Settings, torch.device], OpenHbm]) -> Parts:
        """Opens the tiersexcept the file mover.

        Args:
            hbm: Opens HBM.

        Raises:
            ConfigError: If a path cannot be used.
            CapacityError: If memory or disk space is not available.
        """
        settings, device = self._settings, torch.device(self._settings.device)
        cuda = device.type == "cuda"
        open_homes(settings, device, partial(setattr, self, "homes"))
        opened = hbm(settings, device)
        self.arena = opened.arena
        self.copy = copy = CudaCopyEngine(device) if cuda else HostCopyEngine()
        self.slots = slots = SlotCache(opened.arena)
        table = ResidencyTable(opened.capacity, opened.arena)
        counters, timeline, planner = Counters(), Timeline(), Planner()
        holders: dict[int, Holder] = {}
        pass_timer = open_pass_timer(copy, counters, device)
        homes: Homes = self.homes  # type: ignore[assignment]
        slots.annex = lambda extent: _seen(copy, homes.arena.bytes_of(extent))
        # what is evicted from the stand-in for HBM is overwritten, so that wrong residency is
        # noticed; on a GPU that costs bandwidth, and is only for tests
        poison = not cuda or os.environ.get("TIERMEM_POISON") == "1"
        log = TransferLog(counters, timeline, pass_timer)
        self.transfers = transfers = Transfers(table, slots, homes, copy, log, poison=poison)
        evictor = Evictor(table, slots, transfers, planner, holders, counters)
        limit = HbmLimit(evictor, opened.arena, opened.room, most=opened.most, open=opened.open)
        return Parts(
            settings, device, table, slots, homes, copy, planner, pass_timer, counters, timeline,
            holders, DeferredWork(), transfers, evictor, limit,
        )  # fmt: skip

    def open_mover(self, parts: Parts) -> None:
        """Opens a file mover; an earlier one has to be closed before.

        Raises:
            StorageError: If its ring or threads cannot be created.
        """
        open_mover(parts.homes, parts.copy, parts.device, self._engine, self._take_mover)

    def io(self) -> tuple[str, str]:
        """Returns the name of the I/O engine in use, and why it was chosen."""
        name, reason = self.chosen
        mover = None if self.transfers is None else self.transfers.mover
        if mover is None or name == "given":
            return name, reason
        name, note = mover.engine
        return name, note or reason

    def close(self, first: ExitStack) -> None:
        """Closes everything that was opened, even if closing one of them fails.

        Args:
            first: Callbacks to run before that, in reverse order.
        """
        with ExitStack() as steps:  # run in reverse order
            if self.homes is not None:
                steps.callback(self.homes.close)
            if self.arena is not None:
                steps.callback(self.arena.close)
            if self.slots is not None:
                steps.callback(self.slots.clear)
            if self.copy is not None:
                steps.callback(self.copy.synchronize)
            if self.transfers is not None and self.transfers.mover is not None:
                steps.callback(self.transfers.mover.close)
            steps.push(first)

    def _take_mover(self, made: tuple[FileMover | None, str, str]) -> None:
        mover, *chosen = made
        self.chosen = (chosen[0], chosen[1])
        if self.transfers is not None:
            self.transfers.mover = mover


def _seen(copy: CopyEngine, source: torch.Tensor) -> torch.Tensor:
    """Returns bytes of DRAM as kernels see them; the check that they do was made before."""
    found = copy.seen(source)
    if found is None:
        raise InvariantError(f"the device does not see {source.numel()} bytes of DRAM any more")
    return found
