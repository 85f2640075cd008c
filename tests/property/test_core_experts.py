"""Seats for experts: one piece each, none from who has to stay; what is chosen often stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.experts import (
    Popularity,
    Seats,
    Trial,
    Way,
    is_worth_whole,
    moved_whole,
    share_out,
    whole_tensors,
)

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
    assert [popularity.share(expert) for expert in range(4)] == pytest.approx([1, 0, 1, 0])
    assert popularity.repeats == pytest.approx(1)
    for _ in range(300):
        popularity.note([1])
    assert popularity.share(1) > 0.9 > 0.1 > popularity.share(0)


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


@given(
    st.sampled_from([Way.TENSORS, Way.LAYERS]),
    st.floats(1.0, 3.0),
    st.floats(1.0, 3.0),
    st.integers(0, 20),
)
def test_a_trial_ends_with_the_faster_way(
    way: Way, whole: float, single: float, others: int
) -> None:
    """Or with whole ones, where those are near what is possible; and counts its own passes."""
    trial, took = Trial(way), {way: whole, Way.EACH: single}
    tried = []
    for number in range(40):
        if number < others:
            trial.note(next(w for w in Way if w is not trial.way), 0.0, 1.0)
        tried.append(trial.way)
        slow = 10.0 if tried[-2:-1] != tried[-1:] else 1.0  # the first one of a way
        trial.note(trial.way, slow * took[trial.way], 1.0)
    assert trial.settled and len(set(tried[10:])) == 1
    assert trial.way is (way if whole <= 1.25 or whole <= single else Way.EACH)
    assert (Way.EACH in tried) == (whole > 1.25)


def test_a_way_that_cannot_be_gone_is_given_up() -> None:
    trial = Trial(Way.TENSORS)
    trial.refuse(Way.LAYERS)
    assert trial.way is Way.TENSORS and not trial.settled
    trial.refuse(Way.TENSORS)
    assert trial.way is Way.EACH and trial.settled


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 120), st.booleans())
def test_whole_tensors_share_what_those_that_stay_leave(
    tensors: int, experts: int, rows: int, abreast: bool
) -> None:
    begins = whole_tensors(tensors, experts, rows, abreast=abreast)
    moved = moved_whole(tensors, experts, rows, abreast=abreast)
    assert (begins is None) == (rows < experts)
    if begins is None:
        assert moved == tensors * experts
        return
    assert len(begins) == tensors
    assert all(0 <= begin <= rows - experts for begin in begins)
    what: dict[int, int] = {}
    loads = []
    for _ in range(4):  # passes that use them in turn
        loads.append(0)
        for number, begin in enumerate(begins):
            for row in range(begin, begin + experts):
                loads[-1] += what.get(row) != number
                what[row] = number
    assert loads[-1] <= moved <= loads[-1] + 2 * experts  # the last one may be the first again
    users = Counter(row for begin in begins for row in range(begin, begin + experts))
    if rows >= (3 if abreast else 2) * experts:  # a pass can begin at once
        assert all(users[row] == 1 for row in range(begins[0], begins[0] + experts))
    if tensors * experts <= rows:
        assert moved == loads[-1] == 0
    else:  # all but what streams, and what can be filled ahead, is kept
        streams = (2 if abreast and rows >= 2 * experts else 1) * experts + experts // 4
        assert moved <= tensors * experts - (rows - streams) + experts


@given(st.integers(0, 4000), st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_whole_layers_need_room_for_two_and_move_little_more(room: int, stacks: list[int]) -> None:
    worth = is_worth_whole(room, stacks)
    if room < 2 * max(stacks):
        assert not worth
    elif len(set(stacks)) == 1:
        stay = min(len(stacks), room // stacks[0] - 2)
        assert worth == (sum(stacks) - stay * stacks[0] <= 1.4 * (sum(stacks) - room))
