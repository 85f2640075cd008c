"""Lanes: what stays beside them, in which order they are fetched into, and how long that takes."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.lanes import (
    Lanes,
    LaneWalk,
    all_fit,
    lane_of,
    lane_parts,
    laned_time,
    one_ahead_time,
    slots_in,
)
from tiermem.core.plans import Loop, Plan, share_hbm
from tiermem.core.residents import keep_largest

LARGE, SMALL, TINY = 8, 3, 1
SLOTS = (LARGE, SMALL, SMALL)
passes = st.lists(st.sampled_from([LARGE, SMALL, TINY]), min_size=1, max_size=40)


@given(passes, st.integers(-5, 200))
def test_the_large_ones_stay_first_and_one_of_each_row_streams(sizes, room) -> None:
    by_id = dict(enumerate(sizes))
    kept = keep_largest(range(len(sizes)), by_id, room, LARGE)
    assert sum(by_id[block] for block in kept) <= max(room, 0)
    rows = [
        [block for block, _ in row]
        for size, row in groupby(enumerate(sizes), key=lambda entry: entry[1])
        if size == LARGE
    ]
    gone = [[block for block in row if block not in kept] for row in rows]
    assert all(gone)
    if rows and any(len(row) < len(whole) for row, whole in zip(gone, rows, strict=True)):
        for went, row in zip(gone[:-1], rows[:-1], strict=True):
            assert row[0] in went
        assert rows[-1][-1] in gone[-1]
    streams = sum(len(row) for row in gone)
    if streams > len(rows):  # more than one of each, for want of room
        assert sizes.count(LARGE) - streams == max(room, 0) // LARGE
    left = room - sum(by_id[block] for block in kept if by_id[block] == LARGE)
    small = sum(by_id[block] == SMALL for block in kept)
    assert small == min(sizes.count(SMALL), max(left, 0) // SMALL)


@given(st.integers(2, 40), st.integers(0, 40))
def test_what_streams_is_spread_from_the_first_to_the_last(blocks, stay) -> None:
    kept = keep_largest(range(blocks), dict.fromkeys(range(blocks), SMALL), SMALL * stay, LARGE)
    gone = sorted(set(range(blocks)) - kept)
    assert len(gone) == max(0, blocks - stay)
    if len(gone) > 1:
        assert (gone[0], gone[-1]) == (0, blocks - 1)
        steps = {after - before for before, after in pairwise(gone)}
        assert max(steps) - min(steps) <= 1


def walk(sizes, moving, skipped=()):
    """Goes through a pass; returns, use by use, what had been asked for at it."""
    lanes = Lanes(range(len(sizes)), SLOTS, {b: sizes[b] for b in moving})
    going = LaneWalk(lanes)
    asked = []
    for position in range(len(sizes)):
        found = []
        if position not in skipped:
            going.move_on(position + 1)
            while (entry := going.soonest()) is not None:
                going.take(*entry)
                found.append(entry[1])
        asked.append(found)
    return asked


@given(passes, st.sets(st.integers(0, 39)))
def test_everything_is_asked_for_once_in_order_and_when_there_is_a_slot(sizes, moving) -> None:
    moving = {block for block in moving if block < len(sizes)}
    asked = walk(sizes, moving)
    every = [position for found in asked for position in found]
    assert len(every) == len(set(every))
    order = sorted(moving)
    last = order[-1] if order else -1
    for size in (LARGE, SMALL):
        lane = [p for p in order if lane_of(SLOTS, sizes[p]) == size]
        got = [p for p in every if p < len(sizes) and lane_of(SLOTS, sizes[p]) == size]
        assert got == lane
        slots = SLOTS.count(size)
        for position in range(len(sizes)):
            there = [p for found in asked[: position + 1] for p in found if p in lane]
            unused = [p for p in there if p >= position]
            assert len(unused) <= slots
            following = [p for p in lane if p not in there]
            if len(unused) < slots and following:
                # a slot is left free for what comes last only, while something else is to come
                assert following[0] == last
                so_far = {p for found in asked[: position + 1] for p in found}
                assert any(p not in so_far for p in order if p != last)
    if order:
        opening = [len(sizes) + order[0]]
        assert [p for p in every if p >= len(sizes)] in ([], opening)
        assert every[-1] in (last, *opening)


def test_a_use_that_was_passed_over_is_not_waited_for() -> None:
    asked = walk([SMALL] * 12, set(range(12)), skipped=range(3, 7))
    assert asked[:3] == [[0, 1], [2], [3]]
    assert asked[7:] == [[7, 8], [9], [10], [11], [12]]


times = st.floats(0.0, 5.0)


@given(st.lists(st.tuples(st.sampled_from([LARGE, SMALL]), st.booleans(), times, times)))
def test_no_pass_beats_its_compute_or_its_copies_nor_takes_both(uses) -> None:
    moving = [moves for _, moves, _, _ in uses]
    compute = [seconds for _, _, seconds, _ in uses]
    transfer = [seconds for _, _, _, seconds in uses]
    by_id = {block: size for block, (size, moves, _, _) in enumerate(uses) if moves}
    copies = sum(seconds for seconds, moves in zip(transfer, moving, strict=True) if moves)
    lanes = Lanes(range(len(uses)), SLOTS, by_id)
    for took in (
        laned_time(lanes, compute, transfer),
        one_ahead_time(moving, compute, transfer, 0.0),
    ):
        assert took >= max(sum(compute), 0.0) - 1e-9
        assert took <= sum(compute) + copies + 1e-9
    assert one_ahead_time(moving, compute, transfer, 0.0) >= copies - 1e-9


def test_how_long_a_pass_takes_by_hand() -> None:
    """Copies of 1 and of 3, compute of 2: the large one goes by while the small ones compute."""
    sizes = [SMALL, SMALL, SMALL, LARGE]
    lanes = Lanes(range(4), SLOTS, dict(enumerate(sizes)))
    transfer = [1.0, 1.0, 1.0, 3.0]
    # the first is there and computes until 2; the second is copied from 0 to 1, the third from 2
    # to 3, the large one from 3 to 6, and the first one of the next pass from 6 to 7
    assert laned_time(lanes, [2.0] * 4, transfer) == 8.0
    # two slots, one ahead: 0 to 1, 2 to 3, 4 to 7, 7 to 8
    assert one_ahead_time([True] * 4, [2.0] * 4, transfer, 0.0) == 9.0


def test_slots_lie_side_by_side() -> None:
    assert lane_parts(SLOTS, 4, 18) == {LARGE: [(4, 12)], SMALL: [(12, 15), (15, 18)]}
    assert lane_parts(SLOTS, 5, 18) == {}
    assert slots_in(2, 15, 4) == [(2, 6), (6, 10), (10, 15)]
    assert slots_in(2, 9, 4) == [(2, 9)]
    assert slots_in(2, 5, 4) == [] == slots_in(0, 9, 0)
    assert [lane_of(SLOTS, size) for size in (1, 3, 4, 8, 9)] == [3, 3, 8, 8, 0]
    assert all_fit([3, 2, 2], [4, 3]) and not all_fit([3, 3], [5, 2])


def decoder(compute: float, layers: int = 24, *, steady: bool = True) -> Loop:
    """A decoder of four small and three large blocks a layer, half of which fit."""
    sizes = dict(enumerate([SMALL * 10] * 4 + [LARGE * 10] * 3 for _ in range(layers)))
    flat = [size for layer in sizes.values() for size in layer]
    order = list(range(len(flat))) * 3
    by_id = dict(enumerate(flat))
    seconds = [compute * by_id[block] for block in order]
    arrive = {block: float(size) for block, size in by_id.items()}
    return Loop(order, by_id, sum(flat) // 2, seconds, arrive, 0.1, steady=steady)


def test_lanes_are_taken_where_the_link_decides_and_blocks_take_turns() -> None:
    plan = share_hbm(decoder(0.2))
    assert plan.lanes == (80, 30, 30) and plan.reserve == 140
    assert not share_hbm(decoder(0.2, steady=False)).lanes
    assert not share_hbm(decoder(2.0)).lanes


@pytest.mark.parametrize("compute", [0.05, 0.2, 0.4])
def test_a_plan_with_lanes_stays_while_it_is_about_as_good(compute) -> None:
    loop = decoder(compute)
    plan = share_hbm(loop)
    assert plan.lanes and share_hbm(decoder(compute * 1.02), plan) == plan
    much = decoder(3.0)
    best = share_hbm(much)
    changed = share_hbm(much, plan)
    assert changed == plan or not changed.lanes
    assert much.seconds(changed) <= 1.02 * much.seconds(best)


def test_what_fits_needs_no_lanes() -> None:
    loop = decoder(0.2)
    whole = Loop(loop.order, loop.sizes, 1 << 20, loop.compute, loop.transfer, 0.1, steady=True)
    assert share_hbm(whole) == Plan(frozenset(loop.sizes), 0, 0, None)
