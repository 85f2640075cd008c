"""How HBM, and DRAM to spare, are shared between what stays of a loop and what streams. Pure.

Plans of every kind are tried against a model of the links, or of the whole machine where some of
the blocks come from a disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from tiermem.core import fromdisk
from tiermem.core.cost import refetched, streaming_time
from tiermem.core.laps import LaidOut, Ways, lay_out
from tiermem.core.residents import choose_residents, keep_largest
from tiermem.core.rounds import Round, host_seconds
from tiermem.core.slots import one_ahead_time

_SLOTS = (2, 3, 4, 6, 8, 12, 16)
_SLOTS_LAID_OUT = (2, 3, 4)
"""The same where rounds are laid out, and the model of them leaves nothing out."""
_SLOTS_SEVERAL = (2, 3, 4, 6, 8)
"""The same in rounds of several passes, one of which may hold some slots longer."""
_AS_GOOD = 1.002
_FORGIVING = 4
"""Slots that are room enough for what the model of the links does not know."""
_SEVERAL = 3
"""With fewer slots than these, one block is in use and one ahead, however small they are."""
_SLOWER = 1.1
"""Factor on compute times: where compute takes about as long as the copies, the model knows too
little of how room comes free to tell which of them delays each block."""
_WORTH_IT = 1.02
"""A plan in force is replaced if it is slower than the best one by this factor."""
_MOST_TRIED = 5
_WORTH_TRYING = 1.005
"""Factor over the least that a plan may come to, where the others are not tried."""
_WORTH_TRYING_SEVERAL = 1.03
"""The same in rounds of several passes."""
_MORE_MOVED = 1.05
"""Factor over the least that moves: kernels are slower beside copies, if they wait for none."""
_WORTH_IT_LAID_OUT = 1.01
"""As ``_WORTH_IT``, over the least that any plan comes to, so that no other has to be tried."""
_AT_ENDS = (0, 1, 2)
"""Numbers of blocks tried, at either end of a loop that turns, to be read before any other."""
_WAITED = 1.02
"""A loop that takes this many times its compute counts as waiting for its disk."""
_MOST_PLAYED = 512
"""Uses in a round up to which all plans are played that there may be; else a few."""
_COMMON = (0.9, 0.75)
_MOST_PAIRED = 4
"""Of so many sizes two are taken, one of which streams one by one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How HBM, and spare DRAM, are shared between blocks that stay and blocks that stream.

    Attributes:
        residents: Blocks that stay in HBM.
        reserve: Bytes of HBM through which the others stream, in use or fetched ahead.
        slot: Bytes of the pieces that reserve is used in; 0 where nothing streams through it.
        in_dram: Blocks whose home is a file and of which a copy stays in DRAM; None where the
            plan says nothing of DRAM.
        parks: Whether a disk begins with the next block that it reads straight into HBM before
            that has room there.
    """

    residents: frozenset[int]
    reserve: int
    slot: int = 0
    in_dram: frozenset[int] | None = None
    parks: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """The disk's times and spare DRAM, for blocks whose home is a file.

    Attributes:
        seconds: Seconds that a disk takes for a block, by id.
        room: Bytes of DRAM to spare.
        staging: Bytes of the chunks through which it reads straight into HBM.
    """

    seconds: Mapping[int, float]
    room: int
    staging: int


def largest_beside(sizes: Mapping[int, int], kept: Collection[int]) -> int:
    """Returns the bytes of the largest block that is not kept; 0 where there is none."""
    return max((size for block, size in sizes.items() if block not in kept), default=0)


def occupied(size: int, slot: int) -> int:
    """Returns the bytes a block takes up of slots that hold whole blocks only.

    Args:
        size: Of the block.
        slot: Of a slot, at least as large.
    """
    return slot // (slot // size)


@dataclass(frozen=True)
class Loop:
    """A loop that only reads, and what it has to do with.

    Attributes:
        order: Ids of blocks in order of use, a few rounds.
        sizes: Bytes by id.
        room: Bytes of HBM for these blocks.
        compute: Seconds of each use.
        transfer: Seconds a block takes to arrive, by id: from DRAM, where its home is a file.
        latency: Seconds between a slot coming free and the next copy into it.
        files: Of the blocks whose homes are files.
        steady: Whether the same blocks are used in the same order, each once a round.
        laid_out: Whether its rounds are laid out beforehand (:mod:`tiermem.core.laps`).
        begins: Where the passes of a round begin in the order.
        lags: Of each, how many further blocks are used before one is let go.
        ways: The ways to lay such a loop out, whatever its times are, by what stays.
    """

    order: Sequence[int]
    sizes: Mapping[int, int]
    room: int
    compute: Sequence[float]
    transfer: Mapping[int, float]
    latency: float
    files: Files | None = None
    steady: bool = False
    laid_out: bool = False
    begins: Sequence[int] = (0,)
    lags: Sequence[int] = (0,)
    ways: dict[frozenset[int], Ways] = field(default_factory=dict)

    @cached_property
    def _by_residents(self) -> dict[frozenset[int], LaidOut | None]:
        """Layouts that were found for what stays; None where that cannot be laid out."""
        return {}

    @cached_property
    def length(self) -> int:
        """Uses in a round."""
        return _period(self.order)

    @cached_property
    def _passes(self) -> list[tuple[int, int]]:
        """Where each pass of a round begins and ends."""
        begins = [begin for begin in self.begins if begin < self.length]
        return list(pairwise([*begins, self.length]))

    @property
    def _host(self) -> float:
        """Seconds of the host until it has entered the last use of a round."""
        return host_seconds(self.length + len(self._passes) - 2)

    @cached_property
    def slower(self) -> Loop:
        """The loop by which plans are compared: its compute takes somewhat longer."""
        return replace(self, compute=[_SLOWER * seconds for seconds in self.compute])

    def seconds(self, plan: Plan) -> float:
        """Returns how long it takes with a plan, by a model of the links."""
        if self.files is not None:
            return self.from_disk(plan, self.files)[0]
        order, sizes, kept = self.order, self.sizes, plan.residents
        out = self.by_laps(plan)
        if out is not None:
            return out.seconds * len(order) / self.length
        slot = largest_beside(sizes, kept) or 1
        taken = {b: s if b in kept else occupied(s, slot) for b, s in sizes.items()}
        if self.steady and sum(s for b, s in taken.items() if b not in kept) > plan.reserve:
            found = self._all_anew(plan, taken)
            return max(found, self.one_by_one(plan)) if self.by_twos(plan) else found
        # a block that stays is fetched once, whichever plan it is: left out of the comparison
        fetched = refetched(order, taken, kept, plan.reserve, kept)
        arrive = [self.transfer[b] if f else 0.0 for b, f in zip(order, fetched, strict=True)]
        streamed = [taken[b] if f else 0 for b, f in zip(order, fetched, strict=True)]
        found = streaming_time(self.compute, arrive, streamed, plan.reserve, self.latency)
        if plan.reserve >= _SEVERAL * plan.slot:
            return found
        # its small blocks share a slot, which two slots of whole blocks have none to give for
        if self.steady:
            return max(found, self.one_by_one(plan))
        return max(found, one_ahead_time(fetched, self.compute, arrive, self.latency))

    def by_laps(self, plan: Plan) -> LaidOut | None:
        """Returns how its rounds are laid out with a plan; None where they cannot be."""
        kept = plan.residents
        if not self.laid_out or not self._has_copies(plan):
            return None
        if kept not in self._by_residents:
            order, compute, _ = self._round()
            ways = self.ways.pop(kept, None)
            if ways is None:
                one = Round([end - begin for begin, end in self._passes], self.lags)
                streams = {block: s for block, s in self.sizes.items() if block not in kept}
                room = self.room - sum(self.sizes.values()) + sum(streams.values())
                ways = Ways(order, one, streams, [(0, room)])
            self.ways[kept] = ways
            out = lay_out(ways, compute, self.transfer, self.latency)
            self._by_residents[kept] = out
        return self._by_residents[kept]

    def _has_copies(self, plan: Plan) -> bool:
        """Whether all that streams from files with a plan has copies in DRAM, so is not read."""
        if self.files is None:
            return True
        copies = plan.in_dram or frozenset()
        if sum(self.sizes.get(block, 0) for block in copies) > self.files.room:
            return False
        return self.files.seconds.keys() & self.sizes.keys() <= plan.residents | copies

    def lays_out_as(self, plan: Plan, other: Plan) -> bool:
        """Whether rounds are laid out with a plan if they are with another one.

        Where they are not, :meth:`seconds` goes by a model that leaves more out.
        """
        return self.by_laps(plan) is not None or self.by_laps(other) is None

    def is_good(self, plan: Plan) -> bool:
        """Whether no plan for rounds that are laid out would be much better than one.

        They wait for nothing but the busiest of link, compute and host, once the first block that
        streams has been used, and move hardly more than with any other.
        """
        out = self.by_laps(plan)
        if out is None:
            return False
        streams = [s for block, s in self.sizes.items() if block not in plan.residents]
        passes = self._busy(self.sizes, self.room - sum(sorted(streams)[-2:]))
        moves = sum(copies for copies, _ in passes)
        begin = sum(self.compute[: out.visits[0].first + 1])
        least = max(sum(map(max, passes)), self._host)
        enough = _WORTH_IT_LAID_OUT * least + begin
        return out.seconds <= enough and out.moved <= _MORE_MOVED * moves

    def _busy(self, blocks: Collection[int], room: int) -> list[tuple[float, float]]:
        """Returns the seconds of copies, and of compute, in each pass of a round.

        Args:
            blocks: What is copied up, but for what is there as the pass begins.
            room: Bytes of that.
        """
        found = []
        for begin, end in self._passes:
            used = set(self.order[begin:end]).intersection(blocks)
            nbytes = sum(map(self.sizes.__getitem__, used))
            copies = sum(map(self.transfer.__getitem__, used))
            left = copies * max(0.0, 1.0 - room / max(1, nbytes))
            found.append((left, sum(self.compute[begin:end])))
        return found

    def _all_anew(self, plan: Plan, taken: Mapping[int, int]) -> float:
        """Returns how long rounds take in which each block is used once and stays or is fetched."""
        kept = plan.residents
        arrive = {b: 0.0 if b in kept else s for b, s in self.transfer.items()}
        streamed = {b: 0 if b in kept else s for b, s in taken.items()}
        return streaming_time(
            self.compute,
            list(map(arrive.__getitem__, self.order)),
            list(map(streamed.__getitem__, self.order)),
            plan.reserve,
            self.latency,
        )

    def at_least(self, plan: Plan) -> float:
        """Returns a lower bound of the seconds, where each block is used once in each pass."""
        streams = self.sizes.keys() - plan.residents
        passes = self._busy(streams, plan.reserve if len(self._passes) > 1 else 0)
        host = self._host if self.laid_out else 0.0
        return max(sum(map(max, passes)), host) * len(self.order) / self.length

    def from_disk(self, plan: Plan, files: Files) -> tuple[float, float]:
        """Returns how long it takes with a plan for blocks from files, and the disk of it.

        It is played with all that HBM and DRAM keep from one use of a block to the next.
        """
        order = self.order[: self.length]
        compute = self.compute[: self.length]
        slot = largest_beside(self.sizes, plan.residents) or 1
        taken = {b: occupied(s, slot) for b, s in self.sizes.items() if b not in plan.residents}
        there = plan.in_dram or frozenset()
        reads = {b: s for b, s in files.seconds.items() if b in taken and b not in there}
        one = fromdisk.Round(
            order,
            compute,
            taken,
            self.transfer,
            reads,
            plan.reserve,
            files.staging,
            self.latency,
            plan.parks,
        )
        rounds = len(self.order) / len(order)
        seconds, busy = fromdisk.play(one)
        return rounds * seconds, rounds * busy

    def one_by_one(self, plan: Plan) -> float:
        """Returns how long it takes with a plan of two slots, one block in use and one ahead.

        That is what two slots come to. The model of room has small blocks share one, and takes
        place for free as soon as it is.
        """
        order, compute, fetch = self._round()
        moves = [block not in plan.residents for block in order]
        one = one_ahead_time(moves, compute, fetch, self.latency)
        return one * len(self.order) / len(order)

    def by_twos(self, plan: Plan) -> bool:
        """Whether a plan has one block in use and one ahead, in rounds that are alike."""
        return self.steady and plan.reserve < _SEVERAL * plan.slot

    def _round(self) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
        """Returns one round's blocks, their compute, and how long each takes to arrive."""
        order = self.order[: self.length]
        return order, self.compute[: self.length], [self.transfer[block] for block in order]


