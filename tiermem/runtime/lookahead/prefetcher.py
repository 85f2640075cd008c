"""Fetches ahead of use, from the schedule: the soonest first, and never at a sooner use's cost."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Set

from tiermem.core.block import Tier, align_up
from tiermem.core.cost import Timetable
from tiermem.core.lanes import LaneWalk
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Planner, Schedule
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.lookahead.plan_maker import PlanMaker, StreamPlan
from tiermem.runtime.parts import Parts
from tiermem.transfer.file.mover import FileMover

_AUTO_BLOCKS = 2
_AUTO_BYTES = 64 << 20
_MOST_BLOCKS = 64
_MOST_STEPS = 4096
_MOST_PLANS = 16
_HARVEST = 8
_BURST = 4  # fetches at one use: what comes first is also wanted by compute, which waits meanwhile
_FIRST = 4
"""Uses of a pass at which circles fetch nothing: as a model begins the device often has nothing to
do (values were read back), and what the host does before it launches kernels is lost."""
_MANY = 64  # uses of a schedule of which that is a small part


class Prefetcher:
    """Walks the schedule ahead of the compute, as far as the transfers need.

    Each place of the schedule is looked at once as long as nothing leaves HBM, so that a use
    costs the same however much is resident.
    """

    def __init__(
        self, parts: Parts, lender: HostLoans, fill: Callable[[Record, int], bool]
    ) -> None:
        """Works on ``parts``.

        Args:
            parts: Of the manager.
            lender: Knows which blocks are on loan, which nothing fetches.
            fill: :meth:`BlockManager.try_fill`.
        """
        self._parts = parts
        self._lender = lender
        self.fill = fill
        self._planner = parts.planner
        self._traffic = parts.traffic
        self._turns = parts.space.turns
        self._pass_timer = parts.pass_timer
        self._waste = parts.traffic.waste
        depth = parts.settings.prefetch_depth
        self._auto = depth == "auto"
        self._depth = _AUTO_BLOCKS if depth == "auto" else depth
        # on the CPU a copy from DRAM is made by the thread that computes: begun early it
        # hides behind nothing, so only files are worth fetching ahead
        self._dram = parts.device.type == "cuda"
        self._works = False
        self.files_opened()
        self._capacity = parts.table.hbm.capacity
        self._least = min(_AUTO_BYTES, self._capacity // 4)
        self._number = 0
        self._planned: Schedule | None = None
        self._outlooks: dict[Schedule, StreamPlan] = {}
        self._maker = PlanMaker(parts, self._least)
        self._held: set[int] = set()
        self._previous: Record | None = None
        self._timetable = Timetable((), ())
        self._most = self._capacity // 2
        self._lanes: LaneWalk | None = None
        self._through_dram = True
        self._shared = False
        # the walk so far: for which state of affairs, up to where, and what it met
        self._changes = -1
        self._cursor = 0
        self._next = 0
        self._ahead: deque[tuple[int, int]] = deque()
        self._nbytes = 0
        self._reads = 0
        self._parks = 0
        self._parking = False
        self._lacking = True
        self._complete: tuple[Schedule | None, int] = (None, -1)
        self._pass: tuple[int, int, tuple[int, Hashable]] = (0, 0, (0, None))

    @property
    def reads_into(self) -> str:
        """Where blocks that stream from files are read to: ``"hbm"``, ``"dram"`` or ``"none"``."""
        if self._parts.mover is None:
            return "none"
        return "dram" if self._dram and self._through_dram else "hbm"

    def files_opened(self) -> None:
        """Says that blocks may have their homes in files from now on."""
        self._works = self._depth > 0 and (self._dram or self._parts.mover is not None)

    def end_pass(self) -> None:
        """Says that the pass under way has ended, before the next is entered in the planner."""
        waste = self._waste
        if waste.pending or waste.stopping:
            planner = self._planner
            wasted = waste.end(self._number, planner.key, planner.used)
            self._parts.counters.prefetch_wasted += wasted
        self._number += 1

    def run(self) -> None:
        """Begins every fetch that is due."""
        planner, pass_timer = self._planner, self._pass_timer
        if pass_timer.pending:
            pass_timer.harvest(_HARVEST)
        if planner.last in self._waste.pending:
            self._waste.used(planner.last)
        if self._parts.mover is not None:
            self._follow_disk(planner)
        if pass_timer.sampling:
            self.look_back(planner.last)
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
        if cursor < self._cursor:
            self._restart(cursor)
        elif self._turns.uses and self._parts.mover is None:
            if self._traffic.gone:
                self._step_back(schedule, cursor)
        elif self._changes != self._traffic.changes:
            self._restart(cursor)
        self._cursor = cursor
        ahead = self._ahead
        while ahead and ahead[0][0] < cursor:
            self._nbytes -= ahead.popleft()[1]
        if self._next < cursor:
            self._next = cursor
        end = min(len(schedule.order), cursor + _MOST_STEPS)
        if self._lanes is not None:
            self._walk_lanes(schedule, cursor, self._lanes)
        elif self._next < end:
            self._walk(schedule, end)
        if self._parts.mover is not None:
            if self._through_dram or self._shared:
                self._read_on(schedule, end)
            if self._parking:
                self._park(schedule, end, self._parts.mover)

    def _follow_disk(self, planner: Planner) -> None:
        """Takes up what the disk has done, and what goes up is no longer in DRAM."""
        traffic = self._traffic
        ahead = traffic.ahead
        if traffic.flights or ahead.reading:
            traffic.poll()
        if ahead.staged:
            ahead.used(planner.last, planner.cursor)
        if ahead.unsettled:
            ahead.lay_out()

    def look_back(self, block_id: int) -> None:
        """Notes whether the block used before is still held, now that another one is."""
        before = self._previous
        if before is not None and before.leases and block_id >= 0:
            self._held.add(before.block.id)
        self._previous = self._parts.table[block_id] if block_id >= 0 else None

    def _step_back(self, schedule: Schedule, cursor: int) -> None:
        """Goes back to the first use of what has left HBM, or is at home again, since.

        In circles nothing is a resident, so all the rest of the way is as it was.
        """
        first = self._next
        for block_id in self._traffic.gone:
            first = min(first, schedule.next_use(block_id, cursor))
        self._traffic.gone.clear()
        if first < self._next:
            self._next, ahead = first, self._ahead
            while ahead and ahead[-1][0] >= first:
                self._nbytes -= ahead.pop()[1]

    def start_over(self) -> None:
        """Has the walk go on from the present use: blocks have changed places unseen by it."""
        self._restart(self._planner.cursor)

    def reset(self) -> None:
        """Forgets every plan, after an exception anywhere: they are made anew."""
        self._planned = None
        self._outlooks.clear()
        self._held.clear()
        self._previous = None
        self._lanes = None
        self._shared = self._parking = False
        self._complete = (None, -1)
        self._restart(0)

    def _restart(self, cursor: int) -> None:
        self._changes = self._traffic.changes
        self._traffic.gone.clear()
        self._next = self._reads = self._parks = cursor
        self._ahead.clear()
        self._nbytes = 0
        self._lacking = cursor > 0
        if self._lanes is not None:
            self._lanes.restart(cursor)
        if self._complete == (self._planned, self._changes):
            self._next = len(self._planned.order) if self._planned is not None else cursor

    def _walk(self, schedule: Schedule, end: int) -> None:
        get, residents = self._parts.table.get, self._parts.space.residents
        order, ahead, traffic = schedule.order, self._ahead, self._traffic
        begun = 0
        if self._turns.uses and self._cursor <= _FIRST and len(order) >= _MANY:
            return
        while self._next < end and self._wants_more():
            record = get(order[self._next])
            if record is not None:
                block = record.block
                if record.in_hbm is State.ABSENT:
                    if self._lender.borrowers(block):
                        return  # once it is back, its copy would wait for those of what follows
                    if self._is_due(record, schedule, self._next):
                        if begun == _BURST or not self._fetch(record, schedule, self._next):
                            return
                        begun += 1
                        self._changes = traffic.changes
                        traffic.gone.clear()  # what left for it comes after it
                        self._reads = self._parks = self._cursor  # and is to be read again
                if not (record.usable and block.id in residents):
                    ahead.append((self._next, block.nbytes))
                    self._nbytes += block.nbytes
                    self._lacking = True
            self._next += 1
        if not self._lacking and self._next == len(order):
            # every block is here and stays: no need to look again until one leaves
            self._complete = (schedule, self._changes)

    def _walk_lanes(self, schedule: Schedule, cursor: int, lanes: LaneWalk) -> None:
        """Fetches whatever there is a slot for, the soonest first.

        The link never catches up, so everything is due.
        """
        get, traffic = self._parts.table.get, self._traffic
        lanes.move_on(cursor)
        begun = 0
        while (found := lanes.soonest()) is not None:
            lane, position = found
            record = get(schedule.order[position])
            if record is not None and record.in_hbm is State.ABSENT and position >= cursor:
                if self._lender.borrowers(record.block):
                    return
                if self._is_due(record, schedule, position):
                    if begun == _BURST or not self._fetch(record, schedule, position):
                        return
                    begun += 1
                    self._changes = traffic.changes
                    traffic.gone.clear()
            lanes.take(lane, position)

    def _wants_more(self) -> bool:
        blocks = len(self._ahead)
        if not self._auto:
            return blocks < self._depth
        if self._turns.uses:  # in circles as far as there is room
            return not blocks or self._nbytes < self._most
        if self._timetable.knows(self._next):
            if blocks and self._nbytes >= self._most:
                return False
            return blocks < _AUTO_BLOCKS or self._timetable.due(self._next, self._cursor)
        return blocks < _AUTO_BLOCKS or (self._nbytes < self._least and blocks < _MOST_BLOCKS)

    def staged(self, record: Record, position: int) -> bool:
        """Whether a block at home in a file can go up now.

        A read straight into HBM passes through staging chunks that wait for the compute that
        used the slot before, and the disk waits with them. So beside a GPU it goes through spare
        DRAM, where the plan says so or there is none.

        Args:
            record: The block.
            position: Uses until it is needed.

        Returns:
            False while it is on its way into DRAM, or waits for a place there; True where it is
            there, or has to be read straight into HBM.
        """
        ahead, mover = self._traffic.ahead, self._parts.mover
        entry = ahead.look(record)
        if entry is None and mover is not None and self._dram and self._by_dram(record):
            schedule, cursor = self._planner.schedule, self._planner.cursor
            ahead.begin(record, mover, schedule, cursor, cursor + position)
            entry = ahead.look(record)
            if entry is None and ahead.slots:
                return False  # soon: straight it would wait for HBM, and the disk with it
        return entry is None or entry.transfer is None or entry.transfer.finished

    def _by_dram(self, record: Record) -> bool:
        """Whether a block is to be read into DRAM first."""
        if not self._shared:
            return self._through_dram
        return self._traffic.ahead.takes(record.block)

    def stage_now(self, record: Record) -> bool:
        """Has a block read that somebody waits for; returns whether its read begins only now."""
        ahead = self._traffic.ahead
        begins = ahead.look(record) is None
        if begins and record.home is Tier.NVME:
            while not self.staged(record, 0) and ahead.look(record) is None:
                if not ahead.wait_for_slot():
                    break
        return begins

    def _read_on(self, schedule: Schedule, end: int) -> None:
        """Has the disk read into spare DRAM what HBM has no room for yet."""
        table, ahead, mover = self._parts.table, self._traffic.ahead, self._parts.mover
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
                    and self._by_dram(record)
                    and self._is_due(record, schedule, position)
                    and not ahead.begin(record, mover, schedule, self._cursor, position)
                    and not ahead.keeps(block_id)
                ):
                    break
            position += 1
        self._reads = position

    def _park(self, schedule: Schedule, end: int, mover: FileMover) -> None:
        """Has the disk begin with the next block that it reads straight into HBM."""
        table, ahead = self._parts.table, self._traffic.ahead
        order = schedule.order
        position = max(self._parks, self._next)
        while position < end:
            record = table.get(order[position])
            if (
                record is not None
                and record.home is Tier.NVME
                and record.block.id not in ahead.staged
                and not ahead.takes(record.block)
                and not self._lender.borrowers(record.block)
                and self._is_due(record, schedule, position)
            ):
                if record.block.id not in ahead.parked:
                    ahead.park(record, mover)
                break
            position += 1
        self._parks = position

    def _is_due(self, record: Record, schedule: Schedule, position: int) -> bool:
        if not record.defined or record.in_hbm is not State.ABSENT:
            return False
        if self._waste.stopping:
            key = self._pass_at(schedule, position)[1]
            if self._waste.stops(key, record.block.id):
                return False
        return self._dram or record.home is not Tier.DRAM

    def _fetch(self, record: Record, schedule: Schedule, position: int) -> bool:
        if not self.fill(record, position - self._cursor):
            return False
        number, key = self._pass_at(schedule, position)
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
        made_of = self._maker.made_of(self._held)
        outlook = self._outlooks.pop(schedule, None)
        if outlook is None or outlook.made_of != made_of:
            outlook = self._maker.make(schedule, made_of, self._held, beside=self._dram)
        self._outlooks[schedule] = outlook
        if len(self._outlooks) > _MOST_PLANS:
            del self._outlooks[next(iter(self._outlooks))]
        self._timetable = outlook.timetable
        plan = outlook.plan
        self._parts.space.keep(plan.residents, plan.slot, plan.lanes)
        if outlook.lanes is None:
            self._lanes = None
        elif self._lanes is None or self._lanes.lanes is not outlook.lanes:
            self._lanes = LaneWalk(outlook.lanes)
            self._lanes.restart(self._planner.cursor)
        self._turns.uses = outlook.turn
        if outlook.turn:
            self._turns.begin(self._number, schedule)
        self._most = outlook.ahead
        self._shared = plan.in_dram is not None and self._dram
        mover = self._parts.mover
        self._parking = self._shared and plan.parks and mover is not None and mover.parks
        if not self._shared or plan.in_dram is None:
            self._through_dram = outlook.through_dram or not self._dram
            self._traffic.ahead.share(None)
            return
        self._through_dram = plan.ahead > 0
        stream = self._sizes(set(schedule.order) - plan.residents - plan.in_dram)
        slot = max(stream.values(), default=0)
        kept = self._sizes(plan.in_dram)
        slots = plan.ahead if slot else 0
        self._traffic.ahead.share(kept, slot, slots, mover)

    def _sizes(self, blocks: Set[int]) -> dict[int, int]:
        """Returns the bytes of those blocks whose home is a file."""
        records = (self._parts.table.get(block) for block in sorted(blocks))
        return {r.block.id: align_up(r.block.nbytes) for r in records if r and r.home is Tier.NVME}
