"""Fetches ahead of use, from the schedule: the soonest first, and never at a sooner use's cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiermem.core.block import Role, Tier
from tiermem.core.residency import State
from tiermem.core.residents import choose_residents
from tiermem.core.schedule import Schedule

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager

_AUTO_BLOCKS = 2
_AUTO_BYTES = 64 << 20
_MOST_BLOCKS = 64
_READ_ONLY = (Role.PARAM, Role.BUFFER, Role.QUANT)


class Prefetcher:
    """Walks the schedule a little ahead of the compute.

    Attributes:
        residents: Blocks that stay in HBM while the present loop goes on.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Works for ``manager``, under its lock."""
        self._manager = manager
        depth = manager.settings.prefetch_depth
        self._auto = depth == "auto"
        self._depth = _AUTO_BLOCKS if depth == "auto" else depth
        # on the CPU a copy from DRAM is made by the thread that computes: begun early it
        # hides behind nothing, so only files are worth fetching ahead
        self._dram = manager.device.type == "cuda"
        self._least = min(_AUTO_BYTES, manager.table.hbm.capacity // 4)
        self._planned: Schedule | None = None
        self.residents: frozenset[int] = frozenset()

    def run(self) -> None:
        """Begins every fetch that is due."""
        manager = self._manager
        manager.poll()
        if manager.planner.schedule is not self._planned:
            self._plan(manager.planner.schedule)
        blocks, nbytes = 0, 0
        for step in manager.planner.upcoming():
            if blocks >= self._depth and not (
                self._auto and nbytes < self._least and blocks < _MOST_BLOCKS
            ):
                return
            record = manager.table[step.block]
            if step.block in self.residents and record.usable:
                continue
            blocks += 1
            nbytes += record.block.nbytes
            if not record.defined or record.in_hbm is not State.ABSENT:
                continue
            if record.home is Tier.DRAM and not self._dram:
                continue
            if not manager.try_fill(record, step.position):
                return

    def _plan(self, schedule: Schedule) -> None:
        """Decides what stays, where a loop only reads; elsewhere next use alone decides."""
        self._planned = schedule
        self.residents = frozenset()
        manager = self._manager
        records = {block: manager.table[block] for block in set(schedule.order)}
        loose = {block: r for block, r in records.items() if not r.fixed}
        if not loose or any(r.block.role not in _READ_ONLY for r in loose.values()):
            return
        sizes = {block: record.block.nbytes for block, record in loose.items()}
        fixed = sum(record.block.nbytes for record in manager.table if record.fixed)
        streaming = sum(sorted(sizes.values())[-(self._depth + 1) :])
        if self._auto:
            streaming = max(streaming, self._least)
        room = manager.table.hbm.capacity - fixed - streaming
        if sum(sizes.values()) + fixed <= manager.table.hbm.capacity:
            room = sum(sizes.values())
        order = [block for block in schedule.order if block in sizes]
        self.residents = choose_residents(order, sizes, room)
