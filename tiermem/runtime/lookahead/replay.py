"""Replay: repeats at each use what the last passes did there, without deciding anew.

Where two passes in a row, with one plan, brought the same blocks into the places of the same
others, the next one will as well: the decisions depend on the schedule, the plan and the places
of the blocks alone. So they are looked up. The places are still checked, since a wrong guess must
cost time and nothing else: a block that is dirty, leased, aliased or no longer there stays as it
is, and the rest of the pass is decided as the first one was.

Most passes are not disturbed. :meth:`Replay.foreseen` finds what a use does in one of those with
nothing asked that cannot have changed since the pass began.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiermem.core.block import Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.arranged import Arranger
from tiermem.runtime.lookahead.plan_maker import StreamPlan
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.swaps import Fit, Step, Swap
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.evictor import Room
from tiermem.runtime.placement.leaving import Why

_VALID, _DIRTY = State.VALID, State.DIRTY
_AHEAD = Why.AHEAD
_MOST_TAPES = 16
_CHECKED = 4  # one measured pass in so many is decided anew instead of being replayed


@dataclass(slots=True, eq=False)
class _Tape:
    """The recordings of the passes of one schedule and plan.

    Attributes:
        outlook: The plan.
        done: What the last of them did: place in the schedule, block fetched, block evicted, where.
        steps: What to do at each place of it: first as it begins, then after each use, to the end
            of the pass; None until two passes did the same.
        measured: How many passes were measured since.
    """

    outlook: object
    done: list[tuple[int, tuple[int, ...]]] | None = None
    steps: list[Step] | None = None
    measured: int = 0


@dataclass(slots=True, eq=False)
class _Pass:
    """The recording of a pass that is decided, not replayed.

    Attributes:
        schedule: What it goes by.
        tape: Where the recording will be kept.
        places: How often room had been had when it began.
        reads: How many reads from files into DRAM there had been.
        departures: How many departures from HBM there had been.
        swaps: What it does, by place in the schedule.
    """

    schedule: Schedule
    tape: _Tape
    places: int
    reads: int
    departures: int
    swaps: list[tuple[int, Swap]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Run:
    """A pass under way that repeats others.

    Attributes:
        steps: What is done at each place of the schedule.
        schedule: What it goes by.
        number: Of the pass.
        departures: How many departures from HBM it has seen, its own among them; -1 where it is
            not to go on.
        cursor: The step done last.
        arranged: Whether HBM was laid out for it, so that nothing was recorded.
    """

    steps: list[Step]
    schedule: Schedule
    number: int
    departures: int
    cursor: int = -1
    arranged: bool = False


class Replay:
    """Records what passes do, and replays it; under the manager's lock.

    Attributes:
        swift: Whether the pass under way repeats others, so that :meth:`foreseen` may be asked
            first.
    """

    def __init__(self, parts: Parts, prefetcher: Prefetcher) -> None:
        """Works on ``parts``; ``prefetcher`` decides where nothing is repeated."""
        self._parts = parts
        self._prefetcher = prefetcher
        self._planner = parts.planner
        self._evictor = parts.evictor
        self._rules = parts.evictor.rules
        self._transfers = parts.transfers
        self._departures = parts.transfers.departures
        self._deferred = parts.deferred
        self._copy = parts.copy
        self._pass_timer = parts.pass_timer
        self._current = parts.slots.current
        self._waste = parts.transfers.waste
        self._arranger = Arranger(parts, prefetcher.fetcher)
        self._tapes: dict[Schedule, _Tape] = {}
        self._open: _Pass | None = None
        self._run: _Run | None = None
        self._disturbed = False
        self.swift = False

    @property
    def repeating(self) -> bool:
        """Whether the pass under way does what those before it did."""
        return self._run is not None

    def begin(self, outlook: StreamPlan, number: int) -> bool:
        """Notes that a pass begins, the planner and the plan being ready for it.

        Args:
            outlook: The plan.
            number: Of the pass.

        Returns:
            Whether it repeats those before it, and what is due now has been done.
        """
        schedule = self._planner.schedule
        steps = None if self._disk_at_work() else self._arranger.begin(outlook)
        if steps is not None:
            self._disturbed = False
            return self._start(_Run(steps, schedule, number, self._departures.count, arranged=True))
        tape = self._tapes.get(schedule)
        if tape is None or tape.outlook is not outlook:
            self._tapes.pop(schedule, None)
            tape = self._tapes[schedule] = _Tape(outlook)
            if len(self._tapes) > _MOST_TAPES:
                del self._tapes[next(iter(self._tapes))]
        if self._disturbed:
            tape.done = tape.steps = None
        sampling = self._pass_timer.sampling
        tape.measured += sampling
        check = sampling and not tape.measured % _CHECKED
        if tape.steps is None or check or self._disk_at_work():
            places, reads = self._evictor.places, self._transfers.ahead.begun
            self._open = _Pass(schedule, tape, places, reads, self._departures.count)
            return False
        return self._start(_Run(tape.steps, schedule, number, self._departures.count))

    def end(self) -> None:
        """Notes that the pass under way is over: what happens from now on belongs to the next."""
        run = self._run
        self._disturbed = run is not None and run.departures != self._departures.count
        if run is not None and run.arranged:
            if self._disturbed or run.cursor + 1 < len(run.steps):
                self._arranger.broke_off()
            else:
                self._arranger.ended()
        self._close()

    def interrupt(self) -> None:
        """Ends the replay of the pass under way at its next use; any thread may call it."""
        run = self._run
        if run is not None:
            run.departures = -1

    def foreseen(self, block_id: int) -> tuple[Record, Sequence[Swap] | None] | None:
        """Enters the use of a block that is in HBM and was foreseen, or is used once more in a row.

        Returns:
            Its record, and what :meth:`perform` is to do once the block is leased (None where
            it is used once more). None, with nothing entered, where anything is out of the
            ordinary.
        """
        run, planner = self._run, self._planner
        if (
            run is None
            or run.departures != self._departures.count
            or planner.cursor != run.cursor
            or self._deferred.owed
            or self._copy.capturing()
        ):
            return None
        steps, cursor = run.steps, run.cursor + 1
        again = block_id == planner.last
        if again:
            cursor -= 1
        elif cursor >= len(steps):
            return None
        step = steps[cursor]
        record = step.used
        if (
            step.block != block_id
            or record is None
            or (record.in_hbm is not _VALID and record.in_hbm is not _DIRTY)
            or (extent := record.extent) is None
            or (extent.offset < self._evictor.largest_later and not record.leases)
        ):
            return None
        if again:
            return record, None
        if self._pass_timer.sampling:
            self._prefetcher.look_back(block_id)
            self._pass_timer.arrived()
        planner.follow(block_id)
        run.cursor = cursor
        if block_id in self._waste.pending:
            self._waste.used(block_id)
        return record, step.swaps

    def advance(self) -> bool:
        """Repeats what the passes before did at this use, which :meth:`foreseen` has not entered.

        Returns:
            False where it is to be decided, and so is the rest of the pass.
        """
        run = self._run
        if run is None:
            return False
        step = self._step_now(run)
        if step is None:
            return self._stop()
        run.cursor += 1
        if step.block in self._waste.pending:
            self._waste.used(step.block)
        return self.perform(step.swaps)

    def perform(self, swaps: Sequence[Swap]) -> bool:
        """Performs the swaps recorded for one place of the schedule.

        Returns:
            False where that is no longer possible: it is to be decided, and so is the rest.
        """
        run = self._run
        if run is None:
            return False
        for swap in swaps:
            leaves, comes = swap.leaves, swap.comes
            if leaves is comes and swap.fit is not None:
                if not self._fill(run, swap, swap.fit):
                    return self._stop()
                continue
            extent = leaves.extent
            as_was = extent is not None and (extent.nbytes == swap.nbytes or swap.fit is not None)
            if not (as_was and self._rules.may_leave(leaves, _AHEAD)):
                return self._stop()
            if self._current[leaves.block.id].pointed:
                self._rules.unpoint(leaves)
            if not self._transfers.exchange(leaves, comes, swap.nbytes):
                return self._stop()
            run.departures += 1
            self._waste.pending[comes.block.id] = (run.number + swap.passes, swap.key)
        return True

    def note(self, record: Record, room: Room, position: int) -> None:
        """Records that a prefetch of a block has begun.

        Args:
            record: The block.
            room: Its place, and the blocks evicted for it.
            position: Uses until it is needed.
        """
        noted = self._open
        if noted is None:
            return
        cursor, extent, fit = self._planner.cursor, room.extent, None
        if room.left is None:
            if self._evictor.ring.uses:
                return  # the ring goes on from where it is: not recorded, so not replayed
            fit = self._fit_of(extent)
        leaves = room.left or (fit and fit.instead_of) or record
        swap = Swap(record, leaves, extent.nbytes, cursor + position, fit=fit)
        noted.swaps.append((cursor, swap))

    def repair(self) -> None:
        """Forgets what passes did, after an exception anywhere."""
        self._tapes.clear()
        self._arranger.repair()
        self._open = self._run = None
        self.swift = False

    # -- inside ----------------------------------------------------------

    def _start(self, run: _Run) -> bool:
        """Begins to replay; returns whether what is due at once has been done."""
        self._run = run
        self._evictor.order.lose_track()
        self._transfers.ahead.lose_track()
        self.swift = True
        return self.advance()

    def _fit_of(self, extent: Extent) -> Fit:
        """Returns the place just allocated, relative to a block that is or was there."""
        left = self._evictor.order.left
        if left:
            anchor, offset = min(left, key=lambda entry: entry[1])
            leaves = tuple(record for record, _ in left)
            return Fit(leaves, anchor, behind=False, delta=extent.offset - offset)
        for record in self._parts.table:
            other = record.extent
            if other is not None and other.end == extent.offset:
                return Fit((), record, behind=True, delta=0)
        for record in self._parts.table:
            other = record.extent
            if other is not None and other.offset == extent.end:
                return Fit((), record, behind=False, delta=-extent.nbytes)
        return Fit((), None, behind=False, delta=extent.offset)

    def _fill(self, run: _Run, swap: Swap, fit: Fit) -> bool:
        """Brings a block to a place that is not just another's; returns whether that could be."""
        comes, offset = swap.comes, fit.offset()
        there = comes.at_home is _VALID and comes.defined
        if offset < 0 or not there or self._transfers.in_dram(comes) is None:
            return False
        for record in fit.leaves:
            if not self._send_away(record):
                return False
            run.departures += 1
        if comes.in_hbm is not State.ABSENT:
            return False
        extent = self._parts.table.hbm.take_at(offset, swap.nbytes)
        if extent is None:
            return False
        self._transfers.fill(comes, extent)
        self._parts.counters.prefetches += 1
        self._waste.fetched(comes.block.id, run.number + swap.passes, swap.key)
        return True

    def _send_away(self, record: Record) -> bool:
        """Does what :meth:`Evictor.evict` does, but for the queue, which is rebuilt later."""
        if record.in_hbm is not _VALID or not self._rules.may_leave(record, _AHEAD):
            return False
        block_id = record.block.id
        slot = self._current[block_id]
        if slot.pointed:
            self._rules.unpoint(record)
            if slot.aliased:  # what hid behind a parameter's reference
                return False
        self._parts.table.drop(block_id)
        self._transfers.leave(block_id)
        self._parts.counters.evictions += 1
        return True

    def _step_now(self, run: _Run) -> Step | None:
        """Returns what to do at the use that the planner has come to; None if it was not foreseen.

        For uses that :meth:`foreseen` was not asked about: the begin of a pass, and whatever is
        out of the ordinary.
        """
        planner = self._planner
        cursor = run.cursor + 1
        if (
            planner.cursor != cursor
            or cursor >= len(run.steps)
            or planner.schedule is not run.schedule
            or run.departures != self._departures.count
        ):
            return None
        if self._pass_timer.sampling:
            self._prefetcher.look_back(planner.last)
        return run.steps[cursor]

    def _stop(self) -> bool:
        """Ends the replay: the rest of the pass is decided, and passes are recorded anew."""
        run = self._run
        if run is not None:
            if run.arranged:
                self._arranger.broke_off()
            self._tapes.pop(run.schedule, None)
            self._prefetcher.start_over()
        self._run = None
        self.swift = False
        return False

    def _close(self) -> None:
        """Keeps the recording of the last pass; makes steps of it if it equals the one before."""
        noted, self._open = self._open, None
        self._run = None
        self.swift = False
        if noted is None:
            return
        tape, swaps = noted.tape, noted.swaps
        own = self._evictor.places == noted.places + len(swaps)
        went = sum(swap.departures for _, swap in swaps)
        own = own and self._departures.count == noted.departures + went
        if not own or not self._from_dram(noted):
            tape.done = tape.steps = None  # it also did what is not done again that simply
            return
        done = [(cursor, swap.told()) for cursor, swap in swaps]
        again = done == tape.done
        tape.done, tape.steps = done, self._steps_of(noted) if again else None

    def _steps_of(self, noted: _Pass) -> list[Step]:
        """Returns the steps that repeat a recorded pass, one for each place of the schedule."""
        schedule, table = noted.schedule, self._parts.table
        passes = schedule.passes
        end = passes[1][0] if len(passes) > 1 else len(schedule)
        steps = [Step(None, -1), *(Step(table.get(block), block) for block in schedule.order[:end])]
        for cursor, swap in noted.swaps:
            if cursor > end:
                break
            number = bisect_right(passes, swap.position, key=lambda entry: entry[0]) - 1
            if number >= 0:
                swap.passes, swap.key = number, passes[number][1]
            steps[cursor].swaps.append(swap)
        return steps

    def _from_dram(self, noted: _Pass) -> bool:
        """Whether what a pass needs is in HBM or DRAM, so that no disk is asked for anything."""
        if self._parts.mover is None:
            return True
        if noted.reads != self._transfers.ahead.begun or self._disk_at_work():
            return False
        records = map(self._parts.table.get, set(noted.schedule.order))
        return all(record is not None and self._is_above_disk(record) for record in records)

    def _is_above_disk(self, record: Record) -> bool:
        """Whether a block is in HBM or in DRAM, be its home in a file or not."""
        if record.home is not Tier.NVME or record.in_hbm in (_VALID, _DIRTY):
            return True
        return self._transfers.in_dram(record) is not None

    def _disk_at_work(self) -> bool:
        """Whether what a disk does has to be looked at now and then."""
        transfers = self._transfers
        ahead = transfers.ahead
        return bool(transfers.flights or ahead.reading or ahead.parked or ahead.unsettled)
