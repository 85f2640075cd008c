"""The file mover: pipeline, order, urgency, cancelling, endings."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support_copies import SECONDS, HeldFence, LateCopier

import tiermem
from tiermem.core.block import Extent
from tiermem.errors import ClosedError, ConfigError, IntegrityError, StorageError
from tiermem.io import IoOp, IoRequest, ThreadEngine, UringEngine
from tiermem.io.probe import probe_uring
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.helpers import ScriptedHelpers
from tiermem.testing.io import Fault, Memory, ScriptedEngine
from tiermem.transfer.file.helpers import HelperFactory, HelperThreads, threads, usual_count
from tiermem.transfer.file.jobs import Chunk, FileTransfer, Job, JobQueue
from tiermem.transfer.file.mover import FileMover, HostCopier
from tiermem.transfer.file.switching import SWITCH_SECONDS, SwitchInterval

PAGE = 4096
CHUNK = 4 * PAGE
ENGINES = [ThreadEngine, ScriptedEngine] + ([] if probe_uring() else [UringEngine])


def host(nbytes: int) -> torch.Tensor:
    """Page-aligned host memory."""
    return torch.frombuffer(Memory(nbytes).view, dtype=torch.uint8)


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapFile]:
    for name in "ab":
        (tmp_path / name).mkdir()
    with SwapFile([tmp_path / "a", tmp_path / "b"], None, CHUNK) as swap:
        swap.grow(64 * CHUNK)
        yield swap


@pytest.fixture
def scripted(store: SwapFile) -> Iterator[tuple[ScriptedEngine, FileMover]]:
    engine = ScriptedEngine()
    with FileMover(store, lambda: engine, host(4 * CHUNK), CHUNK) as mover:
        yield engine, mover


def ours() -> list[threading.Thread]:
    """The threads of file movers that are alive."""
    return [t for t in threading.enumerate() if t.name.startswith("tiermem-file")]


def finish(mover: FileMover, *transfers: FileTransfer) -> None:
    for transfer in transfers:
        mover.wait(transfer)
        assert transfer.error is None, transfer.error


@pytest.mark.parametrize("factory", ENGINES)
def test_bytes_go_down_and_come_back(store: SwapFile, factory: Callable[[], object]) -> None:
    with FileMover(store, factory, host(4 * CHUNK), CHUNK) as mover:
        sizes = [PAGE, 3 * CHUNK, CHUNK + PAGE, 11 * CHUNK, CHUNK]
        blocks = [(store.allocate(n), noise(n), torch.zeros(n, dtype=torch.uint8)) for n in sizes]
        writes = [mover.write(e, data, label=str(i)) for i, (e, data, _) in enumerate(blocks)]
        reads = [mover.read(e, out, label=str(i)) for i, (e, _, out) in enumerate(blocks)]
        finish(mover, *writes, *reads)
        assert all(torch.equal(data, out) for _, data, out in blocks)
        assert set(mover.poll()) == {*writes, *reads}
        assert mover.poll() == []
        stats = mover.stats()
        assert stats.bytes_read == stats.bytes_written == sum(sizes)
        assert stats.failed == 0
        assert stats.checksum_seconds > 0.0
        assert stats.engine == factory().name
        for transfer in (*writes, *reads):
            assert 0 < transfer.submitted_ns <= transfer.started_ns <= transfer.finished_ns
        assert [t.is_read for t in (writes[0], reads[0])] == [False, True]
        assert "finished" in repr(reads[0])


def test_what_was_waited_for_is_polled(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the wait begins between the mark on a transfer and its place among the ended."""
    engine, mover = scripted
    marked, go_on = threading.Event(), threading.Event()

    class Ended(deque[FileTransfer]):
        def append(self, transfer: FileTransfer) -> None:
            marked.set()
            go_on.wait(SECONDS)
            super().append(transfer)

    class Lock:
        def __init__(self) -> None:
            self.real = threading.RLock()

        def __enter__(self) -> None:
            if threading.current_thread() is threading.main_thread():
                go_on.set()
            self.real.acquire()

        def __exit__(self, *_: object) -> None:
            self.real.release()

    engine.hold()
    transfer = mover.write(store.allocate(CHUNK), noise(CHUNK), label="w")
    assert engine.until_pending(1)
    monkeypatch.setattr(mover._pump.ended, "finished", Ended())
    lock = Lock()
    monkeypatch.setattr(mover._pump.ended, "lock", lock)
    monkeypatch.setattr(mover._pump.ended, "changed", threading.Condition(lock.real))
    engine.release()
    assert marked.wait(SECONDS)
    assert transfer.finished
    mover.wait(transfer)
    polled = mover.poll()
    go_on.set()
    assert polled == [transfer]


