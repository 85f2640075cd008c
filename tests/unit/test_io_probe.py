"""Which engine is chosen, and the reason given."""

from __future__ import annotations

import errno
import os
import re
import sys

import pytest
from support_process import nothing_left_open

from tiermem.errors import ConfigError
from tiermem.io import ThreadEngine, choose_engine, probe, ring
from tiermem.io.fallback import FallbackEngine

needs_uring = pytest.mark.skipif(probe.probe_uring() is not None, reason="no io_uring here")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(probe.VARIABLE, raising=False)


@needs_uring
def test_io_uring_is_chosen_where_it_works() -> None:
    assert choose_engine() == (FallbackEngine, "uring", "io_uring works here")
    assert choose_engine("uring")[1] == "uring"


def test_threads_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine("threads")[:2] == (ThreadEngine, "threads")
    monkeypatch.setenv(probe.VARIABLE, "threads")
    factory, name, reason = choose_engine("uring")
    assert (factory, name) == (ThreadEngine, "threads")
    assert probe.VARIABLE in reason


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'aio'.*'uring' or 'threads'"):
        choose_engine("aio")
    monkeypatch.setenv(probe.VARIABLE, "posix")
    with pytest.raises(ConfigError, match=probe.VARIABLE):
        choose_engine()


@pytest.mark.parametrize(
    ("code", "setting", "words"),
    [
        (errno.EPERM, "0", "EPERM.*seccomp"),
        (errno.EPERM, "2", "io_uring_disabled is 2"),
        (errno.ENOSYS, "0", "no io_uring, or a seccomp profile"),
        (errno.ENOMEM, "0", "RLIMIT_MEMLOCK"),
        (errno.EINVAL, "0", "EINVAL: Invalid argument"),
    ],
)
def test_a_blocked_io_uring_gives_way_to_threads(
    monkeypatch: pytest.MonkeyPatch, code: int, setting: str, words: str
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(ring, "init_ring", refuse)
    monkeypatch.setattr(probe, "_read_setting", lambda: setting)
    with nothing_left_open():
        for preferred in (None, "uring"):
            factory, name, reason = choose_engine(preferred)
            assert (factory, name) == (ThreadEngine, "threads")
    assert re.search(words, reason)


def test_a_missing_package_gives_way_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    _, name, reason = choose_engine()
    assert name == "threads"
    assert "package liburing cannot be used" in reason
