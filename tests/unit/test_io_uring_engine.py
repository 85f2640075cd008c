"""What only the io_uring engine does: flags, registration, results one by one."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Iterator

import pytest
from support_process import nothing_left_open, open_files

from tiermem.io import IoOp, IoRequest, UringEngine, registered, ring, uring
from tiermem.io.engine import MAX_STALLS, Progress
from tiermem.io.probe import probe_uring
from tiermem.testing.io import Memory

pytestmark = pytest.mark.skipif(probe_uring() is not None, reason="no io_uring here")

PAGE = 4096


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("tiermem-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 64 * PAGE)
    yield fd
    os.close(fd)


def test_older_kernels_get_fewer_flags(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    unknown = 1 << 30
    monkeypatch.setattr(ring, "FLAG_CHOICES", (unknown, 0))
    engine = UringEngine()
    engine.open([file], [])
    assert engine.flags == 0
    memory = Memory(PAGE)
    engine.submit([IoRequest(IoOp.READ, 0, 0, memory.address, PAGE, 5)])
    assert [c.errno for c in engine.wait(60.0)] == [0]
    engine.close()


def test_refused_registrations_fall_back_to_plain_io(
    monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    real = ring.load_library

    def without_registration() -> object:
        lib = real()
        lib.register_buffers = lambda *args: -errno.ENOMEM
        lib.register_files = lambda *args: -errno.EMFILE
        return lib

    monkeypatch.setattr(ring, "load_library", without_registration)
    memory = Memory(4 * PAGE)
    memory.view[:] = data = os.urandom(4 * PAGE)
    engine = UringEngine()
    engine.open([file], [(memory.address, memory.nbytes)])
    assert "buffers not registered: Cannot allocate memory" in engine.describe()
    assert "files not registered" in engine.describe()
    for op in (IoOp.WRITE, IoOp.READ):
        engine.submit([IoRequest(op, 0, 0, memory.address, 4 * PAGE, 1)])
        assert [c.errno for c in engine.wait(60.0)] == [0]
        if op is IoOp.WRITE:
            memory.view[:] = bytes(4 * PAGE)
    engine.close()
    assert memory.view == data


def test_where_not_all_can_be_registered_the_first_buffer_is(
    monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    real = ring.load_library

    def with_a_limit() -> object:
        lib = real()
        register = lib.register_buffers
        lib.register_buffers = lambda ring, areas, count: (
            -errno.ENOMEM if count > 1 else register(ring, areas, count)
        )
        return lib

    monkeypatch.setattr(ring, "load_library", with_a_limit)
    first, second = Memory(2 * PAGE), Memory(2 * PAGE)
    engine = UringEngine()
    engine.open([file], [(first.address, first.nbytes), (second.address, second.nbytes)])
    assert engine._known.areas == [(first.address, first.nbytes)]
    assert "only the first buffer registered: Cannot allocate memory" in engine.describe()
    for number, memory in enumerate((first, second)):
        memory.view[:] = data = os.urandom(2 * PAGE)
        for op in (IoOp.WRITE, IoOp.READ):
            engine.submit([IoRequest(op, 0, 0, memory.address, 2 * PAGE, number)])
            assert [c.errno for c in engine.wait(60.0)] == [0]
        assert memory.view == data
    engine.close()


def test_areas_longer_than_a_buffer_may_be_are_split(
    monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    monkeypatch.setattr(registered, "MAX_AREA", 4 * PAGE)
    memory = Memory(10 * PAGE)
    memory.view[:] = data = os.urandom(10 * PAGE)
    engine = UringEngine()
    engine.open([file], [(memory.address, memory.nbytes)])
    assert [n for _, n in engine._known.areas] == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    for op in (IoOp.WRITE, IoOp.READ):  # the second request lies across two areas
        runs = [(0, 4), (3, 2), (8, 2)]
        requests = [
            IoRequest(op, 0, start * PAGE, memory.address + start * PAGE, n * PAGE, start)
            for start, n in runs
        ]
        engine.submit(requests)
        left = len(requests)
        while left:
            completions = engine.wait(60.0)
            assert all(c.errno == 0 for c in completions)
            left -= len(completions)
    engine.close()
    assert memory.view == data


def test_large_requests_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    monkeypatch.setattr(uring, "MAX_PIECE", 2 * PAGE)
    memory = Memory(7 * PAGE)
    os.pwrite(file, data := os.urandom(7 * PAGE), 0)
    engine = UringEngine()
    engine.open([file], [])
    engine.submit([IoRequest(IoOp.READ, 0, 0, memory.address, 7 * PAGE, 3)])
    (completion,) = engine.wait(60.0)
    engine.close()
    assert (completion.nbytes, completion.errno) == (7 * PAGE, 0)
    assert memory.view == data


def test_passing_refusals_of_the_kernel_are_retried(
    monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    refusals = [errno.EAGAIN, errno.EBUSY, errno.EINTR]
    real = Progress.note_result

    def note_result(self: Progress, result: int) -> object:
        return real(self, -refusals.pop() if refusals else result)

    monkeypatch.setattr(Progress, "note_result", note_result)
    memory = Memory(PAGE)
    engine = UringEngine()
    engine.open([file], [])
    engine.submit([IoRequest(IoOp.READ, 0, 0, memory.address, PAGE, 3)])
    (completion,) = engine.wait(None)
    engine.close()
    assert completion.errno == 0
    assert refusals == []


def test_a_dropped_engine_gives_its_ring_back(file: int) -> None:
    with nothing_left_open():
        engine = UringEngine()
        engine.open([file], [])
        assert "anon_inode:[io_uring]" in {target for _, target in open_files()}
        del engine


def test_files_are_let_go_of_when_it_is_closed() -> None:
    """Not some time later: whoever opens the next swap file needs the space of this one's."""
    witness, file = os.pipe()
    engine = UringEngine()
    engine.open([file], [])
    os.close(file)
    engine.close()
    try:
        assert select.select([witness], [], [], 0)[0] == [witness], "the kernel has the other end"
    finally:
        os.close(witness)


