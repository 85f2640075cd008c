"""The file mover against a dict of bytes, under random orders, short results and faults.

Disk, checksums and copies come to their ends in any order; a copy may be begun before its
bytes are known to be right, as those to a GPU are.
"""

from __future__ import annotations

import errno
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples

from tiermem.core.block import Extent
from tiermem.errors import IntegrityError, StorageError
from tiermem.io import IoEngine, IoOp, IoRequest, choose_engine
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.helpers import ScriptedHelpers
from tiermem.testing.io import Fault, Memory, ScriptedEngine
from tiermem.transfer.driver import Signal
from tiermem.transfer.file.helpers import HelperFactory, threads
from tiermem.transfer.file.jobs import Chunk
from tiermem.transfer.file.mover import ChunkCopier, FileMover, FileTransfer

PAGE = 4096
CHUNK = 2 * PAGE
SLOTS = 5
PATIENCE = 4  # tries after which one request is left alone: endless trouble is an error
SIZES = [PAGE, CHUNK, CHUNK + PAGE, 4 * CHUNK, 5 * CHUNK + PAGE]

steps = st.lists(
    st.tuples(st.sampled_from(["write", "read", "urgent"]), st.integers(0, SLOTS - 1)),
    min_size=1,
    max_size=25,
)


class Unlucky:
    """Faults drawn from a seed.

    Args:
        seed: Of the draw.
        rate: Share of tries that go wrong.
        kinds: Names of what may go wrong.
    """

    def __init__(self, seed: int, rate: float, kinds: list[str]) -> None:
        self.rng = random.Random(seed)
        self.rate = rate
        self.kinds = kinds

    def __call__(self, request: IoRequest, tries: int) -> Fault | None:
        if tries >= PATIENCE or self.rng.random() >= self.rate:
            return None
        match self.rng.choice(self.kinds):
            case "short":
                return Fault(short=self.rng.randrange(1, request.nbytes))
            case "again":
                code = self.rng.choice([errno.EAGAIN, errno.EINTR, errno.EBUSY])
                return Fault(errno=code)
            case "fail":
                return Fault(errno=self.rng.choice([errno.EIO, errno.ENOSPC]))
            case "torn" if request.op is IoOp.WRITE:
                return Fault(torn=self.rng.randrange(0, request.nbytes))
            case "flip":
                return Fault(flip_bit=self.rng.randrange(1 << 20))
        return None


class LateFence:
    """A copy that is made when it pleases: at some look, or when it is waited for."""

    event: Signal | None = None

    def __init__(
        self, target: torch.Tensor, copy: Callable[[], object], chance: Callable[[], bool]
    ) -> None:
        self.target = target
        self.copy: Callable[[], object] | None = copy
        self.chance = chance

    def done(self) -> bool:
        if self.copy is not None and self.chance():
            self.wait()
        return self.copy is None

    def wait(self) -> None:
        if self.copy is not None:
            self.copy()
            self.copy = None


class LateCopier:
    """Copies that run by themselves, as a GPU's do; they end in any order.

    Args:
        rng: Decides when.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fences: list[Any] = []

    def chance(self) -> bool:
        return self.rng.random() < 0.3

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
    ) -> Any:
        fence = LateFence(target, lambda: target.copy_(staging), self.chance)
        self.fences.append(fence)
        return fence

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Any:
        return self.to_target(staging, source)


class StreamedFence:
    """A copy of a stream, and its event: those before it are made first."""

    waiter = -1

    def __init__(self, copier: StreamedCopier, number: int, target: torch.Tensor) -> None:
        self.copier = copier
        self.number = number
        self.target = target

    @property
    def event(self) -> StreamedFence:
        return self

    @property
    def copy(self) -> Callable[[], object] | None:
        return self.copier.copies[self.number]

    def done(self) -> bool:
        return self.copier.run_to(self.number, looks=1)

    def wait(self) -> None:
        self.copier.run_to(self.number)

    synchronize = wait


class StreamedCopier(LateCopier):
    """Copies that streams wait for: one after the other, and only when they like."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.copies: list[Callable[[], object] | None] = []
        self._lock = threading.Lock()
        self._made = 0

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
    ) -> StreamedFence:
        with self._lock:
            fence = StreamedFence(self, len(self.fences), target)
            self.copies.append(lambda: target.copy_(staging))
            self.fences.append(fence)
        return fence

    def run_to(self, number: int, looks: int | None = None) -> bool:
        """Makes copies up to one; of a look, perhaps the next one. Returns whether it is made."""
        with self._lock:
            while self._made <= number and looks != 0:
                if looks is not None:
                    looks -= 1
                    if not self.chance():
                        continue
                copy = self.copies[self._made]
                assert copy is not None
                copy()
                self.copies[self._made] = None
                self._made += 1
            return self._made > number


