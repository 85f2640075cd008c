"""System calls that the kernel refuses, and limits of a process: from outside, without doubles."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
from support_outside import Pair, check, needs_filters, refuse_calls

import tiermem
from tiermem.io.probe import probe_uring


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
        return f"{stats.io_engine} {stats.direct} {stats.io_reason}"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
@pytest.mark.parametrize("when", [-1, 2])
def test_threads_take_over_where_io_uring_is_refused(
    tmp_path: Path, call: str, code: int, when: int
) -> None:
    needs_filters()
    if probe_uring() is not None:
        pytest.skip("no io_uring here")
    said = check(lambda: trained(tmp_path, {call: code}, when))
    if call == "io_uring_enter" or (call == "io_uring_setup" and when < 0):
        assert said.startswith("threads True threads do the file I/O because io_uring")
    else:
        assert said == "uring True io_uring works here"
    assert list(tmp_path.iterdir()) == []


def test_where_fcntl_is_refused_files_go_through_the_page_cache(tmp_path: Path) -> None:
    needs_filters()
    assert check(lambda: trained(tmp_path, {"fcntl": errno.EPERM}, -1)).split()[1] == "False"


def refused_threads(folder: Path, limit: int, value: int) -> str:
    """Opens tiers where no thread can be started; returns what it says."""
    resource.setrlimit(limit, (value, value))
    try:
        tiermem.TierManager("cpu", "1MiB", "2MiB", folder)
    except tiermem.TierError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """By the limit of address space, which holds for root as well."""
    monkeypatch.setenv("TIERMEM_IO_ENGINE", engine)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    room = used + (6 << 20)  # for the arenas, and not for a thread's stack
    said = check(lambda: refused_threads(tmp_path, resource.RLIMIT_AS, room))
    assert said.startswith("CapacityError: ")
    assert "thread" in said
    assert "ulimit" in said
