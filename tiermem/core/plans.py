"""Divides HBM and spare DRAM between the blocks of a loop that stay and those that stream. Pure.

Plans of every kind are compared with a model of the links, or of the whole machine if some of the
blocks are read from a disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tiermem.core.loops import Files, Loop, Plan, largest_beside
from tiermem.core.residents import choose_residents, keep_largest

_SLOTS = (2, 3, 4, 6, 8, 12, 16)
_SLOTS_LAID_OUT = (2, 3, 4)
"""The same if rounds are laid out, for which the model is complete."""
_SLOTS_SEVERAL = (2, 3, 4, 6, 8)
"""The same in rounds of several passes, one of which may hold some slots longer."""
_AS_GOOD = 1.002
_FORGIVING = 4
"""Slots that leave enough room for what the model of the links leaves out."""
_WORTH_IT = 1.02
"""A plan in force is replaced if it is slower than the best one by this factor."""
_MOST_TRIED = 5
_MOST_TRIED_SEVERAL = 2
"""The same in rounds of several passes, in which the bytes moved do not depend on what stays."""
_MOST_TRIED_AGAIN = 2
"""The same if a plan is in force already, and only the times have changed."""
_WORTH_TRYING = 1.005
"""If a plan takes at most this many times the least possible, the others are not tried."""
_WORTH_TRYING_SEVERAL = 1.03
"""The same in rounds of several passes."""
_AT_ENDS = (0, 1, 2)
"""Numbers of blocks, at either end of a loop that goes back and forth, that are tried as the first
ones to be read from the disk instead of staying."""
_WAITED = 1.02
"""A loop that takes this many times its compute counts as waiting for its disk."""
_MOST_PLAYED = 512
"""Uses in a round up to which all plans are simulated; with more, only a few."""
_COMMON = (0.9, 0.75)
_MOST_PAIRED = 4
"""Of this many sizes, pairs are tried, one size of which streams one by one."""


def share_hbm(loop: Loop, settled: Plan | None = None) -> Plan:
    """Chooses how much HBM blocks stream through, and keeps blocks in the rest.

    How much is needed depends on the times. If compute is long, two slots hide all copies. If the
    link is the bottleneck, more slots keep it busy while resident blocks compute, but each takes
    bytes that could have stayed. So reserves of a few blocks are compared by a model of the link.
    If the link is the bottleneck, they differ. If it is not, some more room makes up for what the
    model leaves out, but too much costs time: kernels are slower beside copies (by 3% with 12
    slots, by 1% with 4, when copies took 0.9 of the time of 8,192 tokens). So of the plans within
    0.2% of the fastest, the smallest with four slots is chosen, or else the largest.

    Spare DRAM holds copies of blocks from files, which are then not read again; the others are read
    straight into HBM. Of equally good plans, the one that reads least is chosen: a disk is shared,
    and its speed varies from day to day.

    Args:
        loop: The loop.
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
    """Chooses a plan for rounds that are laid out; None if there is no layout with any plan.

    The plan with the best lower bound is tried first: it moves the fewest bytes, and of plans that
    are bound by compute it has the most room. Once no other plan can be much better, none is tried.
    """
    several = len(loop.begins) > 1  # then the bytes moved do not depend on what stays
    if settled is not None and not several and loop.is_good(settled, _WORTH_IT):
        return settled
    plans = [*_plans(loop, _SLOTS_SEVERAL if several else _SLOTS_LAID_OUT)]
    if any(loop.further) and all(loop.by_laps(plan) is None for plan in plans):
        plans = [*_plans(loop, _SLOTS)]  # blocks that are held for long need more slots
    plans += _large_one_by_one(loop)
    plans += () if several else _large_alone(loop)
    roomy = _FORGIVING + max(loop.lags)

    def rank(plan: Plan) -> tuple[float, int]:
        slots = plan.reserve // plan.slot
        return float(f"{loop.at_least(plan):.9g}"), -min(slots, roomy)  # sums differ in last digits

    plans.sort(key=rank)
    enough = _WORTH_TRYING_SEVERAL if several else _WORTH_TRYING
    best: Plan | None = None
    fastest, tried = math.inf, 0
    most = _MOST_TRIED_AGAIN if settled is not None else _MOST_TRIED
    most = _MOST_TRIED_SEVERAL if several else most
    for plan in plans:
        least = loop.at_least(plan)
        if least > fastest / _AS_GOOD or tried == most:
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
    """Yields plans in which large blocks stream one at a time, and small ones two at a time."""
    for pinned in _oversize(loop.sizes, loop.room):
        rest = {block: size for block, size in loop.sizes.items() if block not in pinned}
        free = loop.room - sum(loop.sizes[block] for block in pinned)
        yield from _by_classes(loop.order, rest, free, pinned)


