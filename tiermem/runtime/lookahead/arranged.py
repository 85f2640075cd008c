"""Loops that only read: HBM is laid out for a whole round, so that no use has to be decided.

What such a loop fetches, where to and what leaves for it follows from the order of use, the sizes
and what stays (:mod:`tiermem.core.laps`), all of which are known once the order has been observed.
So the first pass after that is replayed already; a recording (:mod:`.replay`) needs two more that
happen to do the same. HBM is brought into the state that the layout begins with as the loop comes
into force: what lies elsewhere leaves, and what stays and is missing comes as the round needs it.
A round is one pass or several (forward and backward); passes that use only what stays may come at
any time between them.
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
"""Rounds that are decided, at most, after one that did not go as it was laid out."""

_Room = tuple[int, int]
"""Bytes of HBM, and how often what is there for good has changed."""

_Name = tuple[Schedule, frozenset[int], _Room]


@dataclass(slots=True, eq=False)
class _Loop:
    """A loop that only reads, seen from one of its passes.

    Attributes:
        names: Of the passes of a round that use what streams, from the next one on.
        orders: The blocks that each of them uses.
        residents: The blocks that stay.
        room: What HBM there is for them and for what streams.
        compute: Seconds of each use of a round.
        idle: The steps of the pass at which it is seen, where that uses only what stays.
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
        """Whether it is another loop, seen so many passes later."""
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
    """The ways to lay a loop out, and the one that was taken last.

    Attributes:
        ways: All of them, whatever the times are.
        compute: Seconds of each use, for which one was taken.
        transfer: Seconds that each block which streams took to arrive, by id.
        out: The one that was taken; None where there was none.
    """

    ways: Ways
    compute: Sequence[float] = ()
    transfer: Mapping[int, float] = field(default_factory=dict)
    out: LaidOut | None = None