def test_without_checking_there_are_no_checksums(store: SwapFile) -> None:
    with FileMover(store, ThreadEngine, host(CHUNK), CHUNK, verify=False) as mover:
        extent, data, out = store.allocate(CHUNK), noise(CHUNK), torch.zeros(CHUNK).byte()
        finish(mover, mover.write(extent, data, label="x"), mover.read(extent, out, label="x"))
        assert torch.equal(data, out)
        assert mover.stats().checksum_seconds == 0.0


def test_a_chunk_larger_than_the_stripes(store: SwapFile) -> None:
    with FileMover(store, ThreadEngine, host(4 * CHUNK), 2 * CHUNK) as mover:
        extent, data, out = store.allocate(5 * CHUNK), noise(5 * CHUNK), host(5 * CHUNK)
        finish(mover, mover.write(extent, data, label="x"), mover.read(extent, out, label="x"))
        assert torch.equal(data, out)


def test_autograd_sees_no_change(store: SwapFile) -> None:
    target = torch.zeros(CHUNK, dtype=torch.uint8)
    version = target._version
    copier = HostCopier()
    fence = copier.to_target(target, noise(CHUNK))
    fence.wait()
    assert fence.done()
    assert target._version == version


def test_never_written_is_an_error(scripted: tuple[ScriptedEngine, FileMover]) -> None:
    _, mover = scripted
    transfer = mover.read(Extent(CHUNK, 2 * CHUNK), host(2 * CHUNK), label="layer.3")
    mover.wait(transfer)
    error = transfer.error
    assert isinstance(error, StorageError)
    assert not isinstance(error, IntegrityError)
    assert "never written" in str(error)
    assert (error.block, error.tier, error.offset, error.nbytes) == ("layer.3", "nvme", 0, CHUNK)
    assert error.path.endswith("/b")
    assert mover.stats().failed == 1


def test_same_bytes_in_the_order_of_submission(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile
) -> None:
    engine, mover = scripted
    extent = store.allocate(6 * CHUNK)
    data = [noise(6 * CHUNK) for _ in range(4)]
    outs = [host(6 * CHUNK) for _ in range(4)]
    engine.hold()
    transfers = []
    for source, out in zip(data, outs, strict=True):
        transfers.append(mover.write(extent, source, label="w"))
        transfers.append(mover.read(extent, out, label="r", urgent=True))
    engine.release()
    finish(mover, *transfers)
    for source, out in zip(data, outs, strict=True):
        assert torch.equal(source, out)


def test_urgent_reads_go_first(scripted: tuple[ScriptedEngine, FileMover], store: SwapFile) -> None:
    engine, mover = scripted
    extents = [store.allocate(4 * CHUNK) for _ in range(3)]
    finish(mover, *(mover.write(e, noise(e.nbytes), label="w") for e in extents))
    engine.log.clear()
    engine.hold()
    plain = [mover.read(e, host(e.nbytes), label="r") for e in extents[:2]]
    assert engine.until_pending(4)
    urgent = mover.read(extents[2], host(4 * CHUNK), label="r", urgent=True)
    engine.release()
    finish(mover, urgent, *plain)
    places = [(r.file, r.offset) for r in engine.log]
    first = {(p.file, p.file_offset) for p in store.pieces(extents[2])}
    assert set(places[4:8]) == first
    assert urgent.finished_ns < plain[1].finished_ns


