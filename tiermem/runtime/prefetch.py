"""Fetches ahead of use, from the schedule: the soonest first, and never at a sooner use's cost."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiermem.core.block import Role, Tier, align_up
from tiermem.core.cost import Timetable, refetched
from tiermem.core.residency import Record, State
from tiermem.core.residents import Plan, choose_residents, largest_beside, share_hbm
from tiermem.core.schedule import Schedule
from tiermem.runtime.pacing import LINK_UP

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager

_AUTO_BLOCKS = 2
_AUTO_BYTES = 64 << 20
_MOST_BLOCKS = 64
_MOST_STEPS = 4096
_MOST_PLANNED = 1 << 14
_MOST_PLANS = 16
_HARVEST = 8
_MARGIN = 1.25
_LATENCY = 1e-3
_SLOT_LATENCY = 50e-6
_FILE_LATENCY = 8e-3
"""A disk is fast only while much is asked of it at once: 32 MiB, of one with 4 GB/s."""
_READ_ONLY = (Role.PARAM, Role.BUFFER, Role.QUANT)


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What was decided for one schedule.

    Attributes:
        made_of: What it depends on, besides the schedule.
        plan: What stays in HBM, and what is left to stream through.
        ahead: Bytes that may be fetched ahead, the last block of them not counted.
        timetable: When fetches are due.
        through_dram: Whether blocks come from files by way of DRAM.
    """

    made_of: tuple[int, ...]
    plan: Plan
    ahead: int
    timetable: Timetable
    through_dram: bool


