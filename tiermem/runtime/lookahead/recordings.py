"""Recordings of what passes did, from which replays are made."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from tiermem.core.block import Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.swaps import Fit, Step, Swap, steps_over
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.evictor import Room

_VALID, _DIRTY = State.VALID, State.DIRTY
_MOST_TAPES = 16
_CHECKED = 4  # one measured pass in this many is decided again, not replayed


@dataclass(slots=True, eq=False)
class _Tape:
    """The recordings of the passes of one schedule and plan.

    Attributes:
        outlook: The plan.
        done: What the last pass did: position in the schedule, block fetched, block evicted, place.
        steps: What to do at each position: at the begin, then after each use, to the end of the
            pass; None until two passes did the same.
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
        schedule: Its schedule.
        tape: The recordings to which this one will be added.
        places: How many places had been taken when it began.
        reads: How many reads from files into DRAM there had been.
        departures: How many departures from HBM there had been.
        swaps: Its swaps, by position in the schedule.
    """

    schedule: Schedule
    tape: _Tape
    places: int
    reads: int
    departures: int
    swaps: list[tuple[int, Swap]] = field(default_factory=list)


class Recordings:
    """Records what passes do, and compares two in a row; under the manager's lock."""

    def __init__(self, parts: Parts) -> None:
        """Works on ``parts``."""
        self._parts = parts
        self._evictor = parts.evictor
        self._transfers = parts.transfers
        self._departures = parts.transfers.departures
        self._tapes: dict[Schedule, _Tape] = {}
        self._open: _Pass | None = None
        self._disturbed = False

    def begin(self, outlook: object) -> list[Step] | None:
        """Returns the steps of the pass that begins, if two passes before it did the same.

        Args:
            outlook: The plan.

        Returns:
            The steps; None if its uses have to be decided; then the pass is recorded.
        """
        schedule = self._parts.planner.schedule
        tape = self._tapes.get(schedule)
        if tape is None or tape.outlook is not outlook:
            self._tapes.pop(schedule, None)
            tape = self._tapes[schedule] = _Tape(outlook)
            if len(self._tapes) > _MOST_TAPES:
                del self._tapes[next(iter(self._tapes))]
        if self._disturbed:
            tape.done = tape.steps = None
        sampling = self._parts.pass_timer.sampling
        tape.measured += sampling
        check = sampling and not tape.measured % _CHECKED
        if tape.steps is not None and not check and not self.disk_at_work():
            return tape.steps
        places, reads = self._evictor.places, self._transfers.ahead.begun
        self._open = _Pass(schedule, tape, places, reads, self._departures.count)
        return None

    def pause(self) -> None:
        """Notes that the pass that begins follows a layout and is not recorded."""
        self._disturbed = False

    def note(self, record: Record, room: Room, position: int) -> None:
        """Records that a prefetch of a block has begun.

        If HBM is used as a ring, the next place follows from the present position. So a pass is
        only replayed if each of its fetches takes the place of another block.

        Args:
            record: The block.
            room: Its place, and the blocks evicted for it.
            position: Uses until it is needed.
        """
        noted = self._open
        if noted is None:
            return
        cursor, extent, fit = self._parts.planner.cursor, room.extent, None
        if room.left is None:
            fit = self._fit_of(extent)
        leaves = room.left or (fit and fit.instead_of) or record
        swap = Swap(record, leaves, extent.nbytes, cursor + position, fit=fit)
        noted.swaps.append((cursor, swap))

    def end(self, *, disturbed: bool) -> None:
        """Keeps the recording of the last pass; makes steps from it if it equals the one before.

        Args:
            disturbed: Whether the pass was a replay during which a block left HBM in another way.
        """
        noted, self._open = self._open, None
        self._disturbed = disturbed
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

    def drop(self, schedule: Schedule) -> None:
        """Forgets what passes of a schedule did."""
        self._tapes.pop(schedule, None)

    def repair(self) -> None:
        """Forgets everything, after an exception anywhere."""
        self._tapes.clear()
        self._open = None

    def disk_at_work(self) -> bool:
        """Whether reads of a disk have to be polled now and then."""
        transfers = self._transfers
        ahead = transfers.ahead
        return bool(transfers.flights or ahead.reading or ahead.parked or ahead.unsettled)

    # -- inside ----------------------------------------------------------

    def _fit_of(self, extent: Extent) -> Fit:
        """Returns the place just allocated, relative to a block that is or was next to it."""
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

    def _steps_of(self, noted: _Pass) -> list[Step]:
        """Returns the steps that repeat a recorded pass, one for each position."""
        schedule, passes = noted.schedule, noted.schedule.passes
        end = schedule.first_length
        steps = steps_over(schedule.order[:end], self._parts.table.get)
        for cursor, swap in noted.swaps:
            if cursor > end:
                break
            number = bisect_right(passes, swap.position, key=lambda entry: entry[0]) - 1
            if number >= 0:
                swap.passes, swap.key = number, passes[number][1]
            steps[cursor].swaps.append(swap)
        return steps

    def _from_dram(self, noted: _Pass) -> bool:
        """Whether all blocks of a pass are in HBM or DRAM, so that no disk is needed."""
        if self._parts.mover is None:
            return True
        if noted.reads != self._transfers.ahead.begun or self.disk_at_work():
            return False
        records = map(self._parts.table.get, set(noted.schedule.order))
        return all(record is not None and self._is_above_disk(record) for record in records)

    def _is_above_disk(self, record: Record) -> bool:
        """Whether a block is in HBM or in DRAM, even if its home is a file."""
        if record.home is not Tier.NVME or record.in_hbm in (_VALID, _DIRTY):
            return True
        return self._transfers.in_dram(record) is not None
