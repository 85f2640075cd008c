"""Fetches ahead of use, from the schedule: the soonest first, and never at a sooner use's cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiermem.core.block import Tier
from tiermem.core.residency import State

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager

_AUTO_BLOCKS = 8
_AUTO_BYTES = 256 << 20


class Prefetcher:
    """Walks the schedule a little ahead of the compute."""

    def __init__(self, manager: BlockManager) -> None:
        """Works for ``manager``, under its lock."""
        self._manager = manager
        depth = manager.settings.prefetch_depth
        self._depth = _AUTO_BLOCKS if depth == "auto" else depth
        # on the CPU a copy from DRAM is made by the thread that computes: begun early it
        # hides behind nothing, so only files are worth fetching ahead
        self._dram = manager.device.type == "cuda"

    def run(self) -> None:
        """Begins every fetch that is due."""
        manager = self._manager
        manager.poll()
        depth = self._depth
        ahead = 0
        for step in manager.planner.upcoming():
            if depth <= 0 or ahead > _AUTO_BYTES:
                return
            depth -= 1
            record = manager.table[step.block]
            if not record.defined or record.in_hbm is not State.ABSENT:
                continue
            if record.home is Tier.DRAM and not self._dram:
                continue
            if not manager.try_fill(record, step.position):
                return
            ahead += record.block.nbytes