def share_hbm(loop: Loop, settled: Plan | None = None) -> Plan:
    """Chooses how much HBM to stream through, and keeps blocks in the rest.

    What the stream needs depends on the times: where compute is long, two slots hide
    everything; where the link decides, more slots keep it busy while a resident computes, but
    each costs bytes that could have stayed. So reserves of a few blocks are tried against a
    model of the link. Where the link decides they differ. Where it does not, some room forgives
    what the model does not know, and more than that costs: kernels are slower beside copies (by
    3% at 12 slots, by 1% at 4, where copies took 0.9 of the time of 8,192 tokens). So of those
    within 0.2% of the fastest the smallest with four slots is taken, or else the largest.

    DRAM that is to spare holds copies of blocks from files, which are not read again; the rest is
    read straight into HBM. Of plans that are as good the one that reads least is taken: a disk is
    shared, and its speed is not the same from day to day.

    Args:
        loop: What it is for.
        settled: The plan in force; it stays unless another one is much faster.
    """
    sizes, room = loop.sizes, loop.room
    if sum(sizes.values()) <= room:
        return Plan(frozenset(sizes), 0, 0, frozenset() if loop.files else None)
    if loop.files is not None:
        return _all_in_dram(loop, loop.files, settled) or _share_from_disk(
            loop, loop.files, settled
        )
    loop = loop.slower
    if loop.laid_out:
        plan = _share_laid_out(loop, settled)
        if plan is not None:
            return plan
    found: list[tuple[float, Plan]] = []
    best = math.inf
    for plan in _plans(loop, _SLOTS):
        if loop.steady and loop.at_least(plan) > best * _AS_GOOD:
            continue  # it moves too much, however well
        found.append((loop.seconds(plan), plan))
        best = min(best, found[-1][0])
    if settled is not None and loop.seconds(settled) <= best * _WORTH_IT:
        return settled
    good = [plan for seconds, plan in found if seconds <= best * _AS_GOOD]
    good.sort(key=lambda plan: plan.reserve)
    roomy = [plan for plan in good if plan.reserve >= _FORGIVING * plan.slot]
    return roomy[0] if roomy else good[-1]


