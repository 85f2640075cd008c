"""Disks that fail, files that are damaged, processes that die or fork."""

from __future__ import annotations

import errno
import gc
import linecache
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tiermem.core.block import Extent
from tiermem.errors import ClosedError, IntegrityError, StorageError
from tiermem.io import IoEngine, IoOp, IoRequest, ThreadEngine, UringEngine
from tiermem.io.probe import probe_uring
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Fault, Memory, ScriptedEngine
from tiermem.transfer.file.helpers import threads
from tiermem.transfer.file.mover import Fence, FileMover, FileTransfer, HostCopier

PAGE = 4096
CHUNK = 4 * PAGE
NBYTES = 6 * CHUNK

engines = pytest.mark.parametrize(
    "factory",
    [
        pytest.param(
            UringEngine,
            marks=pytest.mark.skipif(probe_uring() is not None, reason="no io_uring here"),
        ),
        ThreadEngine,
    ],
)


def host(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(Memory(nbytes).view, dtype=torch.uint8)


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapFile]:
    with SwapFile([tmp_path], None, CHUNK) as swap:
        swap.grow(4 * NBYTES)
        yield swap


def run(mover: FileMover, transfer: FileTransfer) -> StorageError | None:
    mover.wait(transfer)
    return transfer.error


@engines
def test_a_bit_flipped_in_the_file_is_seen(
    store: SwapFile, factory: Callable[[], IoEngine], tmp_path: Path
) -> None:
    extent, other = store.allocate(NBYTES), store.allocate(NBYTES)
    data, out = noise(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    with FileMover(store, factory, host(2 * CHUNK), CHUNK) as mover:
        assert run(mover, mover.write(extent, data, label="b")) is None
        assert run(mover, mover.write(other, data, label="other")) is None
        with open(f"/proc/self/fd/{store.fds[0]}", "r+b", buffering=0) as file:
            file.seek(extent.offset + 2 * CHUNK + 77)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
            os.fsync(file.fileno())
        error = run(mover, mover.read(extent, out, label="layers.4"))
        assert isinstance(error, IntegrityError)
        assert (error.block, error.offset, error.nbytes) == ("layers.4", 2 * CHUNK, CHUNK)
        assert error.path == str(tmp_path)
        assert not out[2 * CHUNK : 3 * CHUNK].any(), "wrong bytes must not reach the target"
        assert run(mover, mover.read(other, out, label="other")) is None
        assert torch.equal(out, data)
        assert run(mover, mover.write(extent, data, label="b")) is None
        assert run(mover, mover.read(extent, out, label="b")) is None, "written anew it is whole"


@engines
def test_a_misdirected_write_is_seen(store: SwapFile, factory: Callable[[], IoEngine]) -> None:
    one, two = store.allocate(CHUNK), store.allocate(CHUNK)
    with FileMover(store, factory, host(CHUNK), CHUNK) as mover:
        for extent in (one, two):
            assert run(mover, mover.write(extent, noise(CHUNK), label="b")) is None
        with open(f"/proc/self/fd/{store.fds[0]}", "r+b", buffering=0) as file:
            content = os.pread(file.fileno(), CHUNK, one.offset)
            os.pwrite(file.fileno(), content, two.offset)
            os.fsync(file.fileno())
        assert isinstance(run(mover, mover.read(two, host(CHUNK), label="b")), IntegrityError)


@engines
def test_a_truncated_file_is_an_error(store: SwapFile, factory: Callable[[], IoEngine]) -> None:
    extent = store.allocate(NBYTES)
    with FileMover(store, factory, host(2 * CHUNK), CHUNK) as mover:
        assert run(mover, mover.write(extent, noise(NBYTES), label="b")) is None
        for length in (4 * CHUNK + PAGE + 100, 4 * CHUNK, 0):
            os.ftruncate(store.fds[0], length)
            error = run(mover, mover.read(extent, host(NBYTES), label="b"))
            assert isinstance(error, StorageError)
            assert error.errno == errno.EIO
            assert error.offset >= length // CHUNK * CHUNK


@engines
def test_a_file_that_may_not_grow_reports_efbig(
    tmp_path: Path, factory: Callable[[], IoEngine]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(NBYTES)
        extent = store.allocate(NBYTES)
        with FileMover(store, factory, host(2 * CHUNK), CHUNK) as mover:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, hard))
            try:
                error = run(mover, mover.write(extent, noise(NBYTES), label="b"))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert isinstance(error, StorageError)
            assert error.errno == errno.EFBIG
            assert error.offset >= 2 * CHUNK
            read = run(mover, mover.read(extent, host(NBYTES), label="b"))
            assert isinstance(read, StorageError), "half a write must not be read as a whole"
            assert run(mover, mover.write(extent, noise(NBYTES), label="b")) is None


