"""What stays while the rest goes in circles: as much as there is room for, weights before state."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.staying import choose_to_stay

sizes = st.lists(st.integers(1, 40), max_size=30)


@given(sizes, sizes, st.integers(1, 40), st.integers(0, 3000), st.integers(0, 4000), st.randoms())
def test_what_stays_leaves_the_circle_its_room(weights, state, largest, room, rate, rng) -> None:
    largest = max([largest, *weights, *state])
    own = dict(enumerate(weights))
    kept_with = {len(weights) + n: size for n, size in enumerate(state)}
    every = own | kept_with
    order = [*every, *own]
    rng.shuffle(order)
    kept = choose_to_stay(order, own, kept_with, largest, room, rate)
    taken = sum(every[block] for block in kept)
    window = max(6 * largest, rate // 10)
    assert kept <= every.keys()
    assert not kept or taken + window <= room
    if room - window >= sum(every.values()):
        assert kept == every.keys()
    if kept & kept_with.keys():  # state stays only where no weight fits any more
        left = room - window - sum(own[block] for block in kept & own.keys())
        assert all(size > left for block, size in own.items() if block not in kept)
    for block in every.keys() - kept:  # nothing is left out that would still fit
        fits = taken + every[block] + window <= room
        assert not fits or block in own


def test_nothing_stays_in_a_small_budget() -> None:
    assert choose_to_stay([0, 1], {0: 10}, {1: 80}, 80, 480, 0.0) == frozenset()


def test_what_stays_is_spread_over_the_loop() -> None:
    state = dict.fromkeys(range(40), 10)
    kept = sorted(choose_to_stay(list(state), {}, state, 10, 60 + 100, 0.0))
    assert len(kept) == 10
    assert all(3 <= b - a <= 5 for a, b in itertools.pairwise(kept))


def test_a_fast_link_has_a_larger_circle() -> None:
    state = dict.fromkeys(range(40), 10)
    assert len(choose_to_stay(list(state), {}, state, 10, 300, 2000.0)) == 10
