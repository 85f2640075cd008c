"""Decides, for one schedule, what stays in HBM and in DRAM and when fetches are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermem.core.block import Role, Tier, align_up
from tiermem.core.cost import Timetable, refetched
from tiermem.core.forecast import timed
from tiermem.core.laps import there_throughout
from tiermem.core.loops import Loop, Plan, largest_beside
from tiermem.core.nearer import nearer_from_disk
from tiermem.core.plans import share_hbm
from tiermem.core.residency import Record
from tiermem.core.residents import adjust_residents, choose_residents
from tiermem.core.schedule import Schedule
from tiermem.core.staying import choose_to_stay, window_of
from tiermem.runtime.lookahead.lates import Lates
from tiermem.runtime.lookahead.loop_times import LoopTimes
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.metrics.pass_timer import LINK_UP
from tiermem.runtime.parts import Parts

_MOST_STEPS = 4096
_MOST_PLANNED = 1 << 14
_MARGIN = 1.25
_LATENCY = 1e-3
_STAY = 1.25
"""If the disk takes this many times the compute, blocks are no longer read through DRAM; they are
again if it is shorter by the same factor."""
_MORE_DRAM = 1.125
"""If there is more spare DRAM than a plan was made for by this factor, another plan is worth it."""
_OF_A_TURN = 0.5
"""A block stays if it is used again within this share of the uses that fill HBM once."""
_FASTER = 1.05
"""Residents are chosen again if a link is faster than assumed by this factor."""
_AS_GOOD = 1.005
"""A plan that needs fewer copies to come into force may be slower by this factor."""
_MUCH = 0.1
"""Least share of a round that a new plan has to save if only measured times have changed."""
_NOTHING = 2e-3
"""A plan that saves less than this share of a round counts as equally good."""
_DECIDED = 0.1
"""Least share of a round that a plan with a layout has to save over one without, as the model
without a layout leaves out some waits."""
_COPIES_BIND = 10.0
"""If copies take this many times a pass's compute, the plan that was chosen is kept for all other
times for which this holds, too."""
_MOST_LOADS = 32
_STATE = (Role.MASTER, Role.OPTIMIZER)
_TIMES = 1
"""Index in the result of :meth:`PlanMaker.made_of` that changes with measured times."""
_OF_A_RING = (2, 5)
"""Indices in :meth:`PlanMaker.made_of` on which a ring depends: number of blocks, and HBM."""
READ_ONLY = (Role.PARAM, Role.BUFFER, Role.QUANT)
_Alike = tuple[frozenset[int], int, int | None, tuple[bool, int, int]]
"""What a settled plan is for: blocks, room, times, and whether and how the loop repeats."""


@dataclass(frozen=True, slots=True)
class Staying:
    """The blocks that stay in HBM in the loops that write.

    Attributes:
        known: Masters and state that have been seen in such loops.
        kept: Blocks that stay.
        room: Bytes of HBM for which this was decided.
        rate: Bytes per second to HBM that were assumed then.
        copies_bind: Whether a round's copies were assumed to take longer than its compute.
    """

    known: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    room: int = 0
    rate: float = 0.0
    copies_bind: bool = False


class PlanMaker:
    """Makes stream plans from what was measured.

    Attributes:
        copies_bind: Whether the copies of loops that write take longer than their compute.
    """

    def __init__(self, parts: Parts, lates: Lates, least: int) -> None:
        """Works on ``parts``.

        Args:
            parts: The parts of the manager, with blocks, memory and measurements.
            lates: When passes release blocks.
            least: Bytes of the reserve if nothing has been measured.
        """
        self._parts = parts
        self._times = LoopTimes(parts, lates)
        self._lates = lates
        self._waste = parts.transfers.waste
        self._least = least
        self._settled: dict[int, tuple[_Alike, int, Plan]] = {}
        self._load = 0
        self._run = 0
        self._in_force: tuple[tuple[object, int], Plan] | None = None
        self._bound: tuple[object, Plan] | None = None
        self._there: tuple[object, set[int]] = (None, set())
        self._waiting: set[int] = set()
        self._through_dram = True
        self._staying = Staying()
        self.copies_bind = False

    def begin(self, load: int) -> None:
        """Notes that a pass begins.

        Args:
            load: Its tokens, rounded; 0 if they are not known.
        """
        self._run = self._run + 1 if load == self._load else 1
        self._load = load

    def made_of(self, held: set[int]) -> tuple[int, ...]:
        """Returns everything on which a plan depends, except the schedule and the load."""
        parts = self._parts
        return (
            self._run.bit_length() if self._load in self._waiting else 0,
            parts.pass_timer.estimates.version,
            len(parts.table),
            self._waste.changes,
            len(held),
            parts.table.hbm.capacity,
            self._times.spare() if parts.mover is not None else 0,
            self._lates.version,
        )

    def is_stale(self, plan: StreamPlan, made_of: tuple[int, ...]) -> bool:
        """Whether a new plan has to be made for a schedule.

        If HBM is used as a ring, measured times change nothing: a plan only depends on the blocks,
        the room, and the residents, which depend on the speed of the link.

        Args:
            plan: The former plan.
            made_of: The present result of :meth:`made_of`.
        """
        if plan.made_of == made_of:
            return False
        if not plan.turn or self._parts.mover is not None:
            return True
        stays = self._staying
        if [plan.made_of[i] for i in _OF_A_RING] != [made_of[i] for i in _OF_A_RING]:
            return True
        if plan.plan.residents != stays.kept or stays.copies_bind != self.copies_bind:
            return True
        return bool(stays.kept) and self._times.rate_up() > _FASTER * stays.rate

    @staticmethod
    def only_times_differ(plan: StreamPlan, made_of: tuple[int, ...]) -> bool:
        """Whether at most measured times have changed since a plan was made."""
        then = plan.made_of
        return then != made_of and all(
            old == new
            for at, (old, new) in enumerate(zip(then, made_of, strict=True))
            if at != _TIMES
        )

    def make(
        self, schedule: Schedule, made_of: tuple[int, ...], held: set[int], *, beside: bool
    ) -> StreamPlan:
        """Makes the plan for a schedule.

        Args:
            schedule: The schedule.
            made_of: The present result of :meth:`made_of`.
            held: Blocks that are held while others are used.
            beside: Whether copies from DRAM run beside the compute, as on a GPU.
        """
        table = self._parts.table
        order = schedule.order[:_MOST_PLANNED]
        records = {block: table.get(block) for block in set(schedule.order)}
        loose = {block: r for block, r in records.items() if r is not None and not r.fixed}
        sizes = {block: align_up(record.block.nbytes) for block, record in loose.items()}
        compute = self._times.compute(schedule, order, self._load)
        fetch = {block: self._times.fetch(record, beside) for block, record in loose.items()}
        room = table.hbm.capacity - table.fixed_nbytes(now=True)
        plan = Plan(frozenset(), room)
        turn = 0
        if loose and all(r.block.role in READ_ONLY for r in loose.values()):
            plan = self._keep_steady(schedule, sizes, room, compute, fetch, held, beside)
        elif beside and (self._staying.kept or sum(sizes.values()) > room):
            plan = self._stay(order, loose, room)
            used = sum(sizes.get(b, 0) for b in order if b not in plan.residents)
            turn = max(1, int(_OF_A_TURN * len(order) * plan.reserve / max(1, used)))
        files = self._parts.mover is not None
        through = (
            files
            and beside
            and plan.in_dram is None
            and self._by_way_of_dram(order, sizes, plan, compute, fetch)
        )
        if not turn:
            for block in [b for b in fetch if b in (plan.in_dram or ())]:
                fetch[block] = self._times.from_dram(loose[block])
        inside = {block for block, record in loose.items() if record.usable}

        def due() -> Timetable:
            if turn:  # room alone decides
                return Timetable((), ())
            away = refetched(order, sizes, plan.residents, plan.reserve, inside)
            fetches = [
                fetch[b] if missing else None for b, missing in zip(order, away, strict=True)
            ]
            return Timetable(compute, fetches, margin=_MARGIN, latency=_LATENCY)

        ahead, largest = table.hbm.capacity // 2, largest_beside(sizes, plan.residents)
        if plan.residents and turn:
            ahead = plan.reserve // 2
        elif plan.residents and largest:  # beside the block in use, and one more
            ahead = plan.reserve - 2 * largest + 1
        key = schedule.passes[0][1] if schedule.passes else None
        foreseen = self._parts.pass_timer.estimates.can_foresee(timed(key, self._load))
        copies = 0.0 if turn else self._copies(sizes, room)
        known = [seconds for seconds in compute if seconds is not None]
        passes = len(compute) / max(1, schedule.first_length)
        computes = sum(known) / passes if known and len(known) == len(compute) else None
        return StreamPlan(
            made_of, plan, ahead, due, compute, through, turn, foreseen, copies, computes
        )

    def _copies(self, sizes: dict[int, int], room: int) -> float:
        """Returns the seconds of unpacked copies from DRAM in each pass."""
        return max(0, sum(sizes.values()) - room) / self._times.rate_up()

    def _stay(self, order: Sequence[int], loose: dict[int, Record], room: int) -> Plan:
        """Decides what stays in a loop that writes, once state has been used in it.

        Different parts of the loop are foreseen in its passes (a micro-batch without a step), and
        the residents must be the same in all of them. So they are chosen again only if there is
        more state, other room, a link that turns out to be faster, or if copies begin or cease to
        be the bottleneck. In the first steps, while memory is still being page-locked, the link is
        slow; residents chosen for that would leave the ring too little room.
        """
        table, rate, binds = self._parts.table, self._times.rate_up(), self.copies_bind
        state = {b: r for b, r in loose.items() if r.block.role in _STATE}
        before = self._staying
        other_room = before.known and not before.room <= room <= _FASTER * before.room
        is_faster = before.kept and rate > _FASTER * before.rate
        if other_room or is_faster or binds != before.copies_bind:
            before = Staying(rate=before.rate)
        known, kept = before.known, before.kept
        if not state.keys() <= known:
            sizes = {b: align_up(r.block.nbytes) for b, r in loose.items()}
            weights = {b: sizes[b] for b, r in loose.items() if r.block.role is Role.PARAM}
            own = {b: sizes[b] for b in state}
            window = window_of(sizes.values(), rate, copies_bind=binds)
            # units whose state stays are stepped in step(), as there are no copies to hide
            kept = choose_to_stay(order, weights, {} if binds else own, window, room)
            known = known | state.keys()
        kept = frozenset(b for b in kept if (r := table.get(b)) is not None and not r.fixed)
        self._staying = Staying(known, kept, room, max(rate, before.rate), binds)
        return Plan(kept, room - sum(align_up(table[b].block.nbytes) for b in kept))

    def _keep_steady(
        self,
        schedule: Schedule,
        sizes: dict[int, int],
        room: int,
        compute: Sequence[float | None],
        fetch: dict[int, tuple[str, float] | None],
        seen_held: set[int],
        beside: bool,
    ) -> Plan:
        """Decides what stays, with three kinds of blocks treated separately.

        Blocks that are held while others are used (parameters of an outer module) take their room
        anyway, so they stay. Experts that are chosen now and then do not stay; they get two slots.
        Blocks that most passes do not use (an encoder, in its decoder's passes) do not stay either.
        """
        if sum(sizes.values()) <= room:
            plan = self._share(schedule, sizes, room, compute, fetch, beside)
            return self._with_those_before(plan, sizes, room)
        held = seen_held & sizes.keys()
        if 2 * sum(map(sizes.__getitem__, held)) > room >= 2 * max(map(sizes.__getitem__, held)):
            held = set()  # one after the other, each while a few others are used
        if beside:
            held |= self._there_throughout(schedule, sizes, room)
            held |= self._lates.throughout(schedule.spans, sizes, room)
        unsteady = self._waste.unsteady() & sizes.keys() - held
        seldom = schedule.seldom & sizes.keys() - held - unsteady
        others = held | unsteady | seldom
        rest = {b: size for b, size in sizes.items() if b not in others}
        pinned = sum(sizes[block] for block in held)
        slots = 2 * max((sizes[block] for block in unsteady), default=0)
        free = max(0, room - pinned - slots)
        alone = not slots and pinned <= room // 2
        plan = Plan(frozenset(), free)
        if rest:
            plan = self._share(schedule, rest, free, compute, fetch, beside, alone=alone)
        slot = max([plan.slot, slots // 2, *(sizes[block] for block in seldom)])
        residents = plan.residents if pinned > room // 2 else plan.residents | held
        reserve = plan.reserve + slots + (pinned if pinned > room // 2 else 0)
        if seldom:  # they stream through the room that the others leave
            reserve = room - sum(map(sizes.__getitem__, residents))
        in_dram = None if unsteady else plan.in_dram  # what comes and goes needs DRAM as well
        parks = plan.parks and in_dram is not None
        return Plan(residents, reserve, slot, in_dram, parks)

    def _there_throughout(self, schedule: Schedule, sizes: dict[int, int], room: int) -> set[int]:
        """Returns the blocks that are in HBM for most of the time; the last result is cached."""
        order = schedule.order
        asked = tuple(order), tuple(map(sizes.get, order)), room
        if self._there[0] != asked:
            self._there = asked, there_throughout(order, sizes, room)
        return self._there[1]

    def _with_those_before(self, plan: Plan, sizes: dict[int, int], room: int) -> Plan:
        """Adds the present residents to a plan with which all stays, if all blocks fit.

        They may be used again later than is foreseen.
        """
        table = self._parts.table
        if not table.all_fit:
            return plan
        records = map(table.get, self._parts.evictor.residents - sizes.keys())
        before = {r.block.id: align_up(r.block.nbytes) for r in records if r and not r.fixed}
        if sum(before.values()) + sum(sizes.values()) > room:
            return plan
        return replace(plan, residents=plan.residents.union(before))

    def _share(
        self,
        schedule: Schedule,
        sizes: dict[int, int],
        room: int,
        compute: Sequence[float | None],
        fetch: dict[int, tuple[str, float] | None],
        beside: bool,
        *,
        alone: bool = False,
    ) -> Plan:
        """Decides what stays if a loop only reads; otherwise only the next use decides.

        The same blocks in another order keep their plan: residents that changed from pass to pass
        would not be residents. A loop whose times have changed also keeps its plan, unless another
        plan is much better.
        """
        known = [seconds for seconds in compute if seconds is not None]
        learned = self._parts.settings.prefetch_depth == "auto"
        learned = learned and len(known) == len(schedule) <= _MOST_STEPS and all(fetch.values())
        version = self._parts.pass_timer.estimates.version if learned else None
        files = any(found and found[0] == LINK_UP[Tier.NVME] for found in fetch.values())
        spare = self._times.spare() if beside and files else 0
        steady = alone and beside and not files and _goes_round(schedule)
        spans = schedule.round_over(sizes)
        # with a disk, every change needs reads, so other passes keep the plan
        way = steady, 0 if files else len(spans), self._lates.version
        alike = frozenset(sizes), room, version, way
        bound = None
        if beside and learned and not files and len(spans) == 1:
            computes = sum(known) * schedule.first_length / len(known)
            if self._copies(sizes, room) > _COPIES_BIND * computes:
                bound = alike[0], room, way
        if bound and self._in_force and self._bound == (bound, self._in_force[1]):
            # other times would lead to the same plan: the one that moves the fewest bytes
            self._waiting.discard(self._load)
            return self._in_force[1]
        before = plan = None
        spared = spare
        found = self._settled.pop(self._load, None)
        if found is not None:
            then, spared, settled = found
            if then[:2] == alike[:2] and self._fits(settled, sizes, spared, spare):
                before = settled if then[2] is not None and then[3] == alike[3] else None
                plan = settled if then == alike else None
        if not learned:
            plan = plan or self._unlearned(
                [block for block in schedule.order if block in sizes], sizes, room
            )
        else:
            loop = self._times.loop(schedule, spans, sizes, room, known, fetch, spare)
            loop = replace(loop, steady=steady)
            now = self._in_force
            other = now is not None and now[0] == alike[:2] and now[1] is not plan
            if now is not None and other and loop.slower.is_good(now[1]):
                plan = before = now[1]
            if plan is None:
                plan = share_hbm(loop, before)
                if plan is not before:
                    plan = self._nearer(loop if files else loop.slower, plan)
        self._settled[self._load] = alike, spared if plan is before else spare, plan
        if len(self._settled) > _MOST_LOADS:
            del self._settled[next(iter(self._settled))]
        if learned and not files:
            key = schedule.passes[0][1] if schedule.passes else None
            plan = self._worth_moving(loop.slower, plan, key)
            loop.keep_ways(plan)
        self._in_force = alike[:2], plan
        self._bound = bound and (bound, plan)
        return plan

    def _nearer(self, loop: Loop, plan: Plan) -> Plan:
        """Returns a plan that is as good and keeps the present residents as far as possible."""
        if self._in_force is None or not plan.residents:
            return plan
        before, room = self._in_force[1].residents, loop.room - plan.reserve
        lying = [(r.extent.offset, b) for b in loop.sizes if (r := self._parts.table[b]).extent]
        inside = [block for _, block in sorted(lying)]
        gone = [block for block in before & loop.sizes.keys() if block not in inside]
        # residents are behind the streaming blocks: blocks at the border change sides
        kept = [*gone, *(block for block in inside if block in before)]
        there = [block for block in reversed(inside) if block not in before]
        if loop.files is not None:
            kept = [block for block in kept if self._parts.table[block].usable]
            return nearer_from_disk(loop, plan, kept, there, [*self._parts.transfers.ahead.staged])
        order = [block for block in loop.order if block in loop.sizes]
        enough = _AS_GOOD * loop.seconds(plan)
        for near in (there, ()):
            stay = adjust_residents(kept, near, order, loop.sizes, room)
            other = replace(plan, residents=stay, slot=largest_beside(loop.sizes, stay))
            if loop.seconds(other) <= enough and loop.lays_out_as(other, plan):
                return other
        return plan

    def _worth_moving(self, loop: Loop, plan: Plan, key: object) -> Plan:
        """Returns a plan, or the one in force as long as changing it costs more than it saves.

        The pass may be the last of its kind. So the plan is changed once the time lost without the
        change equals its cost: then no other choice would have been much better.
        """
        self._waiting.discard(self._load)
        if self._in_force is None or self._in_force[0] != (frozenset(loop.sizes), loop.room):
            return plan
        now = self._in_force[1]
        if plan == now or not loop.order:
            return plan
        coming = plan.residents - now.residents
        passes = len(loop.order) / loop.length * len(loop.begins)
        saved = (loop.seconds(now) - loop.seconds(plan)) / passes
        if not loop.lays_out_as(now, plan):
            saved = max(saved, _DECIDED * loop.seconds(plan) / passes)
        if _only_waits_less(loop, now, plan) and saved < _MUCH * loop.seconds(now) / passes:
            # measuring takes host time, which counts as compute: the times of passes that are not
            # measured show whether there is as much to save
            estimates, name = self._parts.pass_timer.estimates, timed(key, self._load)
            took = estimates.longest(name)
            if took is None:
                if estimates.sure(name):  # else another plan is made after measurements
                    self._waiting.add(self._load)
                return now
            saved = min(saved, took - loop.seconds(plan) / passes)
        if saved <= _NOTHING * loop.seconds(now) / passes:
            return now
        if self._run * saved >= sum(loop.transfer[block] for block in coming):
            return plan
        self._waiting.add(self._load)
        return now

    @staticmethod
    def _fits(plan: Plan, sizes: dict[int, int], then: int, now: int) -> bool:
        """Whether a plan for ``then`` bytes of spare DRAM also fits ``now`` bytes.

        Small changes from pass to pass are not worth another plan.
        """
        kept = plan.in_dram or frozenset()
        needed = sum(sizes.get(block, 0) for block in kept)
        return needed <= now <= _MORE_DRAM * then

    def _unlearned(self, order: Sequence[int], sizes: dict[int, int], room: int) -> Plan:
        """Returns a plan for unknown times."""
        depth = self._parts.settings.prefetch_depth
        if depth == "auto":
            streaming = max(sum(sorted(sizes.values())[-3:]), self._least)
        else:
            streaming = sum(sorted(sizes.values())[-(depth + 1) :])
        everything = sum(sizes.values()) <= room
        kept = choose_residents(order, sizes, room if everything else room - streaming)
        return Plan(kept, streaming, largest_beside(sizes, kept))

    def _by_way_of_dram(
        self,
        order: Sequence[int],
        sizes: dict[int, int],
        plan: Plan,
        compute: Sequence[float | None],
        fetch: dict[int, tuple[str, float] | None],
    ) -> bool:
        """Whether blocks are read from files through DRAM, if no plan divides the spare DRAM.

        Through DRAM, the disk never has to wait for the compute. But if the disk is the bottleneck
        anyway, it reads faster into a few staging chunks, unless DRAM can hold all streaming blocks
        so that they are not read again.
        """
        spare = self._times.spare()
        if spare < 3 * largest_beside(sizes, ()):
            return False
        room = plan.reserve + spare
        known = [seconds for seconds in compute if seconds is not None]
        there = self._parts.table.hbm.capacity + spare
        if len(known) == len(compute) and sum(sizes.values()) > there:
            inside = sizes.keys()  # what is read once is no part of the loop
            missing = refetched(order, sizes, plan.residents, room, inside)
            found = [fetch[b] for b, away in zip(order, missing, strict=True) if away]
            disk = sum(f[1] for f in found if f is not None and f[0] == LINK_UP[Tier.NVME])
            stay = _STAY if self._through_dram else 1 / _STAY
            self._through_dram = disk <= stay * sum(known)
        else:
            self._through_dram = True
        return self._through_dram


def _only_waits_less(loop: Loop, now: Plan, plan: Plan) -> bool:
    """Whether a plan only saves waits: it does not move fewer bytes, in rounds of one pass."""
    before, after = loop.by_laps(now), loop.by_laps(plan)
    if len(loop.begins) > 1 or before is None or after is None:
        return False
    return after.moved >= before.moved


def _goes_round(schedule: Schedule) -> bool:
    """Whether the same blocks are used in the same order pass for pass, each once.

    A pass may have no uses: a step whose blocks were all stepped in backward.
    """
    order, length = schedule.order, schedule.first_length
    if not length or len(order) < 2 * length or len(order) % length:
        return False
    if len(set(order[:length])) != length:
        return False
    return all(block == order[at % length] for at, block in enumerate(order))