@engines
def test_misaligned_addresses_are_an_error_not_garbage(
    store: SwapFile, factory: Callable[[], IoEngine]
) -> None:
    if not store.direct:
        pytest.skip("only O_DIRECT needs alignment")
    source, target = Memory(2 * PAGE), Memory(2 * PAGE)
    engine = factory()

    def once(op: IoOp, memory: Memory, at: int, offset: int, nbytes: int) -> int:
        engine.submit([IoRequest(op, 0, offset, memory.address + at, nbytes, 1)])
        (completion,) = engine.wait(60.0)
        return completion.errno

    def content() -> bytes:
        with open(f"/proc/self/fd/{store.fds[0]}", "rb", buffering=0) as file:
            return file.read(2 * PAGE)

    try:
        engine.open(store.fds, [])
        source.view[:] = os.urandom(2 * PAGE)
        assert once(IoOp.WRITE, source, 0, 0, 2 * PAGE) == 0
        expected = bytearray(source.view)
        # Some disks take memory at any address, some file systems anything: then it must be right.
        for at, offset, nbytes in ((0, 1, PAGE), (0, 0, PAGE + 1), (1, 0, PAGE)):
            source.view[:] = os.urandom(2 * PAGE)
            wrote = once(IoOp.WRITE, source, at, offset, nbytes)
            if wrote == 0:
                expected[offset : offset + nbytes] = source.view[at : at + nbytes]
            assert content() == expected
            target.view[:] = bytes(2 * PAGE)
            read = once(IoOp.READ, target, at, offset, nbytes)
            found = expected[offset : offset + nbytes] if read == 0 else bytes(nbytes)
            assert target.view[at : at + nbytes] == found
            assert {wrote, read} <= {0, errno.EINVAL}
    finally:
        engine.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("op", [IoOp.READ, IoOp.WRITE])
