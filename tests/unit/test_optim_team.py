"""Steps on the host leave cores to the threads that launch kernels and copies."""

from __future__ import annotations

import threading

import pytest
import torch

from tiermem.errors import CapacityError
from tiermem.optim.host.team import as_team, team, team_size


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
        team("test-team")


@pytest.fixture
def four_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_a_team_has_its_own_number_of_threads_and_nobody_else_has_it() -> None:
    pool = team("test-team")
    try:
        assert pool.submit(torch.get_num_threads).result() == 2
        assert pool.submit(lambda: threading.current_thread().name).result() == "test-team_0"
        assert torch.get_num_threads() == 4
        seen: list[int] = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [4]
        assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        pool.shutdown()


@pytest.mark.usefixtures("four_threads")
def test_what_is_measured_as_a_team_gives_the_threads_back_even_if_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), as_team():
        assert torch.get_num_threads() == 2
        _ = 1 / 0
    assert torch.get_num_threads() == 4
