"""The file mover beside copies that complete late, as a device's do."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support_copies import SECONDS, LateCopier
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.core.block import Extent
from tiermem.io import IoOp, IoRequest, ThreadEngine
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Fault, Memory, ScriptedEngine
from tiermem.transfer.file.mover import FileMover

PAGE = 4096
CHUNK = 4 * PAGE


def host(nbytes: int) -> torch.Tensor:
    """Page-aligned host memory."""
    return torch.frombuffer(Memory(nbytes).view, dtype=torch.uint8)


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)


def store_away(mover: FileMover, copier: LateCopier, extent: Extent, data: torch.Tensor) -> None:
    """Writes an extent, letting the copies into staging end."""
    write = mover.write(extent, data, label="w")
    copier.let_go(data.numel() // CHUNK)
    mover.wait(write)
    assert write.error is None


def test_chunks_are_kept_until_their_late_copies_are_done(tmp_path: Path) -> None:
    copier = LateCopier()
    data, out = noise(9 * CHUNK), host(9 * CHUNK)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(data.numel())
        extent = store.allocate(data.numel())
        with FileMover(store, ThreadEngine, host(3 * CHUNK), CHUNK, copier) as mover:
            store_away(mover, copier, extent, data)
            read = mover.read(extent, out, label="r")
            copier.until_asked(3)
            assert not read.finished
            copier.let_go(9)
            mover.wait(read)
            assert read.error is None
    assert torch.equal(data, out)


def test_closing_waits_for_late_copies(tmp_path: Path) -> None:
    copier = LateCopier()
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(3 * CHUNK)
        mover = FileMover(store, ThreadEngine, host(4 * CHUNK), CHUNK, copier)
        write = mover.write(store.allocate(3 * CHUNK), noise(3 * CHUNK), label="w")
        fences = copier.until_asked(3)
        mover._pump.ask_to_close()
        for fence in fences:  # the pump goes on to its end, and there waits for each
            assert fence.waited.wait(SECONDS)
            assert not write.finished
            fence.let_go()
        mover.close()
        assert write.error is not None


def test_a_read_ends_when_streams_can_wait_for_the_rest_of_it(tmp_path: Path) -> None:
    """Its chunks are used again when their copies are over, and the target is let go at once."""
    copier = LateCopier(streamed=True)
    data = noise(3 * CHUNK)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(data.numel())
        extent = store.allocate(data.numel())
        with FileMover(store, ThreadEngine, host(3 * CHUNK), CHUNK, copier) as mover:
            store_away(mover, copier, extent, data)
            out, later = host(3 * CHUNK), host(3 * CHUNK)
            first = mover.read(extent, out, label="first")
            mover.wait(first)
            fences = copier.until_asked(3)
            assert first.error is None and not out.any()
            assert first.event is fences[-1]
            second = mover.read(extent, later, label="second")
            for number, fence in enumerate(fences):
                assert len(copier.fences) <= 3 + number  # no chunk for the next piece
                fence.let_go()
                copier.until_asked(4 + number)
            mover.wait(second)
            assert torch.equal(out, data) and not later.any()
            gone = StorageWeakRef(out.untyped_storage())
            del out, fences, fence
            first.event = None
            copier.let_go(3)
            copier.fences.clear()
            assert gone.expired(), "the mover holds a target that is not its any more"
            assert torch.equal(later, data)


def test_a_read_that_fails_ends_when_its_copies_are_over(tmp_path: Path) -> None:
    """No thread writes to the target afterwards, whatever becomes of it."""
    copier = LateCopier(streamed=True)
    reads: list[int] = []

    def fault(request: IoRequest, tries: int) -> Fault | None:
        if request.op is IoOp.READ:
            reads.append(request.offset)
        return Fault(errno=errno.EIO) if len(reads) == 2 else None

    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(2 * CHUNK)
        extent = store.allocate(2 * CHUNK)
        engine = ScriptedEngine(fault=fault)
        with FileMover(store, lambda: engine, host(3 * CHUNK), CHUNK, copier) as mover:
            store_away(mover, copier, extent, noise(2 * CHUNK))
            read = mover.read(extent, host(2 * CHUNK), label="r")
            (fence,) = copier.until_asked(1)
            assert not read.finished
            fence.let_go()
            mover.wait(read)
            assert read.error is not None and read.error.errno == errno.EIO


def test_a_read_goes_on_while_writes_wait_for_the_device(tmp_path: Path) -> None:
    copier = LateCopier()
    data, out = noise(CHUNK), host(CHUNK)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(4 * CHUNK)
        extent, other = store.allocate(CHUNK), store.allocate(3 * CHUNK)
        with FileMover(store, ThreadEngine, host(4 * CHUNK), CHUNK, copier) as mover:
            store_away(mover, copier, extent, data)
            write = mover.write(other, noise(3 * CHUNK), label="w")
            copier.until_asked(3)
            read = mover.read(extent, out, label="r")
            copier.until_asked(4)
            copier.let_go(1)
            mover.wait(read)
            assert not write.finished and torch.equal(out, data)
            copier.let_go(3)
            mover.wait(write)
            assert read.error is None and write.error is None


def test_a_read_may_begin_before_it_has_a_target(tmp_path: Path) -> None:
    """Half the chunks are the most it takes; what has a target goes past it."""
    copier = LateCopier(streamed=True)
    data, other = noise(4 * CHUNK), noise(CHUNK)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(5 * CHUNK)
        extents = store.allocate(4 * CHUNK), store.allocate(CHUNK)
        with FileMover(store, ThreadEngine, host(4 * CHUNK), CHUNK, copier) as mover:
            for extent, source in zip(extents, (data, other), strict=True):
                store_away(mover, copier, extent, source)
            parked = mover.park(extents[0], label="parked")
            mover.rest(parked)
            assert parked.rests and not parked.finished
            assert mover.stats().bytes_read == 2 * CHUNK
            out, beside = host(4 * CHUNK), host(CHUNK)
            read = mover.read(extents[1], beside, label="beside")
            mover.wait(read)
            copier.let_go(1)
            assert torch.equal(beside, other) and not copier.fences
            assert mover.land(parked, out, urgent=True) is parked
            copier.let_go(4)
            mover.wait(parked)
            assert parked.error is None and parked.rested_ns > 0
            assert torch.equal(out, data)
            assert mover.stats().bytes_read == 5 * CHUNK


def test_a_parked_read_gives_way_to_a_write_of_its_bytes(tmp_path: Path) -> None:
    copier = LateCopier()
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(3 * CHUNK)
        extent = store.allocate(3 * CHUNK)
        with FileMover(store, ThreadEngine, host(4 * CHUNK), CHUNK, copier) as mover:
            for _ in range(2):
                parked = mover.park(extent, label="parked")
                store_away(mover, copier, extent, noise(3 * CHUNK))
                mover.wait(parked)
                assert parked.error is not None
                mover.land(parked, host(3 * CHUNK))  # too late, and no harm
            given_up = mover.park(extent, label="parked")
            mover.rest(given_up)
            mover.cancel(given_up)
            mover.wait(given_up)
            assert given_up.error is not None and given_up.error.errno == errno.ECANCELED
            left = mover.park(extent, label="left")
            mover.rest(left)
        assert left.error is not None, "closing ends it"


def test_host_memory_has_nothing_to_park(tmp_path: Path) -> None:
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(CHUNK)
        with FileMover(store, ThreadEngine, host(2 * CHUNK), CHUNK) as mover:
            assert not mover.parks
            with pytest.raises(ValueError, match="nothing to park"):
                mover.park(store.allocate(CHUNK), label="b")


def test_a_parked_read_rests_though_no_chunk_is_spare(tmp_path: Path) -> None:
    """One chunk is its own, the other is still copied out of by a read that has ended."""
    copier = LateCopier(streamed=True)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(3 * CHUNK)
        extents = store.allocate(2 * CHUNK), store.allocate(CHUNK)
        with FileMover(store, ThreadEngine, host(2 * CHUNK), CHUNK, copier) as mover:
            for extent in extents:
                store_away(mover, copier, extent, noise(extent.nbytes))
            read = mover.read(extents[1], host(CHUNK), label="r")
            mover.wait(read)
            parked = mover.park(extents[0], label="parked")
            mover.rest(parked)
            assert not parked.finished and len(copier.fences) == 1
            copier.let_go(1)


def test_what_has_not_been_told_to_have_ended_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``wait_all`` asks in the middle of an end: neither an error, nor over too early."""
    seen: list[tuple[bool, bool]] = []
    jobs: list[Any] = []
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(CHUNK)
        extent = store.allocate(CHUNK)
        with FileMover(store, ThreadEngine, host(2 * CHUNK), CHUNK) as mover:
            pump = mover._pump
            ended, start_job = pump.pieces._ended, pump.start_job

            def tell(transfer: Any, error: Any) -> None:
                seen.append((transfer.finished, pump.at_work()))
                ended(transfer, error)

            def start(job: Any) -> bool:
                jobs.append(job)
                return start_job(job)

            monkeypatch.setattr(pump.pieces, "_ended", tell)
            monkeypatch.setattr(pump, "start_job", start)
            write = mover.write(extent, noise(CHUNK), label="w")
            mover.wait_all()
            assert write.finished and seen == [(False, True)]
            assert jobs[0].tensor is None, "a look at the job from elsewhere finds no target"
            mover.wait_all()
            assert not pump.at_work()


