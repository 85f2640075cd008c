"""Loops that only read: HBM is laid out for a whole round, so that no use has to be decided.

What such a loop fetches, where to and what leaves for it follows from the order of use, the sizes
and what stays (:mod:`tiermem.core.laps`), all of which are known once the order has been observed.
So the first pass after that is replayed already; a recording (:mod:`.replay`) needs two more that
happen to do the same. HBM is brought into the state that the layout begins with as the loop comes
into force: what lies elsewhere leaves, and what stays and is missing comes as the round needs it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tiermem.core.block import Tier
from tiermem.core.laps import (
    Fetch,
    LaidOut,
    Missing,
    Place,
    Rounds,
    lay_out,
    play,
    postponed,
)
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.plan_maker import READ_ONLY, SLOT_LATENCY
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.lookahead.swaps import Fit, Step, Swap, steps_over
from tiermem.runtime.lookahead.walks import Fetcher
from tiermem.runtime.metrics.pass_timer import LINK_UP
from tiermem.runtime.parts import Parts

_MOST_LOOPS = 16
_MOST_USES = 4096
_MOST_PAUSE = 64
"""Passes that are decided, at most, after one that did not go as it was laid out."""

_Name = tuple[Schedule, frozenset[int], int]


@dataclass(slots=True, eq=False)
class _Loop:
    """A loop that can be laid out.

    Attributes:
        order: Its blocks, one round.
        laid_out: What streams, and where it goes.
    """

    order: Sequence[int]
    laid_out: LaidOut


@dataclass(slots=True, eq=False)
class _Force:
    """The loop that HBM is laid out for.

    Attributes:
        loop: Which one that is.
        rounds: What is fetched in each round.
        steps: What is done at each place of each of them.
        at: The round under way, or to come where none is.
        departures: Departures from HBM as the last round ended.
    """

    loop: _Loop
    rounds: Rounds
    steps: list[list[Step]]
    at: int = 0
    departures: int = -1


@dataclass(slots=True, eq=False)
class _Pause:
    """How long a pass is decided, after one that broke off.

    Attributes:
        passes: How many of them are to come.
        after: How many there will be after the next break.
    """

    passes: int = 0
    after: int = 1


class Arranger:
    """Lays HBM out for loops that only read; under the manager's lock."""

    def __init__(self, parts: Parts, fetcher: Fetcher) -> None:
        """Works on ``parts``; ``fetcher`` knows whether copies run beside the compute."""
        self._parts = parts
        self._fetcher = fetcher
        self._departures = parts.transfers.departures
        self._loops: dict[_Name, _Loop | None] = {}
        self._force: _Force | None = None
        self._pauses: dict[Hashable, _Pause] = {}

    def begin(self, plan: StreamPlan) -> list[Step] | None:
        """Returns what is done at each place of the pass that begins, HBM being laid out for it.

        Args:
            plan: What stays.

        Returns:
            The steps; None where the pass is to be decided: it is no loop that only reads, is not
            known yet, or does not go as it is laid out.
        """
        if not self._may(plan):
            self._force = None
            return None
        loop, force = self._loop(plan), self._force
        undisturbed = force is not None and force.loop is loop
        if force is None or not (undisturbed and force.departures == self._departures.count):
            force = self._force = None
            if loop is not None and self._is_simple(loop):
                force = self._force = self._arrange(loop, plan.plan.residents)
                if force is None:
                    self.broke_off()
        if force is None:
            return None
        force.departures = -1
        return force.steps[force.at]

    def ended(self) -> None:
        """Notes that the pass under way went as it was laid out, to its end."""
        force = self._force
        if force is not None:
            force.at = force.rounds.after(force.at)
            force.departures = self._departures.count
            self._pauses.pop(self._parts.planner.key, None)

    def broke_off(self) -> None:
        """Notes that the pass under way did not go as it was laid out."""
        self._force = None
        key = self._parts.planner.key
        pause = self._pauses.pop(key, None) or _Pause()
        pause.passes, pause.after = pause.after, min(_MOST_PAUSE, 2 * pause.after)
        self._pauses[key] = pause
        if len(self._pauses) > _MOST_LOOPS:
            del self._pauses[next(iter(self._pauses))]

    def repair(self) -> None:
        """Forgets what HBM is laid out for, after an exception anywhere."""
        self._force = None
        self._loops.clear()

    # -- inside ----------------------------------------------------------

    def _may(self, plan: StreamPlan) -> bool:
        """Whether the pass that begins may be laid out, as far as it and the plan go."""
        parts = self._parts
        planner, schedule = parts.planner, parts.planner.schedule
        if not self._fetcher.beside or parts.settings.prefetch_depth != "auto" or plan.turn:
            return False
        if parts.transfers.waste.stopping or not planner.observed(planner.key):
            return False
        if None in plan.compute:
            return False  # the plan is a guess, and another one comes soon
        if len(schedule.passes) < 2 or not 2 <= schedule.first_length <= _MOST_USES:
            return False
        pause = self._pauses.get(planner.key)
        if pause is not None and pause.passes:
            pause.passes -= 1
            return False
        return True

    def _loop(self, plan: StreamPlan) -> _Loop | None:
        """Returns the loop of the present schedule, if that can be laid out with a plan."""
        schedule, residents = self._parts.planner.schedule, plan.plan.residents
        name = schedule, residents, self._parts.table.hbm.capacity
        if name not in self._loops:
            self._loops[name] = self._lay_out(schedule, residents, plan.compute)
            if len(self._loops) > _MOST_LOOPS:
                del self._loops[next(iter(self._loops))]
        return self._loops[name]

    def _lay_out(
        self, schedule: Schedule, residents: frozenset[int], compute: Sequence[float | None]
    ) -> _Loop | None:
        """Lays out a loop that comes again as it is; None where it does not, or cannot be."""
        if not schedule.comes_again:
            return None
        length = schedule.first_length
        order = list(schedule.order[:length])
        table, runs = self._parts.table, self._parts.evictor.regions.runs()
        sizes = {
            block: record.block.nbytes
            for block in set(order) - residents
            if (record := table.get(block)) is not None and not record.fixed
        }
        if not sizes or not runs:
            return None
        transfer = {block: self._arrival(table[block]) for block in sizes}
        known = [seconds or 0.0 for seconds in compute[:length]]
        found = lay_out(order, known, sizes, transfer, runs, SLOT_LATENCY)
        return None if found is None else _Loop(order, found)

    def _arrival(self, record: Record) -> float:
        """Returns the seconds that a block takes from DRAM."""
        link, block = LINK_UP[Tier.DRAM], record.block
        return self._parts.pass_timer.estimates.transfer(link, block.id, block.nbytes)

    def _is_simple(self, loop: _Loop) -> bool:
        """Whether all that a loop uses is defined and, where it may move, at home in DRAM."""
        records = map(self._parts.table.get, loop.order)
        return all(
            record is not None
            and record.defined
            and (record.fixed or record.home is Tier.DRAM)
            and record.block.role in READ_ONLY
            for record in records
        )

    def _arrange(self, loop: _Loop, residents: frozenset[int]) -> _Force | None:
        """Brings HBM into the state that a layout begins with, and returns what comes then.

        None where a block that cannot leave is in the way.
        """
        inside = self._inside(loop)
        for extent in list(self._parts.table.hbm.extents()):
            if not self._clear(self._parts.table.at(extent.offset), residents, inside):
                return None
        missing = self._missing(loop, residents)
        if missing is None:
            self._parts.evictor.pack()
            missing = self._missing(loop, residents)
        rounds = None
        if missing is not None:
            out = loop.laid_out
            rounds = play(out.visits, out.layout, len(loop.order), inside, missing)
        if rounds is None:
            return None
        rounds = postponed(rounds, out.postponed, len(loop.order))
        return _Force(loop, rounds, self._steps_of(loop, rounds))

    def _inside(self, loop: _Loop) -> dict[int, Place]:
        """Returns what streams and lies just where the layout wants it as a round begins."""
        found: dict[int, Place] = {}
        for visit, offset in zip(loop.laid_out.visits, loop.laid_out.layout[0], strict=True):
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
        if record.in_hbm is State.DIRTY and not self._write(record):
            return False
        if record.in_hbm is not State.VALID or record.block.id in inside:
            return record.in_hbm is State.VALID
        if not evictor.rules.let_loose(record):
            return False
        evictor.evict(record)
        return True

    def _write(self, record: Record) -> bool:
        """Writes a block home, if that takes no disk; returns whether that could be."""
        if record.home is not Tier.DRAM or not self._parts.evictor.rules.let_loose(record):
            return False
        transfers = self._parts.transfers
        transfers.drain(record)
        return transfers.settle(record.block.id) is None

    def _missing(self, loop: _Loop, residents: frozenset[int]) -> list[Missing] | None:
        """Returns what stays and is not in HBM, with places; None where it has no room."""
        table, border = self._parts.table, self._parts.evictor.regions.border
        first: dict[int, int] = {}
        for position, block in enumerate(loop.order):
            if block in residents and table[block].extent is None:
                first.setdefault(block, position)
        gaps = [(g.offset, g.nbytes) for g in table.hbm.gaps_in(border, table.hbm.capacity)]
        found = []
        for block in sorted(first, key=lambda block: -table[block].block.nbytes):
            nbytes = table[block].block.nbytes
            large = [(size, index) for index, (_, size) in enumerate(gaps) if size >= nbytes]
            if not large:
                return None
            size, index = min(large)
            offset = gaps[index][0]
            gaps[index] = offset + nbytes, size - nbytes
            found.append(Missing(block, first[block], offset, nbytes))
        return sorted(found, key=lambda missing: missing.first)

    def _steps_of(self, loop: _Loop, rounds: Rounds) -> list[list[Step]]:
        """Returns the steps of each round: as it begins, then after each use."""
        get, found = self._parts.table.get, []
        for fetches in rounds.fetches:
            steps = steps_over(loop.order, get)
            for fetch in fetches:
                steps[fetch.event].swaps.append(self._swap_of(fetch, len(loop.order)))
            found.append(steps)
        return found

    def _swap_of(self, fetch: Fetch, length: int) -> Swap:
        """Returns the swap that makes a fetch."""
        table, passes = self._parts.table, self._parts.planner.schedule.passes
        comes, later = table[fetch.block], fetch.use // length
        key = passes[min(later, len(passes) - 1)][1]
        if fetch.exchanged:
            leaves = table[fetch.leaves[0]]
            fit = None
            if leaves.block.nbytes != fetch.nbytes:
                fit = Fit((leaves,), leaves, behind=False, delta=0)
            return Swap(comes, leaves, fetch.nbytes, fetch.use, later, key, fit)
        went = tuple(table[block] for block in fetch.leaves)
        fit = Fit(went, None, behind=False, delta=fetch.offset)
        return Swap(comes, comes, fetch.nbytes, fetch.use, later, key, fit)