def test_what_somebody_waits_for_goes_first(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, mover = scripted
    hurry = mover._pump.hurry

    def hurried(transfer: FileTransfer) -> None:
        """Nothing goes on before the pump has been told who is waited for."""
        hurry(transfer)
        engine.release()

    monkeypatch.setattr(mover._pump, "hurry", hurried)
    extents = [store.allocate(8 * CHUNK) for _ in range(3)]
    finish(mover, *(mover.write(e, noise(e.nbytes), label="w") for e in extents))
    engine.hold()
    reads = [mover.read(e, host(e.nbytes), label="r") for e in extents]
    assert engine.until_pending(4)
    finish(mover, reads[2], *reads)
    assert reads[2].finished_ns < reads[1].finished_ns


def test_writes_do_not_starve(scripted: tuple[ScriptedEngine, FileMover], store: SwapFile) -> None:
    engine, mover = scripted
    extents = [store.allocate(20 * CHUNK), store.allocate(CHUNK)]
    finish(mover, *(mover.write(e, noise(e.nbytes), label="w") for e in extents))
    engine.log.clear()
    engine.hold()
    read = mover.read(extents[0], host(20 * CHUNK), label="r")
    assert engine.until_pending(4)
    write = mover.write(extents[1], noise(CHUNK), label="w")
    engine.release()
    with mover._pump.ended.lock:  # waiting through the mover would make them urgent
        assert mover._pump.ended.changed.wait_for(lambda: read.finished and write.finished, SECONDS)
    at = [r.op for r in engine.log].index(IoOp.WRITE)
    assert 4 <= at <= 12


def job(offset: int, pages: int, *, read: bool, urgent: bool = False) -> Job:
    extent = Extent(offset * PAGE, pages * PAGE)
    transfer = FileTransfer(extent, is_read=read, label="", urgent=urgent)
    return Job(transfer, torch.empty(0), [object()] * pages)  # type: ignore[list-item]


def test_what_an_urgent_read_waits_for_becomes_urgent() -> None:
    queue = JobQueue()
    other, write = job(50, 3, read=True), job(0, 1, read=False)
    read = job(0, 1, read=True, urgent=True)
    for each in (other, write, read):
        queue.add(each)
    order = []
    while (taken := queue.next_piece(may_write=True)) is not None:
        order.append(taken[0])
        if taken[0].exhausted:
            queue.remove(taken[0])
    assert order == [write, read, other, other, other]
    assert queue.jobs == {}


def test_writes_wait_when_they_may_have_no_chunk() -> None:
    queue = JobQueue()
    write, read = job(0, 1, read=False), job(9, 1, read=True)
    queue.add(write)
    assert queue.next_piece(may_write=False) is None
    queue.add(read)
    taken = queue.next_piece(may_write=False)
    assert taken is not None
    assert taken[0] is read
    taken = queue.next_piece(may_write=True)
    assert taken is not None
    assert taken[0] is write


def test_a_stopped_job_lets_those_behind_it_go() -> None:
    queue = JobQueue()
    first, second, third = (job(0, 1, read=False) for _ in range(3))
    for each in (first, second, third):
        queue.add(each)
    second.stop(StorageError("cancelled"))
    queue.remove(second)
    queue.next_piece(may_write=True)
    queue.remove(first)
    taken = queue.next_piece(may_write=True)
    assert taken is not None
    assert taken[0] is third


def test_cancelling(scripted: tuple[ScriptedEngine, FileMover], store: SwapFile) -> None:
    engine, mover = scripted
    first, second = store.allocate(12 * CHUNK), store.allocate(CHUNK)
    old = noise(CHUNK)
    finish(
        mover,
        mover.write(first, noise(12 * CHUNK), label="a"),
        mover.write(second, old, label="b"),
    )
    engine.hold()
    under_way = mover.write(first, noise(12 * CHUNK), label="a")
    assert engine.until_pending(3)
    waiting = mover.read(first, host(12 * CHUNK), label="a")
    behind = mover.write(second, noise(CHUNK), label="b")
    for transfer in (waiting, under_way, behind):
        mover.cancel(transfer)
    engine.release()
    for transfer in (waiting, under_way, behind):
        mover.wait(transfer)
        assert isinstance(transfer.error, StorageError)
        assert transfer.error.errno == errno.ECANCELED
    torn = mover.read(first, host(12 * CHUNK), label="a")
    mover.wait(torn)
    assert "never written" in str(torn.error), "half old and half new must not be read as whole"
    whole = mover.read(second, out := host(CHUNK), label="b")
    finish(mover, whole)
    assert torch.equal(out, old), "a write that never began changes nothing"
    mover.cancel(whole)
    assert whole.error is None


def test_closing_with_transfers_in_flight(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile
) -> None:
    engine, mover = scripted
    engine.hold()
    extents = [store.allocate(8 * CHUNK) for _ in range(3)]
    transfers = [mover.write(e, noise(e.nbytes), label="w") for e in extents]
    mover.close()
    mover.close()
    for transfer in transfers:
        mover.wait(transfer)
        assert transfer.error is not None
        assert transfer.error.errno == errno.ECANCELED
    assert len(mover.poll()) == 3
    with pytest.raises(ClosedError):
        mover.read(extents[0], host(8 * CHUNK), label="r")
    with pytest.raises(ClosedError):
        mover.cancel(transfers[0])


@pytest.mark.parametrize("factory", ENGINES)
def test_closing_a_busy_real_engine(store: SwapFile, factory: Callable[[], object]) -> None:
    for _ in range(5):
        mover = FileMover(store, factory, host(8 * CHUNK), CHUNK)
        extent = store.allocate(40 * CHUNK)
        write = mover.write(extent, noise(40 * CHUNK), label="w")
        mover.close()
        assert write.finished
        store.free(extent)


def test_a_forgotten_mover_ends_its_thread(store: SwapFile) -> None:
    mover = FileMover(store, ThreadEngine, host(CHUNK), CHUNK)
    gone, running = weakref.ref(mover), ours()
    assert len(running) == 1 + usual_count()
    del mover
    gc.collect()
    assert gone() is None
    for thread in running:
        thread.join(SECONDS)
    assert ours() == []


def test_a_dead_pump_fails_everything_and_says_why(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile
) -> None:
    engine, mover = scripted
    engine.hold()
    extent = store.allocate(8 * CHUNK)
    transfers = [mover.write(extent, noise(8 * CHUNK), label="w") for _ in range(2)]
    cause = OSError(errno.EBADF, "the ring is gone")
    engine.break_with(cause)
    for transfer in transfers:
        mover.wait(transfer)
    transfers.append(mover.read(extent, host(8 * CHUNK), label="r"))
    for transfer in transfers:
        mover.wait(transfer)
        assert isinstance(transfer.error, StorageError)
        assert transfer.error.__cause__ is cause
        assert "the ring is gone" in str(transfer.error)
    assert len(mover.poll()) == 3


def test_an_engine_that_cannot_be_made_raises_at_once(store: SwapFile) -> None:
    class Refused(ScriptedEngine):
        def open(self, files: object, buffers: object) -> None:
            raise OSError(errno.ENOMEM, "no ring")

    def broken() -> ScriptedEngine:
        raise RuntimeError("no engine")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no ring"):
        FileMover(store, Refused, host(CHUNK), CHUNK)

    class NoThreads(HelperThreads):
        def start(self) -> None:
            self._count = 1
            super().start()
            raise RuntimeError("can't start new thread")

    def none_helps(*_: object) -> HelperThreads:
        raise RuntimeError("no helpers")

    with pytest.raises(RuntimeError, match="no engine"):
        FileMover(store, broken, host(CHUNK), CHUNK)
    with pytest.raises(RuntimeError, match="no helpers"):
        FileMover(store, ThreadEngine, host(CHUNK), CHUNK, helpers=none_helps)
    with pytest.raises(RuntimeError, match="new thread"):
        FileMover(store, ThreadEngine, host(CHUNK), CHUNK, helpers=NoThreads)
    assert set(threading.enumerate()) <= before


def test_what_does_not_fit_is_refused(store: SwapFile) -> None:
    for staging, chunk in (
        (host(CHUNK), CHUNK // 2),
        (host(CHUNK + PAGE), CHUNK),
        (host(CHUNK + PAGE)[1 : CHUNK + 1], CHUNK),
    ):
        with pytest.raises(ConfigError):
            FileMover(store, ThreadEngine, staging, chunk)
    with FileMover(store, ThreadEngine, host(CHUNK), CHUNK) as mover:
        extent = store.allocate(CHUNK)
        for bad in (host(PAGE), torch.zeros(CHUNK), host(2 * CHUNK)[::2], host(CHUNK).view(2, -1)):
            with pytest.raises(ValueError, match=r"uint8|bytes"):
                mover.write(extent, bad, label="w")
        with pytest.raises(ValueError, match="not within"):
            mover.write(Extent(0, 65 * CHUNK), host(65 * CHUNK), label="w")


def test_a_transfer_of_no_bytes_is_done(store: SwapFile) -> None:
    with FileMover(store, ThreadEngine, host(CHUNK), CHUNK) as mover:
        finish(mover, mover.read(Extent(0, 0), torch.empty(0, dtype=torch.uint8), label="none"))


def test_ctrl_c_gets_through_a_wait(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile
) -> None:
    engine, mover = scripted
    engine.hold()
    extent = store.allocate(CHUNK)
    transfer = mover.write(extent, noise(CHUNK), label="w")
    assert engine.until_pending(1)
    main = threading.main_thread().ident
    interrupter = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupter.start()
        mover.wait(transfer)
    interrupter.join()
    engine.release()
    finish(mover, transfer)


def test_the_switch_interval_is_short_only_while_there_is_work(
    scripted: tuple[ScriptedEngine, FileMover], store: SwapFile
) -> None:
    engine, mover = scripted
    usual = sys.getswitchinterval()
    assert usual > SWITCH_SECONDS
    engine.hold()
    transfer = mover.write(store.allocate(CHUNK), noise(CHUNK), label="w")
    assert engine.until_pending(1)
    behind = mover.write(store.allocate(CHUNK), noise(CHUNK), label="w")
    assert engine.until_pending(2), "the round of the first one is over"
    assert sys.getswitchinterval() == SWITCH_SECONDS
    engine.release()
    finish(mover, transfer, behind)
    mover.close()
    assert sys.getswitchinterval() == usual


def test_a_switch_interval_set_meanwhile_is_left_alone() -> None:
    usual, interval = sys.getswitchinterval(), SwitchInterval()
    interval.shorten()
    interval.shorten()
    interval.restore()
    assert sys.getswitchinterval() == SWITCH_SECONDS
    sys.setswitchinterval(0.001)
    interval.restore()
    assert sys.getswitchinterval() == 0.001
    sys.setswitchinterval(usual)


def test_errors_name_everything(store: SwapFile) -> None:
    def fault(request: IoRequest, tries: int) -> Fault | None:
        return Fault(errno=errno.EIO) if request.op is IoOp.READ and request.file == 1 else None

    engine = ScriptedEngine(fault=fault)
    with FileMover(store, lambda: engine, host(2 * CHUNK), CHUNK) as mover:
        extent = store.allocate(4 * CHUNK)
        finish(mover, mover.write(extent, noise(4 * CHUNK), label="w"))
        read = mover.read(extent, host(4 * CHUNK), label="decoder.7")
        mover.wait(read)
        error = read.error
        assert isinstance(error, StorageError)
        assert error.errno == errno.EIO
        assert (error.block, error.tier, error.nbytes) == ("decoder.7", "nvme", CHUNK)
        assert error.path.endswith("/b")
        assert error.offset in (0, CHUNK)
        for part in ("decoder.7", "nvme", "/b", "offset", "errno 5", "Input/output error"):
            assert part in str(error)


# Helpers ---------------------------------------------------------------------------------


class Gate:
    """Blocks helper threads while it is closed; counts the chunks begun and done."""

    def __init__(self, count: int = 1) -> None:
        self.open = threading.Event()
        self.came, self.went = threading.Semaphore(0), threading.Semaphore(0)
        self.count = count

    def helpers(self, work: Callable[[Chunk], None], wake: Callable[[], None]) -> HelperThreads:
        def gated(chunk: Chunk) -> None:
            self.came.release()
            self.open.wait(20.0)
            work(chunk)
            self.went.release()

        return HelperThreads(gated, wake, self.count)


def written(store: SwapFile, nbytes: int) -> tuple[Extent, torch.Tensor]:
    """An extent with noise in it."""
    extent, data = store.allocate(nbytes), noise(nbytes)
    with FileMover(store, ThreadEngine, host(2 * CHUNK), CHUNK) as mover:
        finish(mover, mover.write(extent, data, label="w"))
    return extent, data


def test_the_disk_has_work_while_checksums_are_computed(store: SwapFile) -> None:
    extent, data = written(store, 8 * CHUNK)
    gate, out = Gate(8), host(8 * CHUNK)
    with FileMover(store, ThreadEngine, host(8 * CHUNK), CHUNK, helpers=gate.helpers) as mover:
        read = mover.read(extent, out, label="r")
        for _ in range(8):  # no checksum comes to its end, and yet everything is read
            assert gate.came.acquire(timeout=10.0)
        assert not read.finished
        gate.open.set()
        finish(mover, read)
    assert torch.equal(out, data)


@pytest.mark.parametrize("verify", [True, False])
def test_aligned_host_memory_is_written_from_where_it_lies(store: SwapFile, verify: bool) -> None:
    engine, nbytes = ScriptedEngine(), 5 * CHUNK
    source, out = host(nbytes), host(nbytes)
    source.copy_(noise(nbytes))
    shifted = host(nbytes + PAGE)[64 : 64 + nbytes].copy_(source)
    with FileMover(store, lambda: engine, host(4 * CHUNK), CHUNK, verify=verify) as mover:
        extent = store.allocate(nbytes)
        finish(mover, mover.write(extent, source, label="w"))
        assert {r.address for r in engine.log} == {source.data_ptr() + i * CHUNK for i in range(5)}
        assert mover.stats().bytes_direct == nbytes
        assert mover.stats().copy_seconds == 0.0
        finish(mover, mover.read(extent, out, label="r"))
        assert torch.equal(out, source)
        finish(mover, mover.write(extent, shifted, label="w"))
        stats = mover.stats()
        assert (stats.bytes_direct, stats.bytes_written) == (nbytes, 2 * nbytes)
        assert stats.copy_seconds > 0.0
        finish(mover, mover.read(extent, out.zero_(), label="r"))
        assert torch.equal(out, source)


def test_a_source_that_changed_while_it_was_written_is_never_read_as_whole(
    store: SwapFile,
) -> None:
    engine, gate, source = ScriptedEngine(), Gate(), host(CHUNK)
    gate.open.set()
    with FileMover(store, lambda: engine, host(CHUNK), CHUNK, helpers=gate.helpers) as mover:
        engine.hold()
        extent = store.allocate(CHUNK)
        write = mover.write(extent, source, label="w")
        assert gate.went.acquire(timeout=10.0)
        source[100] += 1
        engine.release()
        finish(mover, write)
        read = mover.read(extent, host(CHUNK), label="r")
        mover.wait(read)
        assert isinstance(read.error, IntegrityError)


def test_a_bit_seen_only_after_the_copy_was_begun(store: SwapFile) -> None:
    extent, data = written(store, 3 * CHUNK)
    bad = store.pieces(extent)[1]

    def fault(request: IoRequest, tries: int) -> Fault | None:
        at_bad = (request.file, request.offset) == (bad.file, bad.file_offset)
        return Fault(flip_bit=77) if at_bad else None

    copier, gate, out = LateCopier(), Gate(), host(3 * CHUNK)
    with FileMover(
        store,
        lambda: ScriptedEngine(fault=fault),
        host(4 * CHUNK),
        CHUNK,
        copier,
        helpers=gate.helpers,
    ) as mover:
        read = mover.read(extent, out, label="layers.4")
        copier.let_go(3)
        assert not torch.equal(out, data), "the copies are over, with the wrong bit"
        assert not read.finished, "and nothing is usable before it is checked"
        gate.open.set()
        mover.wait(read)
        error = read.error
        assert isinstance(error, IntegrityError)
        assert (error.block, error.tier, error.nbytes) == ("layers.4", "nvme", CHUNK)
        assert error.offset == bad.file_offset
        assert error.path == store.folder(bad.file)


def test_a_chunk_is_kept_while_it_is_checked(store: SwapFile) -> None:
    extent, data = written(store, 2 * CHUNK)
    copier, gate, out = LateCopier(), Gate(), host(2 * CHUNK)
    engine = ScriptedEngine()
    with FileMover(
        store, lambda: engine, host(CHUNK), CHUNK, copier, helpers=gate.helpers
    ) as mover:
        read = mover.read(extent, out, label="r")
        copier.let_go(1)
        assert gate.came.acquire(timeout=10.0)
        assert len(engine.log) == 1, "the one chunk is still being checked"
        gate.open.set()
        copier.let_go(1)
        finish(mover, read)
    assert torch.equal(out, data)


def test_closing_waits_for_the_helper_and_drops_what_it_has_not_begun(store: SwapFile) -> None:
    extent, data = written(store, 4 * CHUNK)
    gate, out = Gate(), host(4 * CHUNK)

    class OpenedByClosing(HelperThreads):
        def close(self) -> None:
            self._stopping = True
            gate.open.set()
            super().close()

    def helpers(work: Callable[[Chunk], None], wake: Callable[[], None]) -> HelperThreads:
        return OpenedByClosing(gate.helpers(work, wake)._work, wake, 1)

    mover = FileMover(store, ThreadEngine, host(4 * CHUNK), CHUNK, helpers=helpers)
    read = mover.read(extent, out, label="r")
    assert gate.came.acquire(timeout=10.0)
    mover.close()
    assert gate.went.acquire(blocking=False), "what a helper was at has come to its end"
    assert ours() == []
    assert read.error is not None
    assert read.error.errno == errno.ECANCELED
    same = (out.view(4, CHUNK) == data.view(4, CHUNK)).all(dim=1)
    assert same.sum() == 1, "the rest was left alone"


def test_a_helper_that_fails_ends_the_pump_and_says_why(store: SwapFile) -> None:
    class Broken(HostCopier):
        def to_target(
            self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
        ) -> HeldFence:
            raise MemoryError("no room for a view")

    extent, _ = written(store, 4 * CHUNK)
    with FileMover(store, ThreadEngine, host(2 * CHUNK), CHUNK, Broken()) as mover:
        transfers = [mover.read(extent, host(4 * CHUNK), label="r") for _ in range(2)]
        for transfer in transfers:
            mover.wait(transfer)
            assert isinstance(transfer.error, StorageError)
            assert isinstance(transfer.error.__cause__, MemoryError)
            assert "no room for a view" in str(transfer.error)
        late = mover.write(extent, host(4 * CHUNK), label="w")
        assert late.finished
        assert late.error is not None
    assert ours() == []


@pytest.mark.parametrize("helpers", [threads(1), threads(3), ScriptedHelpers, None])
def test_any_number_of_helpers_does_the_same(
    store: SwapFile, helpers: HelperFactory | None
) -> None:
    sizes = [PAGE, 11 * CHUNK, CHUNK + PAGE, 9 * CHUNK]
    with FileMover(store, ThreadEngine, host(9 * CHUNK), CHUNK, helpers=helpers) as mover:
        blocks = [(store.allocate(n), noise(n), torch.zeros(n, dtype=torch.uint8)) for n in sizes]
        writes = [mover.write(e, data, label="w") for e, data, _ in blocks]
        reads = [mover.read(e, out, label="r") for e, _, out in blocks]
        finish(mover, *writes, *reads)
        assert all(torch.equal(data, out) for _, data, out in blocks)
    assert ours() == []


def test_helpers_go_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, count in ((1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert usual_count() == count


def test_without_an_nvme_tier_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        model = tier.wrap(torch.nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        assert set(threading.enumerate()) == before