@dataclass(slots=True, eq=False)
class _Force:
    """The loop that HBM is laid out for.

    Attributes:
        loop: Which one that is.
        out: The layout.
        rounds: What is fetched in each pass.
        steps: What is done at each place of those passes that have come.
        seen: The same loop as it was seen last from each pass of a round, and from those between.
        at: The pass under way, or to come where none is.
        idle: Whether the pass under way uses only what stays, and does not count.
        done: Passes that went as they were laid out.
        departures: Departures from HBM as the last pass ended.
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
        """Whether a loop is this one, at the pass to come."""
        name = self.at % len(self.loop.names), loop.idle is not None
        if self.seen.get(name) is not loop:
            if not loop.is_same(self.loop, self.at):
                return False
            self.seen[name] = loop
        return True


@dataclass(frozen=True, slots=True)
class _Filled:
    """What HBM was filled with before the first pass.

    Attributes:
        offsets: Of each block that came, where to.
        out: The layout it was for.
        rounds: What passes fetch after that.
    """

    offsets: Mapping[int, int]
    out: LaidOut
    rounds: Rounds


@dataclass(slots=True, eq=False)
class _Pause:
    """How long a loop is decided, after a pass that broke off.

    Attributes:
        after: How many rounds there will be after the next break.
        passes: How many of its passes are to come.
    """

    after: int
    passes: int = 0


class Arranger:
    """Lays HBM out for loops that only read; under the manager's lock."""

    def __init__(self, parts: Parts, fetcher: Fetcher, lates: Lates) -> None:
        """Works on ``parts``.

        Args:
            parts: Whose blocks they are.
            fetcher: Knows whether copies run beside the compute.
            lates: When passes let go of blocks.
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
        """Returns what is done at each place of the pass that begins, HBM being laid out for it.

        Args:
            plan: What stays.

        Returns:
            The steps; None where the pass is to be decided: it is of no loop that only reads, is
            not known yet, or does not go as it is laid out.
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
        if force.at not in force.steps:  # each once, as it comes
            force.steps[force.at] = self._steps_of(force)
        return force.steps[force.at]

    def opening(self, schedule: Schedule, plan: StreamPlan) -> list[Fetch]:
        """Returns what HBM can be filled with before the first pass, in the order of its use.

        Args:
            schedule: What that and those after it are expected to use.
            plan: What stays.

        Returns:
            The fetches to places that nothing has before; none where it cannot be laid out.
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
        """Notes that the pass under way went as it was laid out, to its end."""
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
        """Notes that the pass under way did not go as it was laid out.

        Args:
            late: Blocks that are let go later than expected.
        """
        force, planner = self._force, self._parts.planner
        if force is not None:
            if late and not force.idle:
                at = force.at % len(force.loop.names)
                used = {block: n for n, block in enumerate(force.loop.orders[at][: planner.cursor])}
                self._lates.broke_off(force.loop.names[at], {b: used[b] for b in late if b in used})
            if planner.observed(planner.key):  # a guess says nothing of the next pass
                self._pause(force.loop, late=bool(late))
        self._put_into_force(None)

    def repair(self) -> None:
        """Forgets what HBM is laid out for, after an exception anywhere."""
        self._put_into_force(None)
        self._filled = None
        self._loops.clear()
        self._layouts.clear()
        self._known.clear()

    # -- inside ----------------------------------------------------------

    def _put_into_force(self, force: _Force | None) -> None:
        self._force, self._fetcher.laid_out = force, force is not None

    def _may(self, plan: StreamPlan) -> bool:
        """Whether the pass that begins may be laid out, as far as it and the plan go."""
        parts = self._parts
        if not self._fetcher.beside or parts.settings.prefetch_depth != "auto" or plan.turn:
            return False
        if parts.transfers.waste.stopped:
            return False
        return None not in plan.compute  # else the plan is a guess, and another one comes soon

    def _pause(self, loop: _Loop, *, late: bool = False) -> None:
        """Decides a loop use by use for some rounds.

        Args:
            loop: The loop.
            late: Whether a pass of it broke off since blocks are let go later than was expected.
                After the first time it is laid out again at once, as after the first break of a
                round of several passes, which mostly comes of that.
        """
        name = frozenset(loop.names)
        pause = self._pauses.pop(name, None) or _Pause(int(len(loop.names) == 1 and not late))
        pause.passes = pause.after * len(loop.names)
        pause.after = min(_MOST_PAUSE, max(1, 2 * pause.after))
        self._pauses[name] = pause
        _drop_oldest(self._pauses, _MOST_LOOPS)

    def _pauses_in(self, loop: _Loop) -> bool:
        """Whether the pass that begins is to be decided since one before it broke off."""
        pause = self._pauses.get(frozenset(loop.names))
        if pause is None or not pause.passes:
            return False
        pause.passes -= loop.idle is None
        return True

    def _loop(self, schedule: Schedule, plan: StreamPlan) -> _Loop | None:
        """Returns the loop of a schedule, if there is one, with what stays by a plan."""
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
        """Looks for a loop in a schedule; None where what is foreseen does not come again."""
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
        """Lays HBM out for a loop from the pass that begins; None where that cannot be."""
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
        """Returns a loop's events, and how what streams is laid out; None where it cannot be."""
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
        self._known[name] = known  # what was found for other times is found again
        _drop_oldest(self._known, _MOST_WAYS)
        if (known.compute, known.transfer) != (loop.compute, transfer):
            known.out, ways, times = None, known.ways, (loop.compute, transfer, SLOT_LATENCY)
            found = lay_out(ways, *times)
            if found is not None:
                known.out = postpone_more(found, ways, *times)
            known.compute, known.transfer = loop.compute, transfer
        return None if known.out is None else (one, known.out)

    def _is_simple(self, loop: _Loop) -> bool:
        """Whether all that a loop uses is defined and, where it may move, in DRAM to stay."""
        records = map(self._parts.table.get, set(loop.order))
        return all(
            record is not None
            and (record.fixed or (record.block.role in READ_ONLY and record.defined))
            and self._is_above_disk(record, loop.residents)
            for record in records
        )

    def _is_above_disk(self, record: Record, residents: frozenset[int]) -> bool:
        """Whether no disk is asked for a block: it stays, or has its place in DRAM."""
        if record.home is not Tier.NVME:
            return True
        block_id, transfers = record.block.id, self._parts.transfers
        if block_id not in residents:
            return transfers.ahead.keeps(block_id) and transfers.in_dram(record) is not None
        there = record.usable and not self._parts.evictor.regions.misplaced(record)
        return there or transfers.in_dram(record) is not None

    def _arrange(self, loop: _Loop, one: Round, out: LaidOut) -> _Force | None:
        """Brings HBM into the state that a layout begins with, and returns what comes then.

        None where a block that cannot leave is in the way.
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
        """Whether just these blocks are in HBM, but for what is there for good, at these places."""
        left = dict(offsets)
        for record in self._parts.table:
            place = None if record.fixed else record.extent
            if left.pop(record.block.id, -1) != (-1 if place is None else place.offset):
                return False
        return not left

    def _inside(self, out: LaidOut) -> dict[int, Place]:
        """Returns what streams and lies just where the layout wants it as a round begins."""
        found: dict[int, Place] = {}
        for visit, offset in zip(out.visits, out.layout[0], strict=True):
            extent = self._parts.table[visit.block].extent
            if extent is not None and extent.offset == offset and visit.block not in found:
                found[visit.block] = Place(offset, extent.nbytes)
        return found

    def _clear(
        self, record: Record | None, residents: frozenset[int], inside: dict[int, Place]
    ) -> bool:
        """Evicts a block that does not lie where it belongs; returns whether none is in the way."""
        if record is None or record.extent is None:
            return False  # bytes that somebody's views keep
        if record.fixed:
            return True
        evictor = self._parts.evictor
        if record.block.id in residents and not evictor.regions.misplaced(record):
            return record.usable  # it does not leave, be it written home or not
        if record.in_hbm is State.DIRTY and not write_home(self._parts, record):
            return False
        if record.in_hbm is not State.VALID or record.block.id in inside:
            return record.in_hbm is State.VALID
        if not evictor.rules.let_loose(record):
            return False
        # what was fetched ahead for it lies elsewhere: that says nothing of whether it will be used
        self._parts.transfers.waste.withdraw(record.block.id)
        evictor.evict(record)
        return True

    def _missing(self, loop: _Loop) -> list[Missing] | None:
        """Returns what stays and is not in HBM, with places; None where it has no room."""
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
        """Returns the steps of the pass to come: as it begins, then after each use."""
        loop, number = force.loop, force.at
        steps = steps_over(loop.orders[number % len(loop.orders)], self._parts.table.get)
        for fetch in force.rounds.fetches[number]:
            steps[fetch.event].swaps.append(self._swap_of(fetch, loop, number))
        return steps

    def _swap_of(self, fetch: Fetch, loop: _Loop, number: int) -> Swap:
        """Returns the swap that makes a fetch in a pass."""
        table, count, later = self._parts.table, len(loop.orders), 0
        use = fetch.use
        while use >= (length := len(loop.orders[(number + later) % count])):
            use -= length
            later += 1
        key = loop.names[(number + later) % count]
        if later:
            later += loop.between  # it is not for nothing until they are over as well
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
    """Drops the first of what is known, where that is more than so many."""
    if len(known) > most:
        del known[next(iter(known))]


def write_home(parts: Parts, record: Record) -> bool:
    """Writes a dirty block home, if that takes no disk; copies up are ordered behind it.

    Returns:
        Whether that could be: the block may then leave at once.
    """
    if record.home is not Tier.DRAM or not parts.evictor.rules.let_loose(record):
        return False
    parts.transfers.drain(record)
    return parts.transfers.settle(record.block.id) is None
