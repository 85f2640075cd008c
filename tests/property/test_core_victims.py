"""The queue of victims and the windows around them, against naive searches."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.allocator import Allocator
from tiermem.core.schedule import NEVER, Schedule
from tiermem.core.victims import NextUseQueue

_UNIT = 4096


def _naive_next(order: list[int], block: int, cursor: int) -> int:
    for position in range(cursor, len(order)):
        if order[position] == block:
            return position
    return NEVER


@given(
    order=st.lists(st.integers(0, 9), max_size=60),
    inside=st.sets(st.integers(0, 9)),
    refused=st.sets(st.integers(0, 9), max_size=4),
    most=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_the_last_needed_come_first(
    order: list[int], inside: set[int], refused: set[int], most: int, seed: int
) -> None:
    rng = random.Random(seed)
    schedule = Schedule(order)
    queue = NextUseQueue()
    queue.rebuild(schedule, 0, sorted(inside))
    cursor = 0
    while cursor <= len(order):
        uses = {b: _naive_next(order, b, cursor) for b in inside}
        wanted = sorted((uses[b] for b in inside - refused), reverse=True)[:most]
        found = queue.last(most, -1, lambda b: b in inside and b not in refused)
        assert [uses[b] for b in found] == wanted
        assert len(set(found)) == len(found)
        if cursor == len(order):
            break
        used = order[cursor]
        cursor += 1
        inside.add(used)
        queue.put(used, cursor)
        if rng.random() < 0.2:
            gone = rng.choice(sorted(inside))
            inside.discard(gone)
            queue.remove(gone)
        inside.discard(used) if rng.random() < 0.1 else None
        if used not in inside:
            queue.remove(used)


@given(
    order=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    beyond=st.integers(-1, 30),
)
def test_nothing_needed_sooner_is_offered(order: list[int], beyond: int) -> None:
    queue = NextUseQueue()
    queue.rebuild(Schedule(order), 0, range(10))
    for block in queue.last(10, beyond, lambda _: True):
        assert _naive_next(order, block, 0) > beyond


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    freed=st.sets(st.integers(0, 11)),
    stay=st.sets(st.integers(0, 11)),
    target=st.integers(0, 11),
    wanted=st.integers(1, 12),
)
def test_a_window_around_an_extent(
    sizes: list[int], freed: set[int], stay: set[int], target: int, wanted: int
) -> None:
    allocator = Allocator(sum(sizes) * _UNIT)
    extents = [allocator.allocate(size * _UNIT) for size in sizes]
    for index in freed:
        if index < len(extents):
            allocator.free(extents[index])
    left = {i: e for i, e in enumerate(extents) if i not in freed}
    prices = {e.offset: None if i in stay else float(i + 1) for i, e in left.items()}
    if target not in left:
        return
    offset = left[target].offset
    window = allocator.window_around(offset, wanted * _UNIT, prices.get)
    room = _reachable(sizes, set(left), stay, target)
    if target in stay or room < wanted:
        assert window is None
        return
    assert window is not None
    assert offset in window.victims
    assert window.cost == sum(prices[victim] for victim in window.victims)
    for victim in window.victims:
        allocator.free(next(e for e in left.values() if e.offset == victim))
    assert allocator.take(window.extent).nbytes == wanted * _UNIT


def _reachable(sizes: list[int], taken: set[int], stay: set[int], target: int) -> int:
    """Units in the run around ``target`` that holds nothing that stays."""
    low = high = target
    while low > 0 and not (low - 1 in taken and low - 1 in stay):
        low -= 1
    while high + 1 < len(sizes) and not (high + 1 in taken and high + 1 in stay):
        high += 1
    return sum(sizes[low : high + 1])
