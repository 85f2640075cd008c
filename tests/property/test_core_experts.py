"""Seats for experts: one piece each, none from who has to stay; what is chosen often stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.experts import Popularity, Seats, Trial, is_worth_whole, share_out

Asks = st.lists(
    st.tuples(st.integers(0, 30), st.booleans(), st.booleans(), st.sets(st.integers(0, 30))),
    max_size=60,
)


@given(st.integers(1, 12), Asks)
def test_seats_are_kept_apart(count: int, asks: list[tuple[int, bool, bool, set[int]]]) -> None:
    seats = Seats(count, 1 << 20, lambda piece: piece % 7)
    for piece, urgent, guessed, held in asks:
        before = dict(seats.seated)
        if piece in before:
            seats.used(piece)
            continue
        seat = seats.seat(piece, held.__contains__, urgent=urgent, guessed=guessed)
        gone = set(before) - set(seats.seated)
        assert not gone & held
        assert (seat is None) == (piece not in seats.seated)
        assert len(gone) <= 1
        assert len(set(seats.seated.values())) == len(seats.seated) <= count
        assert all(0 <= taken < count for taken in seats.seated.values())
        if urgent and seat is None:
            assert set(before) <= held


@given(st.integers(4, 20), st.integers(1, 3))
def test_a_round_of_all_finds_those_that_have_settled(count: int, more: int) -> None:
    pieces = range(count * more + 4)
    seats = Seats(count, 1 << 40, lambda _: 1.0)
    hits = 0
    for turn in range(5):
        hits = 0
        for piece in pieces:
            if piece in seats.seated:
                hits += 1
                seats.used(piece)
            else:
                assert seats.seat(piece, lambda _: False, urgent=True, guessed=False) is not None
        assert turn == 0 or hits >= count - max(1, count // 3) - 1
    assert hits


def test_those_chosen_often_settle() -> None:
    worth: dict[Any, float] = dict.fromkeys(range(20), 0.1)
    seats = Seats(6, 1 << 40, worth.__getitem__)
    for piece in range(20):
        seats.seat(piece, lambda _: False, urgent=True, guessed=False)
    worth |= {7: 0.9, 8: 0.9}
    for piece in (7, 8, 9, 10, 11, 12, 13):
        if piece not in seats.seated:
            seats.seat(piece, lambda _: False, urgent=True, guessed=False)
    assert {7, 8} <= set(seats.seated)


def test_popularity_follows_the_choices() -> None:
    popularity = Popularity(4)
    for _ in range(3):
        popularity.note([0, 2])
    assert list(popularity.often) == pytest.approx([1, 0, 1, 0])
    assert popularity.repeats == pytest.approx(1)
    for _ in range(300):
        popularity.note([1])
    assert popularity.often[1] > 0.9 > 0.1 > popularity.often[0]


@given(
    st.integers(0, 1 << 20),
    st.dictionaries(
        st.integers(1, 9).map(lambda n: n * 4096),
        st.tuples(st.integers(1, 50), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
)
def test_room_is_shared_and_never_passed(room: int, sizes: dict[int, tuple[int, int]]) -> None:
    found = share_out(room, sizes)
    least = sum(size * min(count, few) for size, (count, few) in sizes.items())
    assert (found is None) == (least > room)
    if found is not None:
        assert sum(size * count for size, count in found.items()) <= room
        for size, (count, few) in sizes.items():
            assert min(count, few) <= found[size] <= count


@given(st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.integers(0, 20))
def test_a_trial_ends_with_the_faster_way(whole: float, single: float, others: int) -> None:
    """Or with whole layers, where those are near what is possible; and counts its own passes."""
    trial, took = Trial(), {True: whole, False: single}
    tried = []
    for number in range(40):
        if number < others:
            trial.note(not trial.whole, 0.0, 1.0)
        tried.append(trial.whole)
        slow = 10.0 if tried[-2:-1] != tried[-1:] else 1.0  # the first one of a way
        trial.note(trial.whole, slow * took[trial.whole], 1.0)
    assert trial.settled and len(set(tried[10:])) == 1
    assert trial.whole == (whole <= 1.15 or whole <= single)
    assert (False in tried) == (whole > 1.15)


@given(st.integers(0, 4000), st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_whole_layers_need_room_for_two_and_move_little_more(room: int, stacks: list[int]) -> None:
    worth = is_worth_whole(room, stacks)
    if room < 2 * max(stacks):
        assert not worth
    elif len(set(stacks)) == 1:
        stay = min(len(stacks), room // stacks[0] - 2)
        assert worth == (sum(stacks) - stay * stacks[0] <= 1.4 * (sum(stacks) - room))
