"""Loops that only read: HBM is laid out for a whole round, so that no use needs a decision.

The fetches of such a loop, their addresses and the blocks that leave for them follow from the order
of use, the sizes and the residents (:mod:`tiermem.core.laps`). All of these are known once the
order has been observed, so the next pass is replayed already, while a recording (:mod:`.replay`)
needs two more passes that do the same. When a layout comes into force, HBM is brought into the
state with which it begins: misplaced blocks leave, and missing residents are fetched in the round.
A round is one pass or several (forward and backward); passes that use only residents may come at
any time in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermem.core.block import Tier
from tiermem.core.laps import LaidOut, Missing, Place, Ways, lay_out, play, postpone_more
from tiermem.core.residency import Record, State
from tiermem.core.rounds import Fetch, Round, Rounds, opened, opening, postponed
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.lates import Lates
from tiermem.runtime.lookahead.loop_times import SLOT_LATENCY, seconds_from_dram
from tiermem.runtime.lookahead.plan_maker import READ_ONLY
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.lookahead.swaps import Fit, Step, Swap, steps_over
from tiermem.runtime.lookahead.walks import Fetcher
from tiermem.runtime.parts import Parts

_MOST_LOOPS = 64
_MOST_USES = 4096
_MOST_WAYS = 4
_MOST_PAUSE = 64
"""Most rounds without a layout after one that did not follow it."""

_Room = tuple[int, int]
"""Bytes of HBM, and how often the set of blocks at home there has changed."""

_Name = tuple[Schedule, frozenset[int], _Room]


@dataclass(slots=True, eq=False)
class _Loop:
    """A loop that only reads, seen from one of its passes.

    Attributes:
        names: Names of the passes of a round that use streaming blocks, from the next one on.
        orders: The blocks that each of them uses.
        residents: The blocks that stay.
        room: The HBM for residents and streaming blocks.
        compute: Seconds of each use of a round.
        idle: The steps of the current pass, if that uses only residents.
        between: How many passes of that kind are foreseen.
    """

    names: tuple[Hashable, ...]
    orders: tuple[tuple[int, ...], ...]
    residents: frozenset[int]
    room: _Room
    compute: Sequence[float]
    idle: list[Step] | None
    between: int

    @property
    def order(self) -> list[int]:
        """Its blocks, one round."""
        return [block for order in self.orders for block in order]

    def is_same(self, other: _Loop, number: int) -> bool:
        """Whether it is the same loop as another one, seen ``number`` passes later."""
        count = len(other.names)
        if len(self.names) != count:
            return False
        at = number % count
        return (self.names, self.orders, self.residents, self.room) == (
            other.names[at:] + other.names[:at],
            other.orders[at:] + other.orders[:at],
            other.residents,
            other.room,
        )


@dataclass(slots=True, eq=False)
class _Known:
    """The possible layouts of a loop, and the one that was chosen last.

    Attributes:
        ways: All layouts, which do not depend on times.
        compute: Seconds of each use for which one was chosen.
        transfer: Seconds that each streaming block took to arrive, by id.
        out: The chosen layout; None if there was none.
    """

    ways: Ways
    compute: Sequence[float] = ()
    transfer: Mapping[int, float] = field(default_factory=dict)
    out: LaidOut | None = None


@dataclass(slots=True, eq=False)
class _Force:
    """The layout that is in force.

    Attributes:
        loop: The loop.
        out: The layout.
        rounds: The fetches of each pass.
        steps: The steps of each pass that has occurred.
        seen: The same loop as seen last from each pass of a round, and from those in between.
        at: The number of the current pass, or else of the next one.
        idle: Whether the current pass uses only residents, and does not count.
        done: How many passes followed the layout.
        departures: The number of departures from HBM at the end of the last pass.
    """

    loop: _Loop
    out: LaidOut
    rounds: Rounds
    steps: dict[int, list[Step]] = field(default_factory=dict)
    seen: dict[tuple[int, bool], _Loop] = field(default_factory=dict)
    at: int = 0
    idle: bool = False
    done: int = 0
    departures: int = -1

    def goes_on(self, loop: _Loop) -> bool:
        """Whether a loop is this one, at the next pass."""
        name = self.at % len(self.loop.names), loop.idle is not None
        if self.seen.get(name) is not loop:
            if not loop.is_same(self.loop, self.at):
                return False
            self.seen[name] = loop
        return True


@dataclass(frozen=True, slots=True)
class _Filled:
    """The blocks with which HBM was filled before the first pass.

    Attributes:
        offsets: The offset of each block.
        out: The layout for which they were fetched.
        rounds: The fetches of passes after that.
    """

    offsets: Mapping[int, int]
    out: LaidOut
    rounds: Rounds


@dataclass(slots=True, eq=False)
class _Pause:
    """How long a loop has no layout, after a pass that did not follow it.

    Attributes:
        after: How many rounds it will be after the next such pass.
        passes: How many of its passes are left.
    """

    after: int
    passes: int = 0


class Arranger:
    """Lays HBM out for loops that only read; under the manager's lock."""

    def __init__(self, parts: Parts, fetcher: Fetcher, lates: Lates) -> None:
        """Works on ``parts``.

        Args:
            parts: The parts of the manager.
            fetcher: Knows whether copies run beside the compute.
            lates: When passes release blocks.
        """
        self._parts = parts
        self._fetcher = fetcher
        self._lates = lates
        self._departures = parts.transfers.departures
        self._loops: dict[_Name, _Loop | None] = {}
        self._layouts: dict[_Loop, tuple[Round, LaidOut] | None] = {}
        self._seen = 0  # the version of ``lates`` that layouts are for
        self._known: dict[tuple[object, ...], _Known] = {}
        self._force: _Force | None = None
        self._filled: _Filled | None = None
        self._pauses: dict[frozenset[Hashable], _Pause] = {}

    def begin(self, plan: StreamPlan) -> list[Step] | None:
        """Returns the steps of the pass that begins, for which HBM is laid out.

        Args:
            plan: The plan, which says what stays.

        Returns:
            The steps; None if each use has to be decided: the pass is not in a loop that only
            reads, is not known yet, or does not follow a layout.
        """
        schedule = self._parts.planner.schedule
        loop = self._loop(schedule, plan) if self._may(plan) else None
        if loop is None or self._pauses_in(loop):
            self._put_into_force(None)
            return None
        force, now = self._force, self._departures.count
        if force is None or force.departures != now or not force.goes_on(loop):
            force = self._arranged(loop)
            self._put_into_force(force)
        if force is None:
            return None
        force.departures = -1
        force.idle = loop.idle is not None
        if loop.idle is not None:
            return loop.idle
        if force.at not in force.steps:  # once for each pass, when it occurs
            force.steps[force.at] = self._steps_of(force)
        return force.steps[force.at]

    def opening(self, schedule: Schedule, plan: StreamPlan) -> list[Fetch]:
        """Returns the fetches with which HBM can be filled before the first pass, by use.

        Args:
            schedule: The uses that are expected of that pass and the following ones.
            plan: The plan, which says what stays.

        Returns:
            The fetches to places that no other block has before; none if there is no layout.
        """
        loop = None if None in plan.compute else self._loop(schedule, plan)
        force = self._arranged(loop) if loop is not None else None
        if force is None:
            return []
        fetches = opening(force.rounds)
        if (rounds := opened(force.rounds, fetches)) is not None:
            self._filled = _Filled({f.block: f.offset for f in fetches}, force.out, rounds)
        return fetches

    def ended(self) -> None:
        """Notes that the current pass followed the layout to its end."""
        force = self._force
        if force is None:
            return
        force.departures = self._departures.count
        if not force.idle:
            force.at = force.rounds.after(force.at)
            force.done += 1
            if force.done >= len(force.loop.names):
                self._pauses.pop(frozenset(force.loop.names), None)

    def broke_off(self, late: Sequence[int] = ()) -> None:
        """Notes that the current pass did not follow the layout.

        Args:
            late: Blocks that are released later than expected.
        """
        force, planner = self._force, self._parts.planner
        if force is not None:
            if late and not force.idle:
                at = force.at % len(force.loop.names)
                used = {block: n for n, block in enumerate(force.loop.orders[at][: planner.cursor])}
                self._lates.broke_off(force.loop.names[at], {b: used[b] for b in late if b in used})
            if planner.observed(planner.key):  # a guess does not count
                self._pause(force.loop, late=bool(late))
        self._put_into_force(None)

    def repair(self) -> None:
        """Forgets the layout in force, after an exception anywhere."""
        self._put_into_force(None)
        self._filled = None
        self._loops.clear()
        self._layouts.clear()
        self._known.clear()

    # -- inside ----------------------------------------------------------

    def _put_into_force(self, force: _Force | None) -> None:
        self._force, self._fetcher.laid_out = force, force is not None

    def _may(self, plan: StreamPlan) -> bool:
        """Whether the pass that begins and the plan permit a layout."""
        parts = self._parts
        if not self._fetcher.beside or parts.settings.prefetch_depth != "auto" or plan.turn:
            return False
        if parts.transfers.waste.stopped:
            return False
        return None not in plan.compute  # else the plan is a guess, and another one comes soon

    def _pause(self, loop: _Loop, *, late: bool = False) -> None:
        """Gives a loop no layout for some rounds.

        Args:
            loop: The loop.
            late: Whether a pass did not follow the layout because blocks are released later than
                expected. After the first time, the loop is laid out again at once. The same holds
                for the first time in a round of several passes, for which this is the usual reason.
        """
        name = frozenset(loop.names)
        pause = self._pauses.pop(name, None) or _Pause(int(len(loop.names) == 1 and not late))
        pause.passes = pause.after * len(loop.names)
        pause.after = min(_MOST_PAUSE, max(1, 2 * pause.after))
        self._pauses[name] = pause
        _drop_oldest(self._pauses, _MOST_LOOPS)

    def _pauses_in(self, loop: _Loop) -> bool:
        """Whether the pass that begins gets no layout, since an earlier one did not follow it."""
        pause = self._pauses.get(frozenset(loop.names))
        if pause is None or not pause.passes:
            return False
        pause.passes -= loop.idle is None
        return True

    def _loop(self, schedule: Schedule, plan: StreamPlan) -> _Loop | None:
        """Returns the loop of a schedule, if there is one, with the residents of a plan."""
        residents = plan.plan.residents
        room = self._parts.table.hbm.capacity, self._parts.evictor.regions.changes
        name = schedule, residents, room
        if name not in self._loops:
            self._loops[name] = self._look(*name, plan.compute)
            if len(self._loops) > _MOST_LOOPS:
                gone = self._loops.pop(next(iter(self._loops)))
                if gone is not None:
                    self._layouts.pop(gone, None)
        return self._loops[name]

    def _look(
        self,
        schedule: Schedule,
        residents: frozenset[int],
        room: _Room,
        compute: Sequence[float | None],
    ) -> _Loop | None:
        """Searches a schedule for a loop; None if the foreseen passes do not repeat."""
        get, order = self._parts.table.get, schedule.order
        used = set(order)
        known = {block: record for block in used if (record := get(block)) is not None}
        streams = {block for block, record in known.items() if not record.fixed} - residents
        spans = schedule.round_over(streams)
        places = [place for begin, end, _ in spans for place in range(begin, end)]
        if not 2 <= len(places) <= _MOST_USES or places[-1] >= len(compute):
            return None
        first, *_ = schedule.spans
        idle = None if spans[0] == first else steps_over(order[: first[1]], get)
        between = sum(streams.isdisjoint(order[begin:end]) for begin, end, _ in schedule.spans)
        return _Loop(
            tuple(key for _, _, key in spans),
            tuple(tuple(order[begin:end]) for begin, end, _ in spans),
            residents,
            room,
            [compute[place] or 0.0 for place in places],
            idle,
            between,
        )

    def _arranged(self, loop: _Loop) -> _Force | None:
        """Lays HBM out for a loop from the pass that begins; None if that is not possible."""
        if loop.idle is not None or not self._is_simple(loop):
            return None
        if self._seen != self._lates.version:
            self._seen = self._lates.version
            self._layouts.clear()
        if loop not in self._layouts:
            self._layouts[loop] = self._lay_out(loop)
        found = self._layouts[loop]
        if found is None:
            return None
        force = self._arrange(loop, *found)
        if force is None:
            self._pause(loop)
        return force

    def _lay_out(self, loop: _Loop) -> tuple[Round, LaidOut] | None:
        """Returns a loop's events and its layout; None if there is none."""
        table, runs = self._parts.table, self._parts.evictor.regions.runs()
        if not runs:
            return None
        streams = [b for b in set(loop.order) - loop.residents if not table[b].fixed]
        sizes = {block: table[block].block.nbytes for block in streams}
        transfer = {block: seconds_from_dram(self._parts, table[block]) for block in sizes}
        lates = [self._lates.of(name) for name in loop.names]
        both = zip(loop.orders, lates, strict=True)
        further = [late.further.get(block, 0) for order, late in both for block in order]
        lengths = [len(order) for order in loop.orders]
        one = Round(lengths, [late.lag for late in lates], further)
        name = loop.orders, tuple(one.freed), frozenset(sizes), tuple(runs)
        known = self._known.pop(name, None) or _Known(Ways(loop.order, one, sizes, runs))
        self._known[name] = known  # layouts found for other times can be used again
        _drop_oldest(self._known, _MOST_WAYS)
        if (known.compute, known.transfer) != (loop.compute, transfer):
            known.out, ways, times = None, known.ways, (loop.compute, transfer, SLOT_LATENCY)
            found = lay_out(ways, *times)
            if found is not None:
                known.out = postpone_more(found, ways, *times)
            known.compute, known.transfer = loop.compute, transfer
        return None if known.out is None else (one, known.out)

    def _is_simple(self, loop: _Loop) -> bool:
        """Whether all blocks of a loop hold data and, unless fixed, have a copy in DRAM."""
        records = map(self._parts.table.get, set(loop.order))
        return all(
            record is not None
            and (record.fixed or (record.block.role in READ_ONLY and record.defined))
            and self._is_above_disk(record, loop.residents)
            for record in records
        )

    def _is_above_disk(self, record: Record, residents: frozenset[int]) -> bool:
        """Whether a block is never read from a disk: it stays, or has its place in DRAM."""
        if record.home is not Tier.NVME:
            return True
        block_id, transfers = record.block.id, self._parts.transfers
        if block_id not in residents:
            return transfers.ahead.keeps(block_id) and transfers.in_dram(record) is not None
        there = record.usable and not self._parts.evictor.regions.misplaced(record)
        return there or transfers.in_dram(record) is not None

    def _arrange(self, loop: _Loop, one: Round, out: LaidOut) -> _Force | None:
        """Brings HBM into the state with which a layout begins, and puts the layout into force.

        None if a block that cannot leave is in the way.
        """
        inside = self._inside(out)
        for extent in list(self._parts.table.hbm.extents()):
            if not self._clear(self._parts.table.at(extent.offset), loop.residents, inside):
                return None
        filled, self._filled = self._filled, None
        if filled is not None and filled.out is out and self._is_there(filled.offsets):
            return _Force(loop, out, filled.rounds)
        missing = self._missing(loop)
        if missing is None:
            self._parts.evictor.pack()
            missing = self._missing(loop)
        rounds = None
        if missing is not None:
            rounds = play(out.visits, out.layout, one, inside, missing)
        if rounds is None:
            return None
        return _Force(loop, out, postponed(rounds, out.postponed, one.lengths))

    def _is_there(self, offsets: Mapping[int, int]) -> bool:
        """Whether just these blocks (and those at home there) are in HBM, at these places."""
        left = dict(offsets)
        for record in self._parts.table:
            place = None if record.fixed else record.extent
            if left.pop(record.block.id, -1) != (-1 if place is None else place.offset):
                return False
        return not left

    def _inside(self, out: LaidOut) -> dict[int, Place]:
        """Returns the streaming blocks that are where the layout has them when a round begins."""
        found: dict[int, Place] = {}
        for visit, offset in zip(out.visits, out.layout[0], strict=True):
            extent = self._parts.table[visit.block].extent
            if extent is not None and extent.offset == offset and visit.block not in found:
                found[visit.block] = Place(offset, extent.nbytes)
        return found

    def _clear(
        self, record: Record | None, residents: frozenset[int], inside: dict[int, Place]
    ) -> bool:
        """Evicts a block that is not at its place; returns whether none is in the way then."""
        if record is None or record.extent is None:
            return False  # bytes that users' views keep
        if record.fixed:
            return True
        evictor = self._parts.evictor
        if record.block.id in residents and not evictor.regions.misplaced(record):
            return record.usable  # it stays, whether or not it is written home
        if record.in_hbm is State.DIRTY and not write_home(self._parts, record):
            return False
        if record.in_hbm is not State.VALID or record.block.id in inside:
            return record.in_hbm is State.VALID
        if not evictor.rules.let_loose(record):
            return False
        # it was prefetched to another place, which does not mean that the prefetch was wasted
        self._parts.transfers.waste.withdraw(record.block.id)
        evictor.evict(record)
        return True

    def _missing(self, loop: _Loop) -> list[Missing] | None:
        """Returns residents that are not in HBM, with places; None if there is no room."""
        table, border = self._parts.table, self._parts.evictor.regions.border
        first: dict[int, int] = {}
        for position, block in enumerate(loop.order):
            if block in loop.residents and table[block].extent is None:
                first.setdefault(block, position)
        gaps = [(g.offset, g.nbytes) for g in table.hbm.gaps_in(border, table.hbm.capacity)]
        found = []
        for block in sorted(first, key=lambda b: (-table[b].block.nbytes, -first[b])):
            nbytes = table[block].block.nbytes
            large = [(size, index) for index, (_, size) in enumerate(gaps) if size >= nbytes]
            if not large:
                return None
            size, index = min(large)
            begin = gaps[index][0]
            gaps[index] = begin, size - nbytes
            found.append(Missing(block, first[block], begin + size - nbytes, nbytes))
        return sorted(found, key=lambda missing: missing.first)

    def _steps_of(self, force: _Force) -> list[Step]:
        """Returns the steps of the next pass: one at its begin, then one after each use."""
        loop, number = force.loop, force.at
        steps = steps_over(loop.orders[number % len(loop.orders)], self._parts.table.get)
        for fetch in force.rounds.fetches[number]:
            steps[fetch.event].swaps.append(self._swap_of(fetch, loop, number))
        return steps

    def _swap_of(self, fetch: Fetch, loop: _Loop, number: int) -> Swap:
        """Returns the swap that performs a fetch in a pass."""
        table, count, later = self._parts.table, len(loop.orders), 0
        use = fetch.use
        while use >= (length := len(loop.orders[(number + later) % count])):
            use -= length
            later += 1
        key = loop.names[(number + later) % count]
        if later:
            later += loop.between  # it is not wasted before these have ended, too
        comes = table[fetch.block]
        if fetch.exchanged:
            leaves = table[fetch.leaves[0]]
            fit = None
            if leaves.block.nbytes != fetch.nbytes:
                fit = Fit((leaves,), leaves, behind=False, delta=0)
            return Swap(comes, leaves, fetch.nbytes, fetch.use, later, key, fit)
        went = tuple(table[block] for block in fetch.leaves)
        fit = Fit(went, None, behind=False, delta=fetch.offset)
        return Swap(comes, comes, fetch.nbytes, fetch.use, later, key, fit)


def _drop_oldest(known: dict[Any, Any], most: int) -> None:
    """Drops the oldest entry if there are more than ``most``."""
    if len(known) > most:
        del known[next(iter(known))]


def write_home(parts: Parts, record: Record) -> bool:
    """Writes a dirty block home, if its home is not on a disk; later fetches are ordered behind it.

    Returns:
        Whether that was possible; then the block may leave at once.
    """
    if record.home is not Tier.DRAM or not parts.evictor.rules.let_loose(record):
        return False
    parts.transfers.drain(record)
    return parts.transfers.settle(record.block.id) is None