def test_one_failing_place_harms_nothing_else(store: SwapFile, code: int, op: IoOp) -> None:
    bad = {4 * CHUNK}

    def fault(request: IoRequest, tries: int) -> Fault | None:
        return Fault(errno=code) if request.op is op and request.offset in bad else None

    extents = [store.allocate(NBYTES // 2) for _ in range(3)]
    blocks = [noise(NBYTES // 2) for _ in extents]
    with FileMover(store, lambda: ScriptedEngine(fault=fault), host(3 * CHUNK), CHUNK) as mover:
        writes = [mover.write(e, b, label="b") for e, b in zip(extents, blocks, strict=True)]
        outs = [host(NBYTES // 2) for _ in extents]
        reads = [mover.read(e, o, label="b") for e, o in zip(extents, outs, strict=True)]
        errors = [run(mover, t) for t in (*writes, *reads)]
        failed = writes[1] if op is IoOp.WRITE else reads[1]
        assert failed.error is not None
        assert (failed.error.errno, failed.error.offset) == (code, 4 * CHUNK)
        assert reads[1].error is not None
        assert errors.count(None) == (4 if op is IoOp.WRITE else 5)
        assert torch.equal(outs[0], blocks[0])
        assert torch.equal(outs[2], blocks[2])
        bad.clear()
        again = [
            mover.write(extents[1], blocks[1], label="b"),
            mover.read(extents[1], outs[1], label="b"),
        ]
        assert [run(mover, t) for t in again] == [None, None]
        assert torch.equal(outs[1], blocks[1])


def test_a_torn_write_is_seen_when_read(store: SwapFile) -> None:
    def fault(request: IoRequest, tries: int) -> Fault | None:
        torn = request.op is IoOp.WRITE and request.offset == CHUNK
        return Fault(torn=2 * PAGE) if torn else None

    extent = store.allocate(NBYTES)
    with FileMover(store, lambda: ScriptedEngine(fault=fault), host(3 * CHUNK), CHUNK) as mover:
        assert run(mover, mover.write(extent, noise(NBYTES), label="b")) is None
        error = run(mover, mover.read(extent, host(NBYTES), label="b"))
        assert isinstance(error, IntegrityError)
        assert error.offset == CHUNK


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR, errno.EBUSY])
def test_a_disk_that_is_never_ready_is_an_error_at_last(store: SwapFile, code: int) -> None:
    engine = ScriptedEngine(fault=lambda request, tries: Fault(errno=code))
    with FileMover(store, lambda: engine, host(CHUNK), CHUNK) as mover:
        error = run(mover, mover.write(store.allocate(CHUNK), noise(CHUNK), label="b"))
        assert isinstance(error, StorageError)
        assert error.errno == code


SERVER = """
    import os, sys, torch
    from pathlib import Path
    from tiermem.io import choose_engine
    from tiermem.storage.swapfile import SwapFile
    from tiermem.testing.io import Memory
    from tiermem.transfer.file.mover import FileMover
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        sys.exit()
    os.environ["TIERMEM_IO_ENGINE"], folder, messages = line.split()
    os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT), 2)
    chunk = 16384
    store = SwapFile([Path(folder)], None, chunk)
    store.grow(64 * chunk)
    staging = torch.frombuffer(Memory(4 * chunk).view, dtype=torch.uint8)
    mover = FileMover(store, choose_engine()[0], staging, chunk)
    extent, data = store.allocate(64 * chunk), torch.zeros(64 * chunk, dtype=torch.uint8)
    print("ready", os.getpid(), flush=True)
    while True:
        mover.wait(mover.write(extent, data, label="b"))
        mover.wait(mover.read(extent, data, label="b"))
"""
"""Imports once, and forks a process for each line of engine, folder and file for messages."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["uring", "threads"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.one_in(2)
def test_a_killed_process_leaves_no_file(
    server: subprocess.Popen[str], tmp_path: Path, name: str, number: int
) -> None:
    folder, messages = tmp_path / "swap", tmp_path / "messages"
    folder.mkdir()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{name} {folder} {messages}\n")
    ready, child = server.stdout.readline().split()
    assert ready == "ready"
    os.kill(int(child), number)
    status = int(server.stdout.readline())
    assert list(folder.iterdir()) == []
    if number == signal.SIGINT:
        assert messages.read_text().rstrip().endswith("KeyboardInterrupt")
        assert status in (-signal.SIGINT, 130)
    else:
        assert status == -signal.SIGKILL


def forked(inside: Callable[[], None]) -> int:
    """Runs code in a forked child; returns its exit status, 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            inside()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@engines
def test_a_forked_child_is_refused_and_harms_nothing(
    store: SwapFile, factory: Callable[[], IoEngine]
) -> None:
    extent, data, out = store.allocate(NBYTES), noise(NBYTES), host(NBYTES)
    mover = FileMover(store, factory, host(3 * CHUNK), CHUNK)
    assert run(mover, mover.write(extent, data, label="b")) is None
    transfer = mover.write(store.allocate(NBYTES), data, label="c")

    def inside() -> None:
        calls: list[Callable[[], object]] = [
            lambda: mover.read(extent, out, label="b"),
            lambda: mover.write(extent, out, label="b"),
            lambda: mover.wait(transfer),
            lambda: mover.cancel(transfer),
            mover.poll,
            mover.stats,
            lambda: store.grow(CHUNK),
            lambda: store.allocate(CHUNK),
            lambda: store.free(extent),
            lambda: store.fds,
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="fork"):
                call()
        mover.close()
        store.close()

    assert forked(inside) == 0
    assert run(mover, transfer) is None
    assert run(mover, mover.read(extent, out, label="b")) is None
    assert torch.equal(out, data)
    mover.close()


def test_a_fork_while_a_helper_works_hangs_nobody(store: SwapFile) -> None:
    came, go = threading.Event(), threading.Event()

    class Slow(HostCopier):
        def to_target(
            self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
        ) -> Fence:
            came.set()
            go.wait(20.0)
            return super().to_target(target, staging, after)

    extent, data, out = store.allocate(NBYTES), noise(NBYTES), host(NBYTES)
    movers = [FileMover(store, ThreadEngine, host(3 * CHUNK), CHUNK, Slow())]
    assert run(movers[0], movers[0].write(extent, data, label="b")) is None
    read = movers[0].read(extent, out, label="b")
    assert came.wait(20.0)

    def inside() -> None:
        movers[0].close()
        movers.clear()
        gc.collect()
        with SwapFile([Path(store.folder(0))], None, CHUNK) as own:
            with FileMover(own, ThreadEngine, host(3 * CHUNK), CHUNK) as mover:
                assert mover.poll() == []

    assert forked(inside) == 0
    go.set()
    assert run(movers[0], read) is None
    assert torch.equal(out, data)
    movers[0].close()


WATCHED = ("transfer/file/mover.py", "transfer/file/pump.py")


class Stop(BaseException):
    """Stands for Ctrl-C."""


def cut_short(call: Callable[[], object], number: int) -> bool:
    """Runs ``call`` and raises before its ``number``-th line in the mover, in this thread.

    Lines that begin a ``with`` are left out: they are told of once more on the way out,
    where the interpreter never looks at signals and the lock would not be given back.
    """
    lines, hit = 0, False

    def local(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines, hit
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not hit and not line.startswith("with "):
            lines += 1
            if lines == number:
                hit = True
                raise Stop
        return local

    def trace(frame: FrameType, _event: str, _: object) -> object:
        file = frame.f_code.co_filename
        return local if file.endswith(WATCHED) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Stop:
        pass
    finally:
        sys.settrace(before)
    return hit


@pytest.fixture
def quick_gc() -> Iterator[None]:
    """Limits ``gc.collect`` to objects made from now on: thousands of times faster."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_gc")
def test_ctrl_c_at_any_line_leaves_neither_a_thread_nor_wrong_bytes(store: SwapFile) -> None:
    extent, data = store.allocate(NBYTES), noise(NBYTES)
    movers: list[FileMover] = []
    reads: list[tuple[FileTransfer, torch.Tensor]] = []

    def work() -> None:
        staging, out = host(3 * CHUNK), host(NBYTES)
        movers.append(FileMover(store, ThreadEngine, staging, CHUNK, helpers=threads(1)))
        mover = movers[-1]
        write = mover.write(extent, data, label="b")
        reads.append((mover.read(extent, out, label="b"), out))
        mover.wait(write)
        mover.cancel(mover.read(extent, host(NBYTES), label="b"))
        mover.wait(reads[-1][0])
        mover.poll()
        mover.stats()
        mover.close()

    number, more = 0, True
    while more:
        number += 1
        more = cut_short(work, number)
        for mover in movers:
            if not mover._closed:  # nothing that is asked for afterwards gets stuck either
                out = host(NBYTES)
                reads.append((mover.read(extent, out, label="b"), out))
                mover.wait(reads[-1][0])
            mover.close()
        for read, out in reads:
            assert read.finished
            assert read.error is not None or torch.equal(out, data)
        movers.clear()
        reads.clear()
        mover = None  # type: ignore[assignment]
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("tiermem-"):
                thread.join(20.0)
                assert not thread.is_alive(), f"cut at line {number}: {thread.name} is left"
    assert number > 50


def test_a_read_of_a_place_outside_is_refused(store: SwapFile) -> None:
    with FileMover(store, ThreadEngine, host(CHUNK), CHUNK) as mover:
        with pytest.raises(ValueError, match="not within"):
            mover.read(Extent(store.capacity, CHUNK), host(CHUNK), label="b")