def test_a_parked_read_that_goes_on_or_has_a_target_rests_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = LateCopier(streamed=True)
    rested: list[tuple[str, bool]] = []
    again = threading.Event()
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(3 * CHUNK)
        extents = store.allocate(CHUNK), store.allocate(2 * CHUNK)
        with FileMover(store, ThreadEngine, host(4 * CHUNK), CHUNK, copier) as mover:
            rests = mover._pump.pieces._rests

            def note(transfer: Any) -> None:
                rested.append((transfer.label, transfer.rests))
                rests(transfer)
                if len(rested) == 3:
                    again.set()

            for extent in extents:
                store_away(mover, copier, extent, noise(extent.nbytes))
            monkeypatch.setattr(mover._pump.pieces, "_rests", note)
            first = mover.park(extents[0], label="first")
            mover.rest(first)
            second = mover.park(extents[1], label="second")
            mover.rest(second)  # half the chunks wait for targets
            mover.land(first, host(CHUNK))
            copier.let_go(1)
            mover.wait(first)
            assert not first.rests
            assert again.wait(SECONDS), "the second has gone on"
            mover.land(second, host(2 * CHUNK))
            copier.let_go(2)
            mover.wait(second)
            assert not second.rests
    assert rested == [("first", False), ("second", False), ("second", False)]
