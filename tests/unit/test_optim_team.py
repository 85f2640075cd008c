"""Steps on the host leave cores to the threads that launch kernels and copies."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples

from tiermem.errors import CapacityError
from tiermem.optim.host.team import Team, as_team, team_size


@pytest.mark.parametrize(
    ("threads", "size"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 4), (16, 8), (128, 64)]
)
def test_half_of_the_threads_are_left_to_others(threads: int, size: int) -> None:
    assert team_size(threads) == size


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CapacityError, match="where='device'"):
        Team("test-team")


@pytest.fixture
def four_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_a_team_has_its_own_number_of_threads_and_nobody_else_has_it() -> None:
    pool = Team("test-team")
    try:
        assert pool.submit(0, torch.get_num_threads).result() == 2
        assert pool.submit(0, lambda: threading.current_thread().name).result() == "test-team_0"
        assert torch.get_num_threads() == 4
        seen: list[int] = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [4]
        assert pool.submit(0, torch.get_num_threads).result() == 2
    finally:
        pool.shutdown()


@pytest.mark.usefixtures("four_threads")
def test_what_is_measured_as_a_team_gives_the_threads_back_even_if_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), as_team():
        assert torch.get_num_threads() == 2
        _ = 1 / 0
    assert torch.get_num_threads() == 4


@settings(max_examples=examples(40))
@given(
    places=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
    failing=st.sets(st.integers(0, 11)),
)
def test_what_is_needed_first_is_done_first(
    places: list[int], cancelled: set[int], failing: set[int]
) -> None:
    done: list[int] = []
    opened = threading.Event()

    def do(number: int) -> int:
        done.append(number)
        if number in failing:
            raise ZeroDivisionError
        return number

    pool = Team("test-team")
    try:
        pool.submit(9, opened.wait)  # all others wait for it
        ends = [pool.submit(place, partial(do, n)) for n, place in enumerate(places)]
        gone = {n for n in cancelled if n < len(ends) and ends[n].cancel()}
        opened.set()
    finally:
        pool.shutdown()
    kept = [n for n in range(len(places)) if n not in gone]
    assert done == sorted(kept, key=lambda n: (places[n], n))
    for n in kept:
        assert isinstance(ends[n].exception(), ZeroDivisionError) == (n in failing)
        assert n in failing or ends[n].result() == n
