"""What stays where large blocks stream one by one, and slots that are alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.loops import Loop, Plan
from tiermem.core.plans import share_hbm
from tiermem.core.residents import keep_largest
from tiermem.core.slots import all_fit, one_ahead_time, slots_in

LARGE, SMALL, TINY = 8, 3, 1
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


times = st.floats(0.0, 5.0)


@given(st.lists(st.tuples(st.booleans(), times, times)))
def test_no_pass_beats_its_compute_or_its_copies_nor_takes_both(uses) -> None:
    moving = [moves for moves, _, _ in uses]
    compute = [seconds for _, seconds, _ in uses]
    transfer = [seconds for _, _, seconds in uses]
    copies = sum(seconds for seconds, moves in zip(transfer, moving, strict=True) if moves)
    took = one_ahead_time(moving, compute, transfer, 0.0)
    assert took >= max(sum(compute), copies) - 1e-9
    assert took <= sum(compute) + copies + 1e-9


def test_how_long_a_pass_takes_by_hand() -> None:
    """Copies of 1 and of 3, compute of 2, one ahead: 0 to 1, 2 to 3, 4 to 7, 7 to 8."""
    assert one_ahead_time([True] * 4, [2.0] * 4, [1.0, 1.0, 1.0, 3.0], 0.0) == 9.0


def test_slots_lie_side_by_side() -> None:
    assert slots_in(2, 15, 4) == [(2, 6), (6, 10), (10, 15)]
    assert slots_in(2, 9, 4) == [(2, 9)]
    assert slots_in(2, 5, 4) == [] == slots_in(0, 9, 0)
    assert all_fit([3, 2, 2], [4, 3]) and not all_fit([3, 3], [5, 2])


def decoder(compute: float, layers: int = 24) -> Loop:
    """A decoder of four small and three large blocks a layer, half of which fit, laid out."""
    sizes = [[SMALL * 10] * 4 + [LARGE * 10] * 3 for _ in range(layers)]
    flat = [size for layer in sizes for size in layer]
    order = list(range(len(flat))) * 3
    by_id = dict(enumerate(flat))
    seconds = [compute * by_id[block] for block in order]
    arrive = {block: float(size) for block, size in by_id.items()}
    room = sum(flat) // 2
    return Loop(order, by_id, room, seconds, arrive, 0.1, steady=True, laid_out=True)


def test_the_room_to_stream_through_is_small_where_the_link_decides() -> None:
    """What it would have held stays."""
    assert share_hbm(decoder(0.2)).reserve <= 2 * LARGE * 10
    assert share_hbm(decoder(2.0)).reserve == 4 * LARGE * 10


@pytest.mark.parametrize("compute", [0.05, 0.2, 0.4])
def test_a_plan_stays_while_it_is_about_as_good(compute) -> None:
    loop = decoder(compute)
    plan = share_hbm(loop)
    assert share_hbm(decoder(compute * 1.02), plan) == plan
    much = decoder(3.0)
    best = share_hbm(much)
    assert much.seconds(share_hbm(much, plan)) <= 1.02 * much.seconds(best)


def test_a_plan_that_is_good_is_known_to_be() -> None:
    loop = decoder(0.2)
    assert loop.is_good(share_hbm(loop))
    assert not loop.is_good(Plan(frozenset(), loop.room, LARGE * 10))


@pytest.mark.parametrize("layers", [12, 16, 20])
@pytest.mark.parametrize("compute", [0.3, 0.9, 1.0, 1.1, 2.0])
def test_layers_of_experts_stream_alone(layers: int, compute: float) -> None:
    """What is small stays, and one of the largest, though two could if small ones streamed."""
    sizes = {n: 700.0 if n % 2 else 25.0 for n in range(2 * layers)}
    order = list(sizes) * 3
    uses = [compute * 725 * (0.4 if block % 2 else 0.6) for block in order]
    room = 25 * layers + 3 * 700 + 350  # or for four of the largest, and few of the small
    whole = {block: int(size) for block, size in sizes.items()}
    loop = Loop(order, whole, room, uses, sizes, 0.1, steady=True, laid_out=True)
    plan = share_hbm(loop)
    assert {block for block, size in whole.items() if size == 25} <= plan.residents
    out = loop.by_laps(plan)
    assert out is not None
    fewest = 700 * (layers - 1)
    assert out.seconds <= 1.01 * max(fewest, sum(uses) / 3) + uses[0] + uses[1] + uses[-1]


@pytest.mark.parametrize("at", [0, -1])
def test_a_plan_is_as_good_where_the_first_or_the_last_use_takes_long(at: int) -> None:
    """No plan has copies beside them, so no other one would take less."""
    loop = decoder(0.2)
    compute = list(loop.compute)
    for turn in range(3):
        compute[turn * loop.length + at % loop.length] += 0.1 * sum(loop.transfer.values())
    longer = replace(loop, compute=compute)
    plan = share_hbm(loop)
    assert longer.is_good(plan)
    assert longer.seconds(share_hbm(longer)) >= 0.99 * longer.seconds(plan)


def test_what_fits_needs_no_slots() -> None:
    loop = decoder(0.2)
    whole = Loop(loop.order, loop.sizes, 1 << 20, loop.compute, loop.transfer, 0.1, steady=True)
    assert share_hbm(whole) == Plan(frozenset(loop.sizes), 0, 0, None)
