"""The parts of a manager, for the components that work on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiermem.config import Settings
from tiermem.core.residency import ResidencyTable
from tiermem.core.schedule import Planner
from tiermem.runtime.memory.homes import Homes
from tiermem.runtime.memory.slots import Holder, SlotCache
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.metrics.pass_timer import PassTimer
from tiermem.runtime.metrics.timeline import Timeline
from tiermem.runtime.placement.evictor import Evictor
from tiermem.runtime.placement.limit import HbmLimit
from tiermem.runtime.transfers.deferred import DeferredWork
from tiermem.runtime.transfers.transfers import Transfers
from tiermem.transfer.copy import CopyEngine
from tiermem.transfer.file.mover import FileMover


@dataclass(eq=False)
class Parts:
    """The parts of one manager, all of them under its lock.

    Attributes:
        settings: Budgets, paths and policy.
        device: The device where blocks are used.
        table: The residency table; only transfers, evictor, replay and leases write it.
        slots: Views of blocks in HBM.
        homes: Space below HBM.
        copy: Copies between HBM and host memory.
        planner: The order of uses.
        pass_timer: Times of passes, links and blocks.
        counters: Counts of what happened.
        timeline: When it happened.
        holders: The holders that point parameters at blocks in HBM, by the id of the block.
        deferred: Deferred work of blocks.
        transfers: Transfers in progress.
        evictor: Allocates places in HBM.
        limit: How many bytes of HBM may be used.
    """

    settings: Settings
    device: torch.device
    table: ResidencyTable
    slots: SlotCache
    homes: Homes
    copy: CopyEngine
    planner: Planner
    pass_timer: PassTimer
    counters: Counters
    timeline: Timeline
    holders: dict[int, Holder]
    deferred: DeferredWork
    transfers: Transfers
    evictor: Evictor
    limit: HbmLimit

    @property
    def mover(self) -> FileMover | None:
        """The file mover; None without an NVMe tier."""
        return self.transfers.mover
