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

from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.arranged import Arranger, write_home
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.recordings import Recordings
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.lookahead.swaps import Fit, Step, Swap
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.leaving import Why

_VALID, _DIRTY = State.VALID, State.DIRTY
_AHEAD = Why.AHEAD


@dataclass(slots=True, eq=False)
class _Run:
    """A pass under way that repeats others.

    Attributes:
        steps: What is done at each place of the schedule.
        schedule: What it goes by.
        number: Of the pass.
        departures: How many departures from HBM it has seen, its own among them; -1 where it is
            not to go on.
        arranged: Whether HBM was laid out for it, so that nothing was recorded.
        cursor: The step done last.
    """

    steps: list[Step]
    schedule: Schedule
    number: int
    departures: int
    arranged: bool
    cursor: int = -1


class Replay:
    """Replays what passes did, or are laid out to do; under the manager's lock.

    Attributes:
        recordings: What passes did.
        swift: Whether the pass under way repeats others, so that :meth:`foreseen` may be asked
            first.
    """

    def __init__(self, parts: Parts, prefetcher: Prefetcher) -> None:
        """Works on ``parts``; ``prefetcher`` decides where nothing is repeated."""
        self._parts = parts
        self._prefetcher = prefetcher
        self._planner = parts.planner
        self._evictor = parts.evictor
        self._transfers = parts.transfers
        self._departures = parts.transfers.departures
        self._deferred = parts.deferred
        self._copy = parts.copy
        self._pass_timer = parts.pass_timer
        self._current = parts.slots.current
        self._waste = parts.transfers.waste
        self._arranger = Arranger(parts, prefetcher.fetcher)
        self.recordings = Recordings(parts)
        self._run: _Run | None = None
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
        schedule, arranged = self._planner.schedule, None
        if not self.recordings.disk_at_work():
            arranged = self._arranger.begin(outlook)
        if arranged is not None:
            self.recordings.pause()
        steps = arranged or self.recordings.begin(outlook)
        if steps is None:
            return False
        self._run = _Run(steps, schedule, number, self._departures.count, arranged is not None)
        self._evictor.order.lose_track()
        self._transfers.ahead.lose_track()
        self.swift = True
        return self.advance()

    def end(self) -> None:
        """Notes that the pass under way is over: what happens from now on belongs to the next."""
        run = self._run
        disturbed = run is not None and run.departures != self._departures.count
        if run is not None and run.arranged:
            if disturbed or run.cursor + 1 < len(run.steps):
                self._arranger.broke_off()
            else:
                self._arranger.ended()
        self._run = None
        self.swift = False
        self.recordings.end(disturbed=disturbed)

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
        rules = self._evictor.rules
        for swap in swaps:
            leaves, comes = swap.leaves, swap.comes
            if leaves is comes and swap.fit is not None:
                if not self._fill(run, swap, swap.fit):
                    return self._stop(swap.fit.leaves)
                continue
            extent = leaves.extent
            as_was = extent is not None and (extent.nbytes == swap.nbytes or swap.fit is not None)
            if not (as_was and rules.may_leave(leaves, _AHEAD)):
                return self._stop([leaves] if as_was else ())
            if self._current[leaves.block.id].pointed:
                rules.unpoint(leaves)
            if leaves.in_hbm is _DIRTY and not write_home(self._parts, leaves):
                return self._stop()
            if not self._transfers.exchange(leaves, comes, swap.nbytes):
                return self._stop()
            run.departures += 1
            self._waste.pending[comes.block.id] = (run.number + swap.passes, swap.key)
        return True

    def repair(self) -> None:
        """Forgets what passes did, after an exception anywhere."""
        self.recordings.repair()
        self._arranger.repair()
        self._run = None
        self.swift = False

    # -- inside ----------------------------------------------------------

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
        """Does what :meth:`Evictor.evict` does, but for the queue, which is rebuilt later.

        A block that was written since is written home first, as an output layer's weight that a
        program uses by itself between forward and backward.
        """
        if not self._evictor.rules.may_leave(record, _AHEAD):
            return False
        if record.in_hbm is _DIRTY and not write_home(self._parts, record):
            return False
        block_id = record.block.id
        slot = self._current[block_id]
        if slot.pointed:
            self._evictor.rules.unpoint(record)
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

    def _stop(self, leaving: Sequence[Record] = ()) -> bool:
        """Ends the replay: the rest of the pass is decided, and passes are recorded anew.

        Args:
            leaving: Blocks that were to leave, of which some may not be let go yet.
        """
        run = self._run
        if run is not None:
            if run.arranged:
                may_leave = self._evictor.rules.may_leave
                inside = [record for record in leaving if record.extent is not None]
                late = [r.block.id for r in inside if not may_leave(r, _AHEAD)]
                self._arranger.broke_off(late)
            self.recordings.drop(run.schedule)
            self._prefetcher.start_over()
        self._run = None
        self.swift = False
        return False