Copier = type[LateCopier] | None
copiers: st.SearchStrategy[Copier] = st.sampled_from([None, LateCopier, StreamedCopier])


def scripted_helpers(
    rng: random.Random, fail: Callable[[Chunk], BaseException | None] | None = None
) -> HelperFactory:
    """Helpers that do their work in any order, and now and then leave it for later."""

    def choose(count: int) -> int:
        return -1 if rng.random() < 0.4 else rng.randrange(count)

    return partial(ScriptedHelpers, choose=choose, fail=fail)


Asked = tuple[str, int, FileTransfer, torch.Tensor]


def play(
    script: list[tuple[str, int]],
    seed: int,
    engine: IoEngine,
    chunks: int,
    copier: ChunkCopier | None = None,
    helpers: HelperFactory | None = None,
    closed_after: int | None = None,
) -> list[Asked]:
    """Runs a script and compares every read with what was last written whole.

    Args:
        script: What is asked for, in order.
        seed: Of the data.
        engine: Does the I/O.
        chunks: Staging chunks.
        copier: Of the mover.
        helpers: Of the mover.
        closed_after: Transfers to wait for before the mover is closed; all of them if None.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        with SwapFile([Path(folder)] * 2, None, CHUNK) as store:
            store.grow(sum(SIZES))
            extents = [store.allocate(n) for n in SIZES]
            staging = torch.frombuffer(Memory(chunks * CHUNK).view, dtype=torch.uint8)
            with FileMover(store, lambda: engine, staging, CHUNK, copier, helpers=helpers) as mover:
                asked: list[Asked] = []
                parked: list[Asked] = []
                for kind, slot in script:
                    if kind == "cancel":
                        if asked:
                            mover.cancel(rng.choice(asked)[2])
                    elif kind == "land":
                        if parked:
                            _land(mover, parked.pop(rng.randrange(len(parked))), rng)
                    else:
                        asked.append(_ask(mover, kind, slot, extents, rng))
                        if kind == "park":
                            parked.append(asked[-1])
                if closed_after is None:
                    while parked:
                        mover.rest(parked[-1][2])
                        _land(mover, parked.pop(), rng)
                nowhere = [entry[2] for entry in parked]
                for _, _, transfer, tensor in asked[:closed_after]:
                    if transfer in nowhere:
                        continue  # it waits for a target
                    mover.wait(transfer)
                    if transfer.error is not None:
                        assert not _under_way(copier, tensor), "copies go on after an error"
                    elif transfer.event is not None:
                        transfer.event.synchronize()
                if closed_after is not None:
                    mover.close()
                    staging.fill_(0xA5)
                assert len(mover.poll()) == len(asked)
                assert all(transfer.finished for _, _, transfer, _ in asked)
            assert not mover._pump._thread.is_alive()
            if closed_after is not None:
                assert bool((staging == 0xA5).all()), "staging was touched after the end"
    if isinstance(copier, LateCopier):
        assert all(fence.copy is None for fence in copier.fences)
    _compare(asked)
    return asked


def _ask(
    mover: FileMover, kind: str, slot: int, extents: list[Extent], rng: random.Random
) -> Asked:
    nbytes = SIZES[slot]
    if kind == "write":
        memory: Memory | bytearray = Memory(nbytes) if rng.random() < 0.5 else bytearray(nbytes)
        buffer = memory.view if isinstance(memory, Memory) else memory
        buffer[:] = rng.randbytes(nbytes)  # aligned, and so written from there, or not
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        return kind, slot, mover.write(extents[slot], data, label=f"slot {slot}"), data
    out = torch.zeros(nbytes, dtype=torch.uint8)
    if kind == "park":
        return kind, slot, mover.park(extents[slot], label=f"slot {slot}"), out
    urgent = kind == "urgent"
    return kind, slot, mover.read(extents[slot], out, label=f"slot {slot}", urgent=urgent), out


def _land(mover: FileMover, entry: Asked, rng: random.Random) -> None:
    """Gives a read its target, or gives it up."""
    _, _, transfer, out = entry
    if rng.random() < 0.8:
        mover.land(transfer, out, urgent=rng.random() < 0.5)
    else:
        mover.cancel(transfer)


def _under_way(copier: ChunkCopier | None, tensor: torch.Tensor) -> bool:
    """Whether something has still to be copied into a target."""
    if not isinstance(copier, LateCopier):
        return False
    storage = tensor.untyped_storage().data_ptr()
    mine = [f for f in copier.fences if f.target.untyped_storage().data_ptr() == storage]
    return any(fence.copy is not None for fence in mine)


def _compare(asked: list[Asked]) -> None:
    oracle: dict[int, bytes | None] = {}
    for kind, slot, transfer, tensor in asked:
        error = transfer.error
        cancelled = isinstance(error, StorageError) and error.errno == errno.ECANCELED
        if kind == "write" and not cancelled:  # one that was cancelled in time changes nothing
            oracle[slot] = bytes(tensor.numpy()) if error is None else None
        elif kind != "write" and error is None:
            assert oracle.get(slot) is not None, "read back what was never written whole"
            assert bytes(tensor.numpy()) == oracle[slot]
        if error is not None:
            assert isinstance(error, StorageError)
            assert error.block == f"slot {slot}"
            ended = "closed" in str(error) or "stopped" in str(error)
            assert ended or error.path
            assert ended or error.offset >= 0
        if kind != "write" and oracle.get(slot) is None:
            assert error is not None


@settings(max_examples=examples(100))
@given(steps, st.integers(0, 2**32), st.integers(1, 6))
def test_any_order_with_passing_trouble_changes_no_byte(
    script: list[tuple[str, int]], seed: int, chunks: int
) -> None:
    order = random.Random(seed)
    engine = ScriptedEngine(order.randrange, Unlucky(seed, 0.4, ["short", "again"]))
    script = [("write", slot) for slot in range(SLOTS)] + script
    asked = play(script, seed, engine, chunks)
    assert [transfer.error for _, _, transfer, _ in asked] == [None] * len(script)


@settings(max_examples=examples(100))
@given(steps, st.integers(0, 2**32), st.integers(1, 6), st.floats(0.02, 0.5))
def test_faults_are_errors_or_harmless_but_never_wrong_bytes(
    script: list[tuple[str, int]], seed: int, chunks: int, rate: float
) -> None:
    order = random.Random(seed)
    kinds = ["short", "again", "fail", "torn", "flip"]
    play(script, seed, ScriptedEngine(order.randrange, Unlucky(seed, rate, kinds)), chunks)


def crew(seed: int, late: Copier) -> tuple[ChunkCopier | None, HelperFactory]:
    """Returns a copier, late or the default, and helpers of any order."""
    rng = random.Random(seed)
    return late(rng) if late else None, scripted_helpers(rng)


@settings(max_examples=examples(80))
@given(steps, st.integers(0, 2**32), st.integers(1, 9), copiers)
def test_any_order_of_disk_checksum_and_copy_changes_no_byte(
    script: list[tuple[str, int]], seed: int, chunks: int, late: Copier
) -> None:
    engine = ScriptedEngine(random.Random(seed).randrange, Unlucky(seed, 0.4, ["short", "again"]))
    script = [("write", slot) for slot in range(SLOTS)] + script
    asked = play(script, seed, engine, chunks, *crew(seed, late))
    assert [transfer.error for _, _, transfer, _ in asked] == [None] * len(script)


@settings(max_examples=examples(80))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "urgent", "cancel"]), st.integers(0, SLOTS - 1)
        ),
        min_size=1,
        max_size=25,
    ),
    st.integers(0, 2**32),
    st.integers(1, 9),
    copiers,
    st.floats(0.0, 0.3),
    st.one_of(st.none(), st.integers(0, 10)),
)
def test_faults_cancelling_and_closing_in_any_state_leave_no_wrong_bytes(
    script: list[tuple[str, int]],
    seed: int,
    chunks: int,
    late: Copier,
    rate: float,
    closed_after: int | None,
) -> None:
    kinds = ["short", "again", "fail", "torn", "flip"]
    engine = ScriptedEngine(random.Random(seed).randrange, Unlucky(seed, rate, kinds))
    script = [("write", slot) for slot in range(SLOTS)] + script
    play(script, seed, engine, chunks, *crew(seed, late), closed_after)


@settings(max_examples=examples(80))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "urgent", "cancel", "park", "park", "land"]),
            st.integers(0, SLOTS - 1),
        ),
        min_size=1,
        max_size=25,
    ),
    st.integers(0, 2**32),
    st.integers(2, 9),
    st.sampled_from([LateCopier, StreamedCopier]),
    st.sampled_from([0.0, 0.0, 0.1, 0.3]),
    st.one_of(st.none(), st.integers(0, 10)),
    st.booleans(),
)
def test_reads_that_begin_without_a_target_hold_nobody_up(
    script: list[tuple[str, int]],
    seed: int,
    chunks: int,
    late: Copier,
    rate: float,
    closed_after: int | None,
    real: bool,
) -> None:
    """Any number of them; those that meet a write of the same bytes are cancelled."""
    kinds = ["short", "again", "fail", "torn", "flip"]
    engine = ScriptedEngine(random.Random(seed).randrange, Unlucky(seed, rate, kinds))
    copier, helpers = crew(seed, late)
    script = [("write", slot) for slot in range(SLOTS)] + script
    asked = play(
        script, seed, engine, chunks, copier, threads(2) if real else helpers, closed_after
    )
    cancelled = any(kind == "cancel" for kind, _ in script)
    if not (rate or cancelled) and closed_after is None:
        failed = [(kind, transfer.error) for kind, _, transfer, _ in asked if transfer.error]
        assert all(k == "park" and e.errno == errno.ECANCELED for k, e in failed)


@settings(max_examples=examples(50))
@given(steps, st.integers(0, 2**32), st.integers(1, 9), copiers, st.integers(0, 40))
def test_a_helper_that_fails_ends_every_transfer_and_leaves_no_wrong_bytes(
    script: list[tuple[str, int]], seed: int, chunks: int, late: Copier, lasts: int
) -> None:
    left = lasts

    def fail(chunk: Chunk) -> BaseException | None:
        nonlocal left
        left -= 1
        return MemoryError("no room for a copy") if left < 0 else None

    rng = random.Random(seed)
    copier = late(rng) if late else None
    script = [("write", slot) for slot in range(SLOTS)] + script
    play(
        script,
        seed,
        ScriptedEngine(rng.randrange),
        chunks,
        copier,
        scripted_helpers(rng, fail),
    )


@settings(max_examples=examples(40))
@given(
    steps,
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.sampled_from(["uring", "threads"]),
    st.integers(1, 3),
    copiers,
    st.one_of(st.none(), st.integers(0, 10)),
)
def test_the_real_engines_and_threads_change_no_byte(
    script: list[tuple[str, int]],
    seed: int,
    chunks: int,
    name: str,
    count: int,
    late: Copier,
    closed_after: int | None,
) -> None:
    script = [("write", slot) for slot in range(SLOTS)] + script
    copier = late(random.Random(seed)) if late else None
    engine = choose_engine(name)[0]()
    asked = play(script, seed, engine, chunks, copier, threads(count), closed_after)
    assert not any("file-helper" in thread.name for thread in threading.enumerate())
    if closed_after is not None:
        return
    assert [transfer.error for _, _, transfer, _ in asked] == [None] * len(script)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.integers(0, 8 * sum(SIZES)), copiers)
def test_every_flipped_bit_is_seen(seed: int, bit: int, late: Copier) -> None:
    def fault(request: IoRequest, tries: int) -> Fault | None:
        return Fault(flip_bit=bit) if request.op is IoOp.READ else None

    with tempfile.TemporaryDirectory() as folder:
        with SwapFile([Path(folder)], None, CHUNK) as store:
            store.grow(CHUNK)
            extent = store.allocate(CHUNK)
            staging = torch.frombuffer(Memory(CHUNK).view, dtype=torch.uint8)
            copier, helpers = crew(seed, late)
            with FileMover(
                store,
                lambda: ScriptedEngine(fault=fault),
                staging,
                CHUNK,
                copier,
                helpers=helpers,
            ) as mover:
                data = random.Random(seed).randbytes(CHUNK)
                source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                out = torch.zeros(CHUNK, dtype=torch.uint8)
                write = mover.write(extent, source, label="x")
                read = mover.read(extent, out, label="x")
                mover.wait(read)
    assert write.error is None
    assert isinstance(read.error, IntegrityError)
    if not late:
        assert not out.any(), "wrong bytes must not reach a target in host memory"
