"""Prefetches by the schedule: the soonest use first, and never at the cost of a sooner use."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tiermem.core.residency import Record
from tiermem.core.schedule import Schedule
from tiermem.errors import InvariantError
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.lookahead.disk_ahead import DiskAhead
from tiermem.runtime.lookahead.lates import Lates
from tiermem.runtime.lookahead.plan_maker import PlanMaker
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.lookahead.walks import Fetcher, Reach, SequenceWalk, make_walk
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.leaving import Why

_AUTO_BYTES = 64 << 20
_MOST_STEPS = 4096
_MOST_PLANS = 64
_DOUBTFUL = 4


class Prefetcher:
    """Keeps a plan for each schedule, and the walk that begins its fetches as blocks are used.

    Attributes:
        fetcher: Begins single fetches.
        disk: Keeps the disk busy while HBM has no room.
        lates: When passes release blocks, if later than expected.
        ended: Whether the end of the previous pass was noted; then that of the next will be, too.
        overdue: Whether a new plan has to be made when the current pass ends.
    """

    def __init__(
        self, parts: Parts, host_loans: HostLoans, fill: Callable[[Record, int], bool]
    ) -> None:
        """Works on ``parts``; see :class:`Fetcher`."""
        self.fetcher = Fetcher(parts, host_loans, fill)
        self.disk = DiskAhead(parts, self.fetcher)
        self._parts = parts
        self._planner = parts.planner
        self._pass_timer = parts.pass_timer
        depth = parts.settings.prefetch_depth
        least = min(_AUTO_BYTES, parts.table.hbm.capacity // 4)
        self._reach = Reach(None if depth == "auto" else depth, least)
        self.lates = Lates()
        self._maker = PlanMaker(parts, self.lates, least)
        self._planned: Schedule | None = None
        self._force: tuple[StreamPlan, SequenceWalk] | None = None
        self._outlooks: dict[tuple[Schedule, int], tuple[StreamPlan, SequenceWalk]] = {}
        self.ended = self.overdue = False
        self._load = 0
        self._held: set[int] = set()
        self._previous: Record | None = None

    @property
    def outlook(self) -> StreamPlan:
        """The plan in force."""
        if self._force is None:
            raise InvariantError("no pass has begun: there is no plan")
        return self._force[0]

    def end_pass(self) -> None:
        """Notes that the current pass has ended, before the planner begins the next."""
        self.lates.end(self._planner.cursor)
        waste = self._parts.transfers.waste
        if waste.pending or waste.stopped:
            planner = self._planner
            wasted = waste.end(self.fetcher.number, planner.key, planner.used)
            self._parts.counters.prefetch_wasted += wasted
        self.fetcher.number += 1

    def plan(self, load: int = 0) -> tuple[StreamPlan, int]:
        """Plans a pass that begins; returns the plan, and the number of the pass.

        A pass without known tokens, such as an optimizer's, uses those of the previous pass: a
        plan of its own would undo, once per round, the residents and layout of the others.

        Args:
            load: Tokens of the pass, rounded; 0 if they are not known.
        """
        self._load = load or self._load
        self._maker.begin(self._load)
        self.overdue = False
        outlook, _ = self._plan(self._planner.schedule)
        self.ended = False
        return outlook, self.fetcher.number

    def plan_first(self, schedule: Schedule, held: Collection[int]) -> StreamPlan:
        """Plans passes of which none has begun, as if they had one token.

        Args:
            schedule: The uses that are expected.
            held: Blocks that are expected to be held while others are used.
        """
        self._held.update(held)
        self._maker.begin(1)
        outlook = self._maker.make(
            schedule, self._maker.made_of(self._held), self._held, beside=self.fetcher.beside
        )
        self._parts.evictor.keep(outlook.plan.residents, outlook.plan.slot)
        return outlook

    def plan_next(self) -> None:
        """Plans the next pass when one ends, if the next is expected to do the same.

        The device is still busy with work that the host has submitted, so the next pass need not
        wait for a plan.
        """
        self.overdue = False
        self.lates.end(self._planner.cursor)
        if self._repeats(self._planner.schedule):
            self._decide(self._planner.schedule)

    def note_copies_bind(self, copies_bind: bool) -> None:
        """Notes whether a training round's copies take longer than its compute."""
        self._maker.copies_bind = copies_bind

    def run(self) -> None:
        """Begins every fetch that is due."""
        planner = self._planner
        if self._pass_timer.sampling:
            self.look_back(planner.last)
        if self.lates.watching:
            self.lates.look(planner.last, planner.cursor - 1, self._may_leave)
        transfers = self._parts.transfers
        entry = transfers.waste.pending.pop(planner.last, None)  # Waste.used, in line
        if entry is not None and transfers.waste.outcomes:
            transfers.waste.judge(entry[1], planner.last, wasted=False)
        if transfers.mover is not None:
            self.disk.take_up(planner.last, planner.cursor)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Begins every fetch that is due at this use, and for which there is room by now."""
        planner, walk = self._planner, self._walk()
        schedule, cursor = planner.schedule, planner.cursor
        if walk is None or schedule is not self._planned or planner.last < 0:
            _, walk = self._plan(schedule)
        mover = self._parts.transfers.mover
        if self._reach.blocks == 0 or not (self.fetcher.beside or mover is not None):
            return
        if not schedule.order:
            return  # nothing is foreseen
        if planner.doubt >= _DOUBTFUL:
            return  # what is foreseen does not come: a fetch for it would hold up what does
        end = min(len(schedule.order), cursor + _MOST_STEPS)
        changed = walk.follow(cursor, end)
        if mover is not None:
            if changed:
                self.disk.restart(cursor)  # blocks that left have to be read again
            self.disk.go_on(schedule, walk.position, end, cursor)

    def look_back(self, block_id: int) -> None:
        """Notes whether the previous block is still held, now that another one is used."""
        before = self._previous
        if before is not None and before.leases and block_id >= 0:
            self._held.add(before.block.id)
        self._previous = self._parts.table[block_id] if block_id >= 0 else None

    def start_over(self) -> None:
        """Restarts the walk at the present use, since blocks have moved without its notice."""
        self._restart(self._planner.cursor)

    def repair(self) -> None:
        """Forgets every plan, after an exception anywhere."""
        self._planned = self._force = None
        self._outlooks.clear()
        self._held.clear()
        self._previous = None
        self.lates.forget()
        self.disk.repair()
        self._restart(0)

    def _may_leave(self, block_id: int) -> bool:
        """Whether a block has left HBM, or its users permit it to leave."""
        record, rules = self._parts.table.get(block_id), self._parts.evictor.rules
        if record is None or record.extent is None:
            return True
        return rules.may_leave(record, Why.NEEDED) and not rules.is_wanted(record)

    def _walk(self) -> SequenceWalk | None:
        """Returns the walk of the plan in force."""
        return None if self._force is None else self._force[1]

    def _restart(self, cursor: int) -> None:
        walk = self._walk()
        if walk is not None:
            walk.restart(cursor)
        self.disk.restart(cursor)

    def _begin_early(self, schedule: Schedule) -> None:
        """Begins the first fetches by the plan in force, while another one is made.

        If HBM is laid out for the pass, these blocks have their places, and are fetched there.
        """
        walk = self._walk() if schedule is self._planned and not self.fetcher.laid_out else None
        early = walk is not None and self._planner.last < 0 and self._planner.cursor == 0
        if walk is not None and early and self.fetcher.beside and self._parts.mover is None:
            self.fetcher.begin_schedule()
            walk.restart(0)
            walk.go_on(min(len(schedule.order), _MOST_STEPS))

    def _repeats(self, schedule: Schedule) -> bool:
        """Whether the current pass is expected to be followed by an identical one."""
        return schedule.comes_again and schedule.passes[1][1] == self._planner.key

    def _plan(self, schedule: Schedule) -> tuple[StreamPlan, SequenceWalk]:
        """Puts the plan for a schedule into force."""
        found = self._outlooks.get((schedule, self._load))
        if found is None and self._does_for_once(schedule):
            found, self.overdue = self._force, True
        else:
            self.overdue = found is not None and self._can_wait(schedule, found[0])
        if found is None or not self.overdue:
            found = self._decide(schedule)
        self._force = found
        outlook, self._planned = found[0], schedule
        self.fetcher.begin_schedule()
        plan, evictor = outlook.plan, self._parts.evictor
        evictor.keep(plan.residents, plan.slot)
        evictor.ring.begin(outlook.turn, self.fetcher.number, schedule)
        self.disk.plan(schedule, outlook)
        self._restart(self._planner.cursor)
        return found

    def _does_for_once(self, schedule: Schedule) -> bool:
        """Whether the plan in force is used for a pass with other tokens until that ends.

        If its passes use the same blocks and HBM is laid out for them, the link is busy from the
        begin of the pass on, and would have to wait for another plan.
        """
        force, maker = self._force, self._maker
        if (
            force is None
            or schedule is not self._planned
            or not (self.ended and self.fetcher.laid_out)
        ):
            return False
        made_of = maker.made_of(self._held)
        same = force[0].made_of == made_of or maker.only_times_differ(force[0], made_of)
        return same and self._repeats(schedule)

    def _can_wait(self, schedule: Schedule, outlook: StreamPlan) -> bool:
        """Whether a plan is used for the pass that begins, and a new one is made when that ends."""
        maker = self._maker
        return (
            (outlook.foreseen or self.fetcher.laid_out)
            and (self.ended or self.overdue)  # asked once more at the begin of a decided pass
            and self._repeats(schedule)
            and maker.only_times_differ(outlook, maker.made_of(self._held))
        )

    def _decide(self, schedule: Schedule) -> tuple[StreamPlan, SequenceWalk]:
        """Returns the plan and walk for a schedule; makes them if there are none."""
        made_of = self._maker.made_of(self._held)
        name = (schedule, self._load)
        found = self._outlooks.pop(name, None)
        if found is None or self._maker.is_stale(found[0], made_of):
            self._begin_early(schedule)
            outlook = self._maker.make(schedule, made_of, self._held, beside=self.fetcher.beside)
            if found is not None and found[0].decides_as(outlook):
                found[0].take_times(outlook)
            else:
                walk = make_walk(self._parts, self.fetcher, schedule, outlook, self._reach)
                walk.complete = -1 if found is None else found[1].complete
                found = outlook, walk
        self._outlooks[name] = found
        if len(self._outlooks) > _MOST_PLANS:
            del self._outlooks[next(iter(self._outlooks))]
        return found
