"""What a loop that repeats did at each use, to be done again without being decided anew.

Once two passes in a row, with one plan, had the same blocks come into the places of the same
others, the next one will as well: what decides is the schedule, the plan and who is where. So
it is looked up. Who is where is still looked at, since a wrong guess must cost time and nothing
else: a block that is written, held, seen by somebody or not there any more stays as it is, and
the rest of the pass is decided as the first one was.

Most passes are neither measured nor disturbed. A use in one of those is done by
:meth:`Replay.take` in one go, with nothing asked that cannot have changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field

from tiermem.core.block import Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.parts import Parts

_VALID, _DIRTY = State.VALID, State.DIRTY
_MOST_TAPES = 16
_HARVEST = 8
_CHECKED = 4  # of the measured passes, which has what is repeated decided once more


@dataclass(slots=True, eq=False)
class Swap:
    """One block that comes into the place of another.

    Attributes:
        comes: Who comes.
        leaves: Who leaves for it.
        nbytes: Size of the place, wherever it is: a loop may go round its slots more slowly than
            round its blocks.
        position: Where in the schedule it is used.
        passes: How many passes later that is.
        key: Name of that pass.
    """

    comes: Record
    leaves: Record
    nbytes: int
    position: int
    passes: int = 0
    key: Hashable = None


@dataclass(slots=True, eq=False)
class Step:
    """What is done at one place of a schedule.

    Attributes:
        used: Whose use it is; None before the first.
        block: Id of that block; -1 before the first.
        swaps: Who comes then.
    """

    used: Record | None
    block: int
    swaps: list[Swap] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Tape:
    """What passes of one schedule and plan did.

    Attributes:
        outlook: The plan.
        done: What the last of them did: place in the schedule, who came, who left, size.
        steps: What to do at each place of it: first as it begins, then after each use, to the end
            of the pass; None until two passes did the same.
        measured: How many passes were measured since.
    """

    outlook: object
    done: list[tuple[int, int, int, int]] | None = None
    steps: list[Step] | None = None
    measured: int = 0


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass that decides for itself, as it is written down.

    Attributes:
        schedule: What it goes by.
        tape: Where it will be kept.
        places: How often room had been asked for when it began.
        swaps: What it does, by place in the schedule.
    """

    schedule: Schedule
    tape: _Tape
    places: int
    swaps: list[tuple[int, Swap]] = field(default_factory=list)