def _large_alone(loop: Loop) -> Iterator[Plan]:
    """Yields plans in which only the largest blocks stream, and all others stay.

    Small blocks that stream, too, would take slots of the size of the largest.
    """
    sizes, largest = loop.sizes, max(loop.sizes.values())
    small = frozenset(block for block, size in sizes.items() if size < largest)
    large = {block: largest for block in sizes if block not in small}
    free = loop.room - sum(map(sizes.__getitem__, small))
    for slots in _SLOTS_LAID_OUT[:2]:
        reserve = slots * largest
        if small and len(large) > slots and reserve <= free:
            kept = choose_residents(
                [block for block in loop.order if block in large], large, free - reserve
            )
            yield Plan(kept | small, reserve, largest)


def _all_in_dram(loop: Loop, files: Files, settled: Plan | None) -> Plan | None:
    """Returns the plan for homes in DRAM, if spare DRAM has room for all streaming blocks.

    Then everything is read once, and the disk is not used in the loop. None if there is no room.
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
            # on a device, loops that go back and forth have not been seen to gain from it
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
    """Yields plans with reserves of some numbers of slots.

    Args:
        loop: The loop.
        counts: The numbers of slots.
        away: Blocks that do not stay.
    """
    order, sizes, room = loop.order, loop.sizes, loop.room
    late = len(loop.begins) > 1 or any(loop.further)  # some slots are held longer
    most = room if loop.laid_out and late else room // 2
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
    """Returns large blocks from files that are used first and last in a loop back and forth.

    In forward and then backward, these blocks are used twice in a row where the direction changes,
    and then not for nearly a whole round. So they are read once per round, and there is much time
    for it. Blocks in the middle are read twice per round.
    """
    sizes = {block: loop.sizes[block] for block in files.seconds if block in loop.sizes}
    largest = max(sizes.values(), default=0)
    alike = [b for b in dict.fromkeys(loop.order) if sizes.get(b) == largest]
    return frozenset([*alike[:count], *alike[len(alike) - count :]]) if count else frozenset()


def _by_classes(
    order: Sequence[int], sizes: Mapping[int, int], room: int, pinned: frozenset[int]
) -> Iterator[Plan]:
    """Yields plans in which large blocks stay or stream one at a time, and small ones in pairs.

    The second of two slots as large as the largest block could keep another block instead. If small
    blocks stream between the large ones, a large one is no longer in use when the next is fetched.
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
    """Returns the sizes of the blocks that most bytes are in, the largest first."""
    nbytes: Counter[int] = Counter()
    for size in sizes.values():
        nbytes[size] += size
    return sorted((size for size, _ in nbytes.most_common(_MOST_PAIRED)), reverse=True)


def _with_copies(plan: Plan, loop: Loop, files: Files, away: Collection[int] = frozenset()) -> Plan:
    """Returns a plan with copies in DRAM of as many of its blocks as fit, ``away`` ones last."""
    sizes = loop.sizes
    rest = {b: sizes[b] for b in files.seconds if b in sizes and b not in plan.residents}
    near = [block for block in loop.order if block in rest and block not in away]
    return replace(plan, in_dram=choose_residents(near, rest, files.room))


def _oversize(sizes: Mapping[int, int], room: int) -> list[frozenset[int]]:
    """Returns sets of blocks to keep in any case: none, and those far larger than the others.

    A slot for an embedding takes the room of several layers.
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
