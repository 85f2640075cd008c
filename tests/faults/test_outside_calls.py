"""Refused system calls, limits and signals: from outside, without doubles."""

from __future__ import annotations

import errno
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest
from support_outside import (
    Apart,
    Outcome,
    Pair,
    check,
    memory_cgroup,
    needs_filters,
    refuse_calls,
)

import tiermem
from tiermem.io.probe import probe_uring
from tiermem.runtime.memory.hostheap import anonymous_nbytes


def trained(folder: Path, calls: dict[str, int], when: int) -> str:
    """Trains for four steps, with calls refused from one of them on; returns how it read files."""
    if when < 0:
        refuse_calls(calls)
    with tiermem.TierManager("cpu", "80KiB", "2MiB", folder, policy="nvme") as tier:
        pair = Pair(tier)
        for step in range(4):
            if step == when:
                assert tier.stats().io_engine == "uring"
                refuse_calls(calls)
            pair.train(1)
        pair.compare()
        stats = tier.stats()
        return f"{stats.io_engine} {stats.direct_io} {stats.io_reason}"


@pytest.mark.parametrize(
    ("call", "code", "when"),
    [
        ("io_uring_setup", errno.ENOSYS, -1),
        ("io_uring_register", errno.EPERM, -1),
        ("io_uring_enter", errno.EPERM, -1),
        ("io_uring_enter", errno.ENOSYS, 2),
        ("io_uring_enter", errno.EPERM, 3),
    ],
)
@pytest.mark.one_in(2)
def test_threads_take_over_where_io_uring_is_refused(
    tmp_path: Path, call: str, code: int, when: int
) -> None:
    needs_filters()
    if probe_uring() is not None:
        pytest.skip("no io_uring here")
    said = check(lambda: trained(tmp_path, {call: code}, when))
    if call == "io_uring_register":
        assert said == "uring True io_uring works here"
    else:
        assert said.startswith("threads True threads do the file I/O because ")
    assert list(tmp_path.iterdir()) == []


def test_where_fcntl_is_refused_files_go_through_the_page_cache(tmp_path: Path) -> None:
    needs_filters()
    assert check(lambda: trained(tmp_path, {"fcntl": errno.EPERM}, -1)).split()[1] == "False"


def without_threads(folder: Path) -> str:
    """Opens tiers where no thread can be started; returns what it says."""
    refuse_calls({"clone": errno.EAGAIN, "clone3": errno.EAGAIN})
    try:
        tiermem.TierManager("cpu", "1MiB", "2MiB", folder)
    except tiermem.TierError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """As under limits of processes and of address space."""
    needs_filters()
    monkeypatch.setenv("TIERMEM_IO_ENGINE", engine)
    said = check(lambda: without_threads(tmp_path))
    assert said.startswith("CapacityError: the system starts no thread for file I/O (")
    assert "ulimit -u" in said
    assert list(tmp_path.iterdir()) == []


def train_for_ever(folder: Path, done: Path) -> None:
    """Trains until it is killed; writes a byte to a file for each step."""
    with tiermem.TierManager("cpu", "80KiB", "2MiB", folder, policy="nvme") as tier:
        pair = Pair(tier)
        with done.open("ab", buffering=0) as file:
            while True:
                pair.train(1)
                pair.compare()
                file.write(b"x")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ended_at_any_time_leaves_no_file_and_no_space_taken(
    tmp_path: Path, number: int
) -> None:
    chance = random.Random(number)
    folder, done = tmp_path / "swap", tmp_path / "done"
    folder.mkdir()
    for _ in range(2):
        done.write_bytes(b"")
        process = Apart(partial(train_for_ever, folder, done))
        steps = chance.randrange(1, 8)
        while done.stat().st_size < steps:  # and then at some time within the next one
            assert not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.sched_yield()
        process.send(number)
        assert process.outcome().status == -number
        assert list(folder.iterdir()) == []


def test_a_process_that_is_stopped_and_goes_on_is_right(tmp_path: Path) -> None:
    folder, done = tmp_path / "swap", tmp_path / "done"
    folder.mkdir()
    done.write_bytes(b"")
    process = Apart(partial(train_for_ever, folder, done))
    for steps in range(2, 12, 2):
        while done.stat().st_size < steps:
            assert not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.sched_yield()
        process.send(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        process.send(signal.SIGCONT)
    process.send(signal.SIGKILL)
    assert process.outcome() == Outcome(-signal.SIGKILL, "")  # it found no difference


def lives(nbytes: int) -> str:
    """Trains in a cgroup; returns the default budget and the bytes that training took."""
    with tiermem.TierManager("cpu") as tier:
        default = tier.stats().budget["dram"] + tier.stats().budget["hbm"]
    assert default < nbytes
    before = anonymous_nbytes()
    with tiermem.TierManager("cpu", "12MiB", "72MiB") as tier:
        pair = Pair(tier, width=768, layers=8)  # 18 MiB
        for _ in range(5):
            pair.tiered_step()
        return str((anonymous_nbytes() - before) >> 20)


def test_it_lives_within_a_cgroup_of_its_budgets_and_a_margin() -> None:
    limit = (12 + 72 + 36 + 96) << 20  # budgets, the model and its twin, the margin
    with memory_cgroup(limit) as group:
        assert int(check(lambda: lives(limit), group)) < 12 + 72 + 36 + 64