def test_a_missing_function_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ring._QUICK, "io_uring_gone_tomorrow", (None, (ctypes.c_int,)))
    with pytest.raises(ImportError, match="io_uring_gone_tomorrow"):
        ring.load_library()


def progress(op: IoOp = IoOp.READ, nbytes: int = 8 * PAGE) -> Progress:
    return Progress(IoRequest(op, 0, 0, PAGE, nbytes, 9))


def test_short_results_go_on_at_an_aligned_offset() -> None:
    job = progress()
    assert job.note_result(3 * PAGE + 100) is None
    assert job.done == 3 * PAGE
    assert job.note_result(5 * PAGE) is not None


def test_short_results_without_a_page_end_at_last() -> None:
    for op, code in ((IoOp.READ, errno.EIO), (IoOp.WRITE, errno.ENOSPC)):
        job = progress(op)
        ends = [job.note_result(512) for _ in range(MAX_STALLS + 1)]
        assert ends[:-1] == [None] * MAX_STALLS
        assert ends[-1] is not None
        assert (ends[-1].errno, ends[-1].nbytes) == (code, 0)


def test_nothing_moved_means_end_of_file_or_full_disk() -> None:
    for op, code in ((IoOp.READ, errno.EIO), (IoOp.WRITE, errno.ENOSPC)):
        end = progress(op).note_result(0)
        assert end is not None
        assert end.errno == code


def test_endless_refusals_come_back_as_they_are() -> None:
    job, tries = progress(), 0
    while (end := job.note_result(-errno.EAGAIN)) is None:
        assert 0.0 < job.delay() <= 0.01
        tries += 1
    assert end.errno == errno.EAGAIN
    assert tries > 100


def test_a_cancelled_request_is_not_tried_again() -> None:
    for result in (-errno.EAGAIN, PAGE):
        job = progress()
        job.cancelled = True
        end = job.note_result(result)
        assert end is not None
        assert end.errno == errno.ECANCELED
