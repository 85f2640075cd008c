"""io_uring that the kernel refuses in the middle: threads go on, and no request is lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support_process import nothing_left_open

from tiermem.io import IoOp, IoRequest, UringEngine
from tiermem.io.fallback import FallbackEngine
from tiermem.io.probe import probe_uring
from tiermem.testing.io import EngineConformance, Memory, ScriptedEngine

PAGE = 4096
pytestmark = pytest.mark.skipif(probe_uring() is not None, reason="no io_uring here")


class TestFallback(EngineConformance):
    """It keeps the contract while nothing is refused."""

    def make_engine(self) -> FallbackEngine:
        return FallbackEngine()


class TestFallenBack(EngineConformance):
    """And where a ring was refused from the beginning."""

    def make_engine(self) -> FallbackEngine:
        return FallbackEngine(RefusedRing)


class RefusedRing(UringEngine):
    """A ring that cannot be set up."""

    def open(self, files: Any, buffers: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("tiermem-test", os.MFD_CLOEXEC)
    os.pwrite(fd, b"".join(bytes([page]) * PAGE for page in range(64)), 0)
    yield fd
    os.close(fd)


def refuse(engine: FallbackEngine, code: int) -> None:
    """Makes every entry into the kernel fail with ``code`` from now on."""
    uring: Any = engine._engine
    uring._ring.lib.submit_and_get_events = lambda *_: -code
    uring._ring.lib.submit_and_wait_timeout = lambda *_: -code


def reads(memory: Memory, tokens: range) -> list[IoRequest]:
    return [IoRequest(IoOp.READ, 0, t * PAGE, memory.address + t * PAGE, PAGE, t) for t in tokens]


@pytest.mark.parametrize("before", [0, 3, 16])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EBADF])
def test_what_was_submitted_comes_back_once(file: int, before: int, code: int) -> None:
    """Whether the kernel had it already, or was refused it."""
    with nothing_left_open():
        engine, memory = FallbackEngine(lambda: UringEngine(depth=8)), Memory(64 * PAGE)
        engine.open([file], [(memory.address, 64 * PAGE)])
        assert engine.name == "uring"
        engine.submit(reads(memory, range(before)))
        refuse(engine, code)
        engine.submit(reads(memory, range(before, 32)))
        done: list[int] = []
        while len(done) < 32:
            found = engine.wait(60.0)
            assert all(c.errno == 0 and c.nbytes == PAGE for c in found)
            done += [c.token for c in found]
        assert sorted(done) == list(range(32))
        assert engine.in_flight == 0
        assert engine.name == "threads"
        assert os.strerror(code) in engine.note
        for page in range(32):
            assert memory.view[page * PAGE : (page + 1) * PAGE] == bytes([page]) * PAGE
        engine.close()


def test_a_wait_that_is_refused_ends_by_what_is_done(file: int) -> None:
    engine, memory = FallbackEngine(), Memory(PAGE)
    engine.open([file], [])
    refuse(engine, errno.EPERM)
    assert engine.wait(0.0) == []  # and now it is threads
    engine.submit(reads(memory, range(1)))
    found = []
    while not found:
        found = engine.wait(60.0)
    assert [c.token for c in found] == [0]
    engine.close()


def test_a_wake_in_between_is_not_lost(file: int) -> None:
    engine = FallbackEngine()
    engine.open([file], [])
    engine.wake()
    refuse(engine, errno.EPERM)
    assert engine.wait(60.0) == []
    assert engine.wait(60.0) == []  # who woke the ring has woken the threads
    thread = threading.Thread(target=engine.wake)
    thread.start()
    assert engine.wait(60.0) == []
    thread.join()
    engine.close()


def test_what_is_cancelled_stays_so(file: int) -> None:
    engine, memory = FallbackEngine(lambda: UringEngine(depth=1)), Memory(8 * PAGE)
    engine.open([file], [])
    refuse(engine, errno.ENOSYS)
    engine.cancel()
    engine.submit(reads(memory, range(8)))
    engine.cancel()
    done = []
    while len(done) < 8:
        done += engine.wait(60.0)
    assert sorted(c.token for c in done) == list(range(8))
    assert {c.errno for c in done} <= {0, errno.ECANCELED}
    engine.close()


def test_threads_that_fail_as_well_say_so(file: int) -> None:
    scripted = ScriptedEngine()
    engine = FallbackEngine(RefusedRing, lambda: scripted)
    engine.open([file], [])
    scripted.break_with(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        engine.wait(0.0)
    engine.close()
