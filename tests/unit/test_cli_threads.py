"""How many threads ``tiermem train`` gives to torch's kernels on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tiermem import cli
from tiermem.cli import threads as chosen
from tiermem.cli.threads import allowed, best, threads


def test_a_control_groups_share_and_the_cores_limit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    quota = tmp_path / "cpu.max"
    assert allowed(16, quota) == 12  # there is none
    for text, number in [
        ("max 100000", 12),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 12),
        ("nonsense", 12),
    ]:
        quota.write_text(text + "\n")
        assert allowed(16, quota) == number, text
    assert allowed(1, quota) == 1


def test_as_many_as_help() -> None:
    asked: list[int] = []

    def idle(number: int) -> float:
        asked.append(number)
        return 1.0 / number

    def busy(number: int) -> float:  # a team waits for the member whose core is taken
        return 1.0 if number == 1 else 4.0

    def small(number: int) -> float:
        return 1.0 - 0.05 * (number > 1)

    def noisy(number: int) -> float:  # once in a while the one thread is slow, too
        asked.append(number)
        return 9.0 if len(asked) % 5 == 0 else busy(number)

    assert best(12, idle) == 12
    assert set(asked) == {12, 6, 3, 1}
    assert best(2, busy) == 1
    assert best(16, small) == 1
    asked.clear()
    assert best(2, noisy, limit=1e9) == 1
    assert best(1, idle) == 1


def test_a_slow_piece_of_work_is_not_tried_for_long() -> None:
    asked: list[int] = []

    def slow(number: int) -> float:
        asked.append(number)
        return 30.0 / number

    assert best(2, slow) == 2
    assert asked == [2, 1]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch would take two threads; what is set is kept here."""
    numbers = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(chosen, "allowed", lambda most: most)
    for name in chosen._SET:
        monkeypatch.delenv(name, raising=False)
    return numbers


def test_what_a_trial_chooses_is_set_and_taken_back(
    two: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "best", lambda most, timed: timed(1) and most - 1)
    with pytest.raises(KeyboardInterrupt), threads(None, "cpu", lambda: None) as number:
        assert number == two[-1] == 1
        raise KeyboardInterrupt
    assert two[-1] == 2


@pytest.mark.parametrize(
    ("asked", "device", "variable", "expected"),
    [(3, "cpu", None, 3), (None, "cuda", None, 2), (None, "cpu", "OMP_NUM_THREADS", 2)],
)
def test_without_a_trial(
    two: list[int],
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    device: str,
    variable: str | None,
    expected: int,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "2")

    def never() -> None:
        raise AssertionError("a trial")

    with threads(asked, device, never) as number:
        assert number == two[-1] == expected
    assert two[-1] == 2


def test_a_number_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--threads", "0", "--out", str(tmp_path)]) == 2
    assert "--threads must be at least 1" in capsys.readouterr().err


def test_a_number_that_openmp_dies_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--threads", "99999", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--threads 99999 is more than this machine has any use for" in error
    assert f"give {8 * (os.cpu_count() or 1)} at most" in error