class Replay:
    """Writes down what passes do, and does it again; under the manager's lock.

    Attributes:
        swift: Whether the pass under way repeats others and is not measured, so that
            :meth:`take` may be asked first.
    """

    def __init__(self, parts: Parts, prefetcher: Prefetcher) -> None:
        """Works on ``parts``; ``prefetcher`` decides where nothing is repeated."""
        self._parts = parts
        self._prefetcher = prefetcher
        self._table = parts.table
        self._planner = parts.planner
        self._space = parts.space
        self._traffic = parts.traffic
        self._waste = parts.traffic.waste
        self._pass_timer = parts.pass_timer
        self._counters = parts.counters
        self._copy = parts.copy
        self._deferred = parts.deferred
        self._current = parts.slots.current
        self._holders = parts.holders
        self._ready = parts.traffic.ready
        self._tapes: dict[Schedule, _Tape] = {}
        self._open: _Pass | None = None
        self._steps: list[Step] | None = None
        self._schedule: Schedule | None = None
        self._cursor = 0
        self._changes = 0
        self._number = 0
        self.swift = False

    @property
    def repeating(self) -> bool:
        """Whether the pass under way does what those before it did."""
        return self._steps is not None

    def begin(self, outlook: object, number: int) -> bool:
        """Says that a pass begins, the planner and the plan being ready for it.

        Args:
            outlook: The plan.
            number: Of the pass.

        Returns:
            Whether it repeats those before it, and what is due now has been done.
        """
        undisturbed = self._steps is None or self._traffic.changes == self._changes
        self._close()
        schedule = self._planner.schedule
        tape = self._tapes.get(schedule)
        if tape is None or tape.outlook is not outlook:
            self._tapes.pop(schedule, None)
            tape = self._tapes[schedule] = _Tape(outlook)
            if len(self._tapes) > _MOST_TAPES:
                del self._tapes[next(iter(self._tapes))]
        if not undisturbed:
            tape.done = tape.steps = None
        tape.measured += self._pass_timer.sampling
        check = self._pass_timer.sampling and not tape.measured % _CHECKED
        if tape.steps is None or check or self._disk_at_work():
            self._open = _Pass(schedule, tape, self._space.places)
            return False
        self._steps, self._schedule = tape.steps, schedule
        self._cursor, self._number, self._changes = -1, number, self._traffic.changes
        self._traffic.quiet = True
        self._space.lose_track()
        self.swift = not (self._pass_timer.sampling or self._pass_timer.pending)
        return self.repeat()

    def take(self, block_id: int) -> Slot | None:
        """Leases a block, and does what follows, where its use is the one foreseen.

        Returns:
            Its slot; None, with nothing done, where anything is out of the ordinary.
        """
        steps, planner = self._steps, self._planner
        cursor = self._cursor + 1
        if (
            steps is None
            or cursor >= len(steps)
            or not self._traffic.quiet
            or planner.cursor + 1 != cursor
            or self._deferred.owed
            or self._copy.capturing()
        ):
            return None
        step = steps[cursor]
        record = step.used
        if (
            step.block != block_id
            or record is None
            or (record.in_hbm is not _VALID and record.in_hbm is not _DIRTY)
            or (extent := record.extent) is None
            or (extent.offset < self._space.largest_later and not record.leases)
        ):
            return None
        leases = record.leases
        try:
            planner.follow(block_id)
            self._cursor = cursor
            self._counters.hits += 1
            self._table.lease(block_id)
            self._copy.use(self._ready.get(block_id))
            if not self._follow(step):
                self._prefetcher.run()
            return self._current[block_id]
        except BaseException:
            if record.leases > leases:
                self._table.release(block_id)
            raise

    def note(self, record: Record, extent: Extent, position: int) -> None:
        """Says that a block is on its way up ahead of its use.

        Args:
            record: The block.
            extent: Its place.
            position: Uses until it is needed.
        """
        noted, leaves = self._open, self._space.left
        if noted is not None and leaves is not None:
            cursor = self._planner.cursor
            swap = Swap(record, leaves, extent.nbytes, cursor + position)
            noted.swaps.append((cursor, swap))

    def reset(self) -> None:
        """Forgets what passes did, after an exception anywhere."""
        self._tapes.clear()
        self._open = self._steps = self._schedule = None
        self.swift = False

    def repeat(self) -> bool:
        """Does what the passes before did at this use; returns False where it is to be decided."""
        steps = self._steps
        if steps is None:
            return False
        planner = self._planner
        cursor = planner.cursor
        if (
            cursor != self._cursor + 1
            or cursor >= len(steps)
            or planner.schedule is not self._schedule
            or not self._traffic.quiet
        ):
            return self._stop()
        self._cursor = cursor
        if self._pass_timer.pending:
            self._pass_timer.harvest(_HARVEST)
        if self._pass_timer.sampling:
            self._prefetcher.look_back(planner.last)
        return self._follow(steps[cursor])

    # -- inside ----------------------------------------------------------

    def _follow(self, step: Step) -> bool:
        """Has those come who come at one place; returns False where that is to be decided."""
        if step.block in self._waste.pending:
            self._waste.used(step.block)
        for swap in step.swaps:
            if not self._do(swap):
                return self._stop()
        return True

    def _do(self, swap: Swap) -> bool:
        """Has one block come into the place of another, if that is still as it was."""
        leaves = swap.leaves
        went = leaves.block.id
        slot = self._current.get(went)
        if (
            slot is None
            or slot.extent.nbytes != swap.nbytes
            or (slot.pointed and not slot.idle)
            or slot.aliased
            or leaves.leases
        ):
            return False
        if slot.pointed and (holder := self._holders.get(went)) is not None:
            holder.unpoint()
        if not self._traffic.exchange(leaves, swap.comes):
            return False
        self._changes += 1
        counters = self._counters
        counters.evictions += 1
        counters.prefetches += 1
        self._waste.pending[swap.comes.block.id] = (self._number + swap.passes, swap.key)
        return True

    def _stop(self) -> bool:
        """Has the rest of the pass be decided, and passes be watched anew."""
        if self._schedule is not None:
            self._tapes.pop(self._schedule, None)
            self._prefetcher.start_over()
        self._steps = self._schedule = None
        self.swift = False
        return False

    def _close(self) -> None:
        """Keeps what the pass before did, and makes steps of it if it is what its own did."""
        noted, self._open = self._open, None
        self._steps = self._schedule = None
        self.swift = False
        if noted is None:
            return
        tape, swaps = noted.tape, noted.swaps
        if self._space.places != noted.places + len(swaps) or not self._from_dram(noted):
            tape.done = tape.steps = None  # it also did what is not done again that simply
            return
        done = [
            (cursor, swap.comes.block.id, swap.leaves.block.id, swap.nbytes)
            for cursor, swap in swaps
        ]
        again = done == tape.done
        tape.done, tape.steps = done, self._steps_of(noted) if again else None

    def _steps_of(self, noted: _Pass) -> list[Step]:
        """Returns what was done at each place of a pass."""
        schedule, table = noted.schedule, self._table
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
        records = map(self._table.get, set(noted.schedule.order))
        return not any(record is None or record.home is Tier.NVME for record in records)

    def _disk_at_work(self) -> bool:
        """Whether what a disk does has to be looked at now and then."""
        traffic = self._traffic
        return bool(traffic.flights or traffic.ahead.reading or traffic.ahead.staged)