def _share_laid_out(loop: Loop, settled: Plan | None) -> Plan | None:
    """Chooses a plan for rounds that are laid out; None where they cannot be with any.

    The one that may be the fastest is tried first: it moves the least, and of those that all take
    the compute's time it has the most room. No other is tried once none can be much better.
    """
    several = len(loop.begins) > 1  # as much moves however much stays
    plans = [*_plans(loop, _SLOTS_SEVERAL if several else _SLOTS_LAID_OUT)]
    plans += _large_one_by_one(loop)
    roomy = _FORGIVING + max(loop.lags)
    plans.sort(key=lambda plan: (loop.at_least(plan), -min(plan.reserve // plan.slot, roomy)))
    enough = _WORTH_TRYING_SEVERAL if several else _WORTH_TRYING
    best: Plan | None = None
    fastest, tried = math.inf, 0
    for plan in plans:
        least = loop.at_least(plan)
        if least > fastest / _AS_GOOD or tried == _MOST_TRIED:
            break
        if loop.by_laps(plan) is None:
            continue
        tried += 1
        seconds = loop.seconds(plan)
        if seconds < fastest:
            best, fastest = plan, seconds
        if fastest <= enough * least or (not several and best is plan and loop.is_good(plan)):
            break
    if settled is not None and loop.by_laps(settled) is not None:
        return settled if loop.seconds(settled) <= fastest * _WORTH_IT else best
    return best


def _large_one_by_one(loop: Loop) -> Iterator[Plan]:
    """Yields plans by which large blocks stream one at a time, and small ones by twos."""
    for pinned in _oversize(loop.sizes, loop.room):
        rest = {block: size for block, size in loop.sizes.items() if block not in pinned}
        free = loop.room - sum(loop.sizes[block] for block in pinned)
        yield from _by_classes(loop.order, rest, free, pinned)


def _all_in_dram(loop: Loop, files: Files, settled: Plan | None) -> Plan | None:
    """Returns the plan for weights at home in DRAM, where that has room for all that streams.

    None where it has not. Everything is read once then, and the disk is no part of the loop.
    """
    plan = share_hbm(replace(loop, files=None), settled)
    rest = frozenset(files.seconds) & loop.sizes.keys() - plan.residents
    if sum(loop.sizes[block] for block in rest) > files.room:
        return None
    found = replace(plan, in_dram=rest, parks=False)
    return settled if found == settled else found


def _share_from_disk(loop: Loop, files: Files, settled: Plan | None) -> Plan:
    """Chooses a plan for a loop some of whose blocks have files for homes."""
    all_of_them = loop.length <= _MOST_PLAYED
    turns = loop.length > len(set(loop.order))
    found = []
    for count in _AT_ENDS if turns and all_of_them else _AT_ENDS[:1]:
        away = _at_ends(loop, files, count)
        for plan in _plans(loop, _SLOTS if all_of_them else _SLOTS[:3], away):
            below = _with_copies(plan, loop, files, away)
            seconds, busy = loop.from_disk(below, files)
            found.append((seconds, busy, below))
            # a loop that turns has not been seen to gain from it on a device
            if not turns and seconds > _WAITED * sum(loop.compute):
                parks = replace(below, parks=True)
                found.append((*loop.from_disk(parks, files), parks))
    best = min(seconds for seconds, _, _ in found)
    if settled is not None and loop.seconds(settled) <= best * _WORTH_IT:
        return settled
    good = [entry for entry in found if entry[0] <= best * _AS_GOOD]
    return min(good, key=lambda entry: (entry[1], entry[2].reserve))[2]


def _plans(
    loop: Loop, counts: Sequence[int], away: Collection[int] = frozenset()
) -> Iterator[Plan]:
    """Yields what may stay in HBM, for reserves of so many blocks.

    Args:
        loop: What it is for.
        counts: Of how many blocks.
        away: Blocks that do not stay.
    """
    order, sizes, room = loop.order, loop.sizes, loop.room
    most = room if loop.laid_out and len(loop.begins) > 1 else room // 2
    for pinned in _oversize(sizes, room):
        pinned -= frozenset(away)
        rest = {block: size for block, size in sizes.items() if block not in pinned}
        largest = sorted(rest.values(), reverse=True)
        free = room - sum(sizes[block] for block in pinned)
        near = [block for block in order if block in rest and block not in away]
        for slots in counts:
            reserve = min(free, sum(largest[:slots]))
            if slots > counts[0] and reserve > most:
                break
            kept = choose_residents(near, rest, free - reserve) | pinned
            yield Plan(kept, reserve, largest_beside(sizes, kept))


def _at_ends(loop: Loop, files: Files, count: int) -> frozenset[int]:
    """Returns large blocks from files that are used first and last in a loop that turns.

    Forward and then backward, those come again at once where the loop turns, and then not for
    nearly a whole round. So they are read once a round, with most of it to read them in. Those in
    the middle come twice a round.
    """
    sizes = {block: loop.sizes[block] for block in files.seconds if block in loop.sizes}
    largest = max(sizes.values(), default=0)
    alike = [b for b in dict.fromkeys(loop.order) if sizes.get(b) == largest]
    return frozenset([*alike[:count], *alike[len(alike) - count :]]) if count else frozenset()


def _period(order: Sequence[int]) -> int:
    """Returns after how many uses an order begins anew; all of them where it does not.

    By the failure function of Knuth, Morris and Pratt: what is left of the order when its longest
    border is taken away.
    """
    border = [0] * len(order)
    matched = 0
    for at in range(1, len(order)):
        while matched and order[at] != order[matched]:
            matched = border[matched - 1]
        if order[at] == order[matched]:
            matched += 1
        border[at] = matched
    return len(order) - (border[-1] if border else 0)


def _by_classes(
    order: Sequence[int], sizes: Mapping[int, int], room: int, pinned: frozenset[int]
) -> Iterator[Plan]:
    """Yields plans by which large blocks stay or stream one at a time, and small ones by twos.

    Two slots as large as the largest block are room that could keep another one. Where small
    blocks stream between the large ones, their copies give each of those the time to be used up.
    """
    passing = [block for block in order if block in sizes]
    classes = _classes(sizes)
    for number, large in enumerate(classes):
        for small in classes[number + 1 :]:
            reserve = large + 2 * small
            some = keep_largest(passing, sizes, room - reserve, large)
            if largest_beside(sizes, some) == large:
                yield Plan(some | pinned, reserve, large)


def _classes(sizes: Mapping[int, int]) -> list[int]:
    """Returns the sizes that most of the bytes are in, the largest first."""
    nbytes: Counter[int] = Counter()
    for size in sizes.values():
        nbytes[size] += size
    return sorted((size for size, _ in nbytes.most_common(_MOST_PAIRED)), reverse=True)


def _with_copies(plan: Plan, loop: Loop, files: Files, away: Collection[int] = frozenset()) -> Plan:
    """Returns a plan with copies in DRAM of as many of its blocks as fit, those away last."""
    sizes = loop.sizes
    rest = {b: sizes[b] for b in files.seconds if b in sizes and b not in plan.residents}
    near = [block for block in loop.order if block in rest and block not in away]
    return replace(plan, in_dram=choose_residents(near, rest, files.room))


def _oversize(sizes: Mapping[int, int], room: int) -> list[frozenset[int]]:
    """Returns sets of blocks to keep in any case: none, and those far larger than the others.

    A slot for an embedding is room that several layers could have.
    """
    total = sum(sizes.values())
    found = [frozenset[int]()]
    for share in _COMMON:
        common = passed = 0
        for size in sorted(sizes.values()):
            passed += size
            common = size
            if passed >= total * share:
                break
        large = frozenset(block for block, size in sizes.items() if size > common)
        fits = sum(sizes[block] for block in large) + common * _SLOTS[0] <= room
        if fits and large not in found:
            found.append(large)
    return found