class Prefetcher:
    """Walks the schedule ahead of the compute, as far as the transfers need.

    Each place of the schedule is looked at once as long as nothing leaves HBM, so that a use
    costs the same however much is resident.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Works for ``manager``, under its lock."""
        self._manager = manager
        self._planner = manager.planner
        self._traffic = manager.traffic
        self._pacing = manager.pacing
        self._waste = manager.traffic.waste
        depth = manager.settings.prefetch_depth
        self._auto = depth == "auto"
        self._depth = _AUTO_BLOCKS if depth == "auto" else depth
        # on the CPU a copy from DRAM is made by the thread that computes: begun early it
        # hides behind nothing, so only files are worth fetching ahead
        self._dram = manager.device.type == "cuda"
        self._works = self._depth > 0 and (self._dram or manager.mover is not None)
        self._capacity = manager.table.hbm.capacity
        self._least = min(_AUTO_BYTES, self._capacity // 4)
        self._number = 0
        self._planned: Schedule | None = None
        self._outlooks: dict[Schedule, _Outlook] = {}
        self._settled: tuple[object, Plan] | None = None
        self._held: set[int] = set()
        self._previous: Record | None = None
        self._timetable = Timetable((), ())
        self._most = self._capacity // 2
        self._through_dram = True
        # the walk so far: for which state of affairs, up to where, and what it met
        self._changes = -1
        self._cursor = 0
        self._next = 0
        self._ahead: deque[tuple[int, int]] = deque()
        self._nbytes = 0
        self._reads = 0
        self._lacking = True
        self._complete: tuple[Schedule | None, int] = (None, -1)
        self._pass: tuple[int, int, tuple[int, Hashable]] = (0, 0, (0, None))

    def end_pass(self) -> None:
        """Says that the pass under way has ended, before the next is entered in the planner."""
        waste = self._waste
        if waste.pending or waste.stopping:
            planner = self._planner
            wasted = waste.end(self._number, planner.key, planner.used)
            self._manager.counters.prefetch_wasted += wasted
        self._number += 1

    def run(self) -> None:
        """Begins every fetch that is due."""
        if self._traffic.flights or self._traffic.ahead.reading:
            self._traffic.poll()
        planner = self._planner
        if self._pacing.pending:
            self._pacing.harvest(_HARVEST)
        if self._waste.pending:
            self._waste.used(planner.last)
        if self._traffic.ahead.staged:
            self._traffic.ahead.used(planner.last, planner.cursor)
        if self._pacing.sampling:
            self._look_back(planner.last)
        self.look_ahead()

    def plan(self) -> tuple[object, int]:
        """Decides on a pass that begins; returns what stands for the plan, and its number."""
        schedule = self._planner.schedule
        self._plan(schedule)
        self._restart(self._planner.cursor)
        return self._outlooks[schedule], self._number

    def look_ahead(self) -> None:
        """Begins every fetch that is due at this use, and for which there is room by now."""
        planner = self._planner
        schedule, cursor = planner.schedule, planner.cursor
        if schedule is not self._planned or planner.last < 0:
            self._plan(schedule)
            self._restart(cursor)
        if not self._works:
            return
        if self._changes != self._traffic.changes or cursor < self._cursor:
            self._restart(cursor)
        self._cursor = cursor
        ahead = self._ahead
        while ahead and ahead[0][0] < cursor:
            self._nbytes -= ahead.popleft()[1]
        if self._next < cursor:
            self._next = cursor
        end = min(len(schedule.order), cursor + _MOST_STEPS)
        if self._next < end:
            self._walk(schedule, end)
        if self._manager.mover is not None and self._through_dram:
            self._read_on(schedule, end)

    def _look_back(self, block_id: int) -> None:
        """Notes whether the block used before is still held, now that another one is."""
        before = self._previous
        if before is not None and before.leases and block_id >= 0:
            self._held.add(before.block.id)
        self._previous = self._manager.table[block_id] if block_id >= 0 else None

    def _restart(self, cursor: int) -> None:
        self._changes = self._traffic.changes
        self._next = self._reads = cursor
        self._ahead.clear()
        self._nbytes = 0
        self._lacking = cursor > 0
        if self._complete == (self._planned, self._changes):
            self._next = len(self._planned.order) if self._planned is not None else cursor

    def _walk(self, schedule: Schedule, end: int) -> None:
        table, residents = self._manager.table, self._manager.space.residents
        order = schedule.order
        ahead = self._ahead
        while self._next < end and self._wants_more():
            record = table.get(order[self._next])
            away = record is not None and record.in_hbm is State.ABSENT
            if record is not None and away and self._is_due(record, schedule, self._next):
                if not self._fetch(record, schedule):
                    return
                self._changes = self._traffic.changes
                self._reads = self._cursor  # what left for it is to be read again
            if record is not None and not (record.usable and record.block.id in residents):
                ahead.append((self._next, record.block.nbytes))
                self._nbytes += record.block.nbytes
                self._lacking = True
            self._next += 1
        if not self._lacking and self._next == len(order):
            # every block is here and stays: no need to look again until one leaves
            self._complete = (schedule, self._changes)

    def _wants_more(self) -> bool:
        blocks = len(self._ahead)
        if not self._auto:
            return blocks < self._depth
        if self._timetable.knows(self._next):
            due = blocks < _AUTO_BLOCKS or self._timetable.due(self._next, self._cursor)
            return blocks == 0 or (due and self._nbytes < self._most)
        return blocks < _AUTO_BLOCKS or (self._nbytes < self._least and blocks < _MOST_BLOCKS)

    def staged(self, record: Record, position: int) -> bool:
        """Whether a block at home in a file can go up now.

        A read straight into HBM passes through staging chunks that wait for the compute that
        used the slot before, and the disk waits with them. So beside a GPU it goes through spare
        DRAM where there is any.

        Args:
            record: The block.
            position: Uses until it is needed.

        Returns:
            False while it is on its way into DRAM; True where it is there, or has to be read
            straight into HBM.
        """
        ahead, mover = self._traffic.ahead, self._manager.mover
        entry = ahead.look(record)
        if entry is None and mover is not None and self._dram and self._through_dram:
            schedule, cursor = self._planner.schedule, self._planner.cursor
            ahead.begin(record, mover, schedule, cursor, cursor + position)
            entry = ahead.look(record)
        return entry is None or entry.transfer is None or entry.transfer.finished

    def stage_now(self, record: Record) -> bool:
        """Has a block read that somebody waits for; returns whether its read begins only now."""
        begins = self._traffic.ahead.look(record) is None
        if begins and record.home is Tier.NVME:
            self.staged(record, 0)
        return begins

    def _read_on(self, schedule: Schedule, end: int) -> None:
        """Has the disk read into spare DRAM what HBM has no room for yet."""
        table, ahead, mover = self._manager.table, self._traffic.ahead, self._manager.mover
        if mover is None:
            return
        order = schedule.order
        position = max(self._reads, self._next)
        while position < end:
            block_id = order[position]
            if block_id not in ahead.staged:
                record = table.get(block_id)
                if (
                    record is not None
                    and record.home is Tier.NVME
                    and self._is_due(record, schedule, position)
                    and not ahead.begin(record, mover, schedule, self._cursor, position)
                ):
                    break
            position += 1
        self._reads = position

    def _is_due(self, record: Record, schedule: Schedule, position: int) -> bool:
        if not record.defined or record.in_hbm is not State.ABSENT:
            return False
        if self._waste.stopping:
            key = self._pass_at(schedule, position)[1]
            if self._waste.stops(key, record.block.id):
                return False
        return self._dram or record.home is not Tier.DRAM

    def _fetch(self, record: Record, schedule: Schedule) -> bool:
        if not self._manager.try_fill(record, self._next - self._cursor):
            return False
        number, key = self._pass_at(schedule, self._next)
        self._waste.fetched(record.block.id, self._number + number, key)
        return True

    def _pass_at(self, schedule: Schedule, position: int) -> tuple[int, Hashable]:
        """Returns which of the passes foreseen a position is in, and that pass's name."""
        passes = schedule.passes
        if not passes:
            return 1, self._planner.key
        begin, end, found = self._pass
        if not begin <= position < end:  # as a rule it is the one asked about before
            number = bisect_right(passes, position, key=lambda entry: entry[0]) - 1
            end = passes[number + 1][0] if number + 1 < len(passes) else len(schedule)
            found = (number, passes[number][1])
            self._pass = (passes[number][0], end, found)
        return found

    # -- plans -----------------------------------------------------------

    def _plan(self, schedule: Schedule) -> None:
        """Decides what stays and when fetches are due, unless that is decided already."""
        self._planned = schedule
        self._pass = (0, 0, (0, None))
        made_of = (
            self._pacing.estimates.version,
            len(self._manager.table),
            self._waste.changes,
            len(self._held),
        )
        outlook = self._outlooks.pop(schedule, None)
        if outlook is None or outlook.made_of != made_of:
            outlook = self._look_out(schedule, made_of)
        self._outlooks[schedule] = outlook
        if len(self._outlooks) > _MOST_PLANS:
            del self._outlooks[next(iter(self._outlooks))]
        self._timetable = outlook.timetable
        plan = outlook.plan
        self._manager.space.keep(plan.residents, plan.slot)
        self._most = outlook.ahead
        self._through_dram = outlook.through_dram or not self._dram

    def _look_out(self, schedule: Schedule, made_of: tuple[int, ...]) -> _Outlook:
        table = self._manager.table
        order = schedule.order[:_MOST_PLANNED]
        records = {block: table.get(block) for block in set(schedule.order)}
        loose = {block: r for block, r in records.items() if r is not None and not r.fixed}
        sizes = {block: align_up(record.block.nbytes) for block, record in loose.items()}
        compute = self._compute(schedule, order)
        fetch = {block: self._seconds(record) for block, record in loose.items()}
        fixed = sum(record.block.nbytes for record in table if record.fixed)
        room = self._capacity - fixed
        plan = Plan(frozenset(), room)
        if loose and all(r.block.role in _READ_ONLY for r in loose.values()):
            plan = self._keep_steady(schedule, sizes, room, compute, fetch)
        inside = {block for block, record in loose.items() if record.usable}
        away = refetched(order, sizes, plan.residents, plan.reserve, inside)
        fetches = [
            fetch[block] if missing else None for block, missing in zip(order, away, strict=True)
        ]
        timetable = Timetable(compute, fetches, margin=_MARGIN, latency=_LATENCY)
        ahead = self._capacity // 2
        largest = largest_beside(sizes, plan.residents)
        if plan.residents and largest:  # beside the block in use, and one more
            ahead = plan.reserve - 2 * largest + 1
        known = [seconds for seconds in compute if seconds is not None]
        disk = sum(f[1] for f in fetches if f is not None and f[0] == LINK_UP[Tier.NVME])
        through = len(known) < len(compute) or self._by_way_of_dram(disk, sum(known), sizes, room)
        return _Outlook(made_of, plan, ahead, timetable, through)

    def _keep_steady(
        self,
        schedule: Schedule,
        sizes: dict[int, int],
        room: int,
        compute: Sequence[float | None],
        fetch: dict[int, tuple[str, float] | None],
    ) -> Plan:
        """Decides what stays, once two kinds of blocks have been seen to.

        What is held while others are used (parameters of an outer module) takes its room all the
        same, so it stays. Experts that are chosen now and then do not; they get two slots.
        """
        if sum(sizes.values()) <= room:
            return self._share(schedule, sizes, room, compute, fetch)
        held = self._held & sizes.keys()
        unsteady = self._waste.unsteady() & sizes.keys() - held
        rest = {b: size for b, size in sizes.items() if b not in held and b not in unsteady}
        pinned = sum(sizes[block] for block in held)
        slots = 2 * max((sizes[block] for block in unsteady), default=0)
        plan = self._share(schedule, rest, max(0, room - pinned - slots), compute, fetch)
        slot = max(plan.slot, slots // 2)
        if pinned > room // 2:
            return Plan(plan.residents, plan.reserve + slots + pinned)
        return Plan(plan.residents | held, plan.reserve + slots, slot)

    def _share(
        self,
        schedule: Schedule,
        sizes: dict[int, int],
        room: int,
        compute: Sequence[float | None],
        fetch: dict[int, tuple[str, float] | None],
    ) -> Plan:
        """Decides what stays, where a loop only reads; elsewhere next use alone decides.

        The same blocks in another order keep the plan that they have: residents that changed
        from pass to pass would be none.
        """
        known = [seconds for seconds in compute if seconds is not None]
        learned = self._auto and len(known) == len(schedule) <= _MOST_STEPS
        learned = learned and all(fetch.values())
        version = self._pacing.estimates.version if learned else None
        alike = (frozenset(sizes), room, version)
        if self._settled is not None and self._settled[0] == alike:
            return self._settled[1]
        order = [block for block in schedule.order if block in sizes]
        if learned:
            of_loose = [s for s, b in zip(known, schedule.order, strict=True) if b in sizes]
            transfer = {block: seconds[1] for block, seconds in fetch.items() if seconds}
            disk = {b: s[1] for b, s in fetch.items() if s and s[0] == LINK_UP[Tier.NVME]}
            latency = _FILE_LATENCY if disk else _SLOT_LATENCY
            behind = None
            total = sum(sizes.values())  # 0 where all of them are held anyway
            missing = max(0.0, 1.0 - room / total) if total else 0.0
            seconds = missing * sum(disk.get(block, 0.0) for block in order)
            if disk and self._by_way_of_dram(seconds, sum(of_loose), sizes, room):
                rate = self._pacing.estimates.rate(LINK_UP[Tier.DRAM])
                transfer |= {block: sizes.get(block, 0) / rate for block in disk}
                latency, behind = _SLOT_LATENCY, disk
            plan = share_hbm(order, sizes, room, of_loose, transfer, latency, behind)
        else:
            streaming = sum(sorted(sizes.values())[-(self._depth + 1) :])
            if self._auto:
                streaming = max(streaming, self._least)
            everything = sum(sizes.values()) <= room
            kept = choose_residents(order, sizes, room if everything else room - streaming)
            plan = Plan(kept, streaming, largest_beside(sizes, kept))
        self._settled = (alike, plan)
        return plan

    def _by_way_of_dram(
        self, disk: float, compute: float, sizes: Mapping[int, int], room: int
    ) -> bool:
        """Whether a loop's blocks shall come from files by way of DRAM, or straight into HBM.

        By way of DRAM the disk goes on whatever the compute does. Where the disk is what one
        waits for all the same, it reads faster into a few staging chunks, which stay in the
        processor's cache, than into ever other memory (5.1 beside 4.4 GB/s on the reference
        machine) - unless DRAM can hold all that streams, so that it is not read again.

        Args:
            disk: Seconds of reading.
            compute: Seconds of computing in the same time.
            sizes: Bytes by block.
            room: Bytes of HBM for them.
        """
        homes, ahead = self._manager.homes, self._traffic.ahead
        kept = sum(entry.extent.nbytes for entry in ahead.staged.values())
        spare = homes.dram.capacity - homes.dram.used + kept
        if not self._dram or spare < 3 * largest_beside(sizes, ()):
            return False
        return disk <= compute or spare >= sum(sizes.values()) - room

    def _compute(self, schedule: Schedule, order: Sequence[int]) -> list[float | None]:
        """Returns the seconds of each use; None where the pass is not known."""
        estimates = self._pacing.estimates
        found: list[float | None] = []
        bounds = [begin for begin, _ in schedule.passes[1:]] + [len(order)]
        for (begin, key), end in zip(schedule.passes, bounds, strict=False):
            found += [estimates.compute(key, block) for block in order[begin:end]]
        return found

    def _seconds(self, record: Record) -> tuple[str, float] | None:
        """Returns over which link a block is fetched ahead, and for how long."""
        link = LINK_UP.get(record.home)
        if link is None or not (self._dram or record.home is not Tier.DRAM):
            return None
        block = record.block
        return link, self._pacing.estimates.transfer(link, block.id, block.nbytes)
