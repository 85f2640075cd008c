"""Fetches ahead of use, from the schedule: the soonest first, and never at a sooner use's cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiermem.core.block import Role, Tier
from tiermem.core.residency import Record, State
from tiermem.core.residents import choose_residents
from tiermem.core.schedule import Schedule

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager

_AUTO_BLOCKS = 2
_AUTO_BYTES = 64 << 20
_MOST_BLOCKS = 64
_MOST_STEPS = 4096
_READ_ONLY = (Role.PARAM, Role.BUFFER, Role.QUANT)


class Prefetcher:
    """Walks the schedule a little ahead of the compute.

    Each place of the schedule is looked at once as long as nothing leaves HBM, so that a use
    costs the same however much is resident.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Works for ``manager``, under its lock."""
        self._manager = manager
        self._planner = manager.planner
        self._traffic = manager.traffic
        depth = manager.settings.prefetch_depth
        self._auto = depth == "auto"
        self._depth = _AUTO_BLOCKS if depth == "auto" else depth
        # on the CPU a copy from DRAM is made by the thread that computes: begun early it
        # hides behind nothing, so only files are worth fetching ahead
        self._dram = manager.device.type == "cuda"
        self._works = self._depth > 0 and (self._dram or manager.mover is not None)
        self._least = min(_AUTO_BYTES, manager.table.hbm.capacity // 4)
        self._planned: Schedule | None = None
        self._residents: frozenset[int] = frozenset()
        # the walk so far: for which state of affairs, up to where, and what it met
        self._changes = -1
        self._cursor = 0
        self._next = 0
        self._ahead: deque[tuple[int, int]] = deque()
        self._nbytes = 0

    def run(self) -> None:
        """Begins every fetch that is due."""
        if self._traffic.flights:
            self._traffic.poll()
        planner = self._planner
        schedule, cursor = planner.schedule, planner.cursor
        if schedule is not self._planned:
            self._plan(schedule)
            self._restart(cursor)
        if not self._works:
            return
        if self._changes != self._traffic.changes or cursor < self._cursor:
            self._restart(cursor)
        self._cursor = cursor
        self._next = max(self._next, cursor)
        ahead = self._ahead
        while ahead and ahead[0][0] < cursor:
            self._nbytes -= ahead.popleft()[1]
        self._walk(schedule.order, min(len(schedule), cursor + _MOST_STEPS))

    def _restart(self, cursor: int) -> None:
        self._changes = self._traffic.changes
        self._next = cursor
        self._ahead.clear()
        self._nbytes = 0

    def _walk(self, order: Sequence[int], end: int) -> None:
        table = self._manager.table
        ahead = self._ahead
        while self._next < end and self._wants_more():
            record = table.get(order[self._next])
            position = self._next - self._cursor
            if record is not None and self._is_due(record):
                if not self._manager.try_fill(record, position):
                    return
                self._changes = self._traffic.changes
            if record is not None and not (record.usable and record.block.id in self._residents):
                ahead.append((self._next, record.block.nbytes))
                self._nbytes += record.block.nbytes
            self._next += 1

    def _wants_more(self) -> bool:
        blocks = len(self._ahead)
        return blocks < self._depth or (
            self._auto and self._nbytes < self._least and blocks < _MOST_BLOCKS
        )

    def _is_due(self, record: Record) -> bool:
        if not record.defined or record.in_hbm is not State.ABSENT:
            return False
        return self._dram or record.home is not Tier.DRAM

    def _plan(self, schedule: Schedule) -> None:
        """Decides what stays, where a loop only reads; elsewhere next use alone decides."""
        self._planned = schedule
        self._keep(frozenset())
        manager = self._manager
        records = {block: manager.table.get(block) for block in set(schedule.order)}
        loose = {block: r for block, r in records.items() if r is not None and not r.fixed}
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
        self._keep(choose_residents(order, sizes, room))

    def _keep(self, blocks: frozenset[int]) -> None:
        self._residents = self._manager.space.residents = blocks
