"""A loop from a disk, played: it ends, and takes as long as it has to; and where it turns."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.fromdisk import Round, play
from tiermem.core.loops import Files, Loop, Plan, _period
from tiermem.core.plans import share_hbm

BLOCKS = 6
seconds = st.integers(0, 40).map(float)
rounds = st.builds(
    lambda uses, taken, copies, away, reads, room, staging: Round(
        [block for block, _ in uses],
        [compute for _, compute in uses],
        {block: taken[block] for block in range(BLOCKS) if away[block]},
        dict(enumerate(copies)),
        {b: 1.0 + reads[b] for b in range(BLOCKS) if away[b] and reads[b] is not None},
        max([n for n, moves in zip(taken, away, strict=True) if moves], default=1) * room,
        staging,
    ),
    st.lists(st.tuples(st.integers(0, BLOCKS - 1), seconds), min_size=1, max_size=18),
    st.lists(st.integers(1, 9), min_size=BLOCKS, max_size=BLOCKS),
    st.lists(seconds, min_size=BLOCKS, max_size=BLOCKS),
    st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS),
    st.lists(st.none() | seconds, min_size=BLOCKS, max_size=BLOCKS),
    st.integers(1, 5),
    st.integers(0, 20),
)


@given(rounds)
def test_a_round_ends_and_takes_no_less_than_its_compute_and_its_reads(one: Round) -> None:
    took, read = play(one)
    assert 0.0 <= took < inf and 0.0 <= read < inf
    assert took >= sum(one.compute) - 1e-6
    # what was read before the rounds that count began is in them, or what is read for the next
    assert took * 3 >= read * 3 - 2 * sum(one.reads.values()) - 1e-6


@given(rounds)
def test_what_is_there_once_is_not_read_again_where_all_of_it_has_room(one: Round) -> None:
    room = sum(one.taken.values()) + 2 * max(one.taken.values(), default=1)
    took, read = play(replace(one, reserve=room))
    assert took == pytest.approx(sum(one.compute)) and read == 0.0


def test_two_slots_read_by_hand() -> None:
    """Three blocks through one place beside the one in use; each read hides behind no compute.

    The host asks for the next block as each use begins, and waits until a read is over.
    """
    order, size = [0, 1, 2], 10
    one = Round(
        order, [1.0] * 3, dict.fromkeys(order, size), dict.fromkeys(order, 0.0),
        dict.fromkeys(order, 5.0), 20, 100,
    )  # fmt: skip
    took, read = play(one)
    assert read == 15.0 and 15.0 <= took <= 15.1


@pytest.mark.parametrize(("staging", "seconds"), [(20, 60.0), (15, 65.0), (10, 70.0)])
def test_what_chunks_hold_need_not_wait_for_room(staging: int, seconds: float) -> None:
    """Block 9 stays and has a long use; 1, 2 and 3 are read in ten seconds each, and used at once.

    When the long use ends, 2 is in chunks and goes up, and 3 is read already, as far as there
    were chunks for it; the rest of it is read then.
    """
    one = Round(
        [9, 1, 2, 3], [60.0, 0.0, 0.0, 0.0], dict.fromkeys([1, 2, 3], 10),
        dict.fromkeys([1, 2, 3], 0.0), dict.fromkeys([1, 2, 3], 10.0), 20, staging,
    )  # fmt: skip
    took, read = play(one)
    assert took == pytest.approx(seconds) and read == pytest.approx(30.0)


def turning(blocks: int, rounds: int = 3) -> list[int]:
    return [*range(blocks), *reversed(range(blocks))] * rounds


def test_in_a_loop_that_turns_what_is_used_first_and_last_is_read() -> None:
    """It comes again at once where the loop turns, so it is read once a round, with time to."""
    sizes = dict.fromkeys(range(16), 10)
    order = turning(16)
    files = Files(dict.fromkeys(range(16), 14.0), 60, 20)
    loop = Loop(order, sizes, 90, [1.0] * len(order), dict.fromkeys(range(16), 0.1), 0.0, files)
    plan = share_hbm(loop)
    away = set(range(16)) - plan.residents - (plan.in_dram or frozenset())
    assert away and away <= {0, 1, 14, 15}
    spread = Plan(
        frozenset(sorted(set(range(16)) - {3, 7, 11})[:7]), 20, 10,
        frozenset(sorted(set(range(16)) - {3, 7, 11})[7:13]),
    )  # fmt: skip
    assert loop.seconds(plan) < 0.9 * loop.seconds(spread)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_an_order_begins_anew_after_its_period(order: list[int]) -> None:
    shortest = next(
        n
        for n in range(1, len(order) + 1)
        if all(a == b for a, b in zip(order, order[n:], strict=False))
    )
    assert _period(order) == shortest
