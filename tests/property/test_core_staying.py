"""What stays while the rest goes in circles: as much as there is room for, weights before state."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.staying import choose_to_stay, window_of

sizes = st.lists(st.integers(1, 40), max_size=30)


@given(sizes, sizes, st.integers(1, 400), st.integers(0, 3000), st.randoms())
def test_what_stays_leaves_the_circle_its_room(weights, state, window, room, rng) -> None:
    own = dict(enumerate(weights))
    kept_with = {len(weights) + n: size for n, size in enumerate(state)}
    every = own | kept_with
    order = [*every, *own]
    rng.shuffle(order)
    kept = choose_to_stay(order, own, kept_with, window, room)
    taken = sum(every[block] for block in kept)
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
    assert choose_to_stay([0, 1], {0: 10}, {1: 80}, 480, 480) == frozenset()


def test_what_stays_is_spread_over_the_loop() -> None:
    state = dict.fromkeys(range(40), 10)
    kept = sorted(choose_to_stay(list(state), {}, state, 60, 60 + 100))
    assert len(kept) == 10
    assert all(3 <= b - a <= 5 for a, b in itertools.pairwise(kept))


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(0, 100_000), st.booleans())
def test_the_circle_has_room_for_the_largest_block(sizes, rate, binds) -> None:
    window = window_of(sizes, rate, copies_bind=binds)
    assert window >= 6 * max(sizes)
    assert window == window_of(sizes[::-1], rate, copies_bind=binds)


def test_a_fast_link_has_a_larger_circle() -> None:
    assert window_of([10] * 40, 2000.0, copies_bind=False) == 200
    assert window_of([10] * 40, 0.0, copies_bind=False) == 60


def test_where_copies_bind_the_usual_block_counts() -> None:
    """Half of the bytes are in blocks of at most its size, however fast the link is."""
    assert window_of([10] * 40, 1e9, copies_bind=True) == 160
    assert window_of([*[10] * 40, 12], 1e9, copies_bind=True) == 160
    assert window_of([*[10] * 40, 100], 1e9, copies_bind=True) == 600
    assert window_of([1] * 100 + [10] * 11, 1e9, copies_bind=True) == 160
    assert window_of([1] * 100 + [10] * 9, 1e9, copies_bind=True) == 60
