"""The file mover against a dict of bytes, under random orders, short results and faults."""

from __future__ import annotations

import errno
import random
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.core.block import Extent
from tiermem.errors import IntegrityError, StorageError
from tiermem.io import IoEngine, IoOp, IoRequest, choose_engine
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Fault, Memory, ScriptedEngine
from tiermem.transfer.filemover import FileMover, FileTransfer

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


Asked = tuple[str, int, FileTransfer, torch.Tensor]


def play(script: list[tuple[str, int]], seed: int, engine: IoEngine, chunks: int) -> list[Asked]:
    """Runs a script and compares every read with what was last written whole."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        with SwapFile([Path(folder)] * 2, None, CHUNK) as store:
            store.grow(sum(SIZES))
            extents = [store.allocate(n) for n in SIZES]
            staging = torch.frombuffer(Memory(chunks * CHUNK).view, dtype=torch.uint8)
            with FileMover(store, lambda: engine, staging, CHUNK) as mover:
                asked = [_ask(mover, kind, slot, extents, rng) for kind, slot in script]
                for _, _, transfer, _ in asked:
                    mover.wait(transfer)
                assert len(mover.poll()) == len(asked)
    _compare(asked)
    return asked


def _ask(
    mover: FileMover, kind: str, slot: int, extents: list[Extent], rng: random.Random
) -> Asked:
    nbytes = SIZES[slot]
    if kind == "write":
        data = torch.frombuffer(bytearray(rng.randbytes(nbytes)), dtype=torch.uint8)
        return kind, slot, mover.write(extents[slot], data, label=f"slot {slot}"), data
    out = torch.zeros(nbytes, dtype=torch.uint8)
    urgent = kind == "urgent"
    return kind, slot, mover.read(extents[slot], out, label=f"slot {slot}", urgent=urgent), out


def _compare(asked: list[Asked]) -> None:
    oracle: dict[int, bytes | None] = {}
    for kind, slot, transfer, tensor in asked:
        error = transfer.error
        if kind == "write":
            oracle[slot] = bytes(tensor.numpy()) if error is None else None
        elif error is None:
            assert oracle.get(slot) is not None, "read back what was never written whole"
            assert bytes(tensor.numpy()) == oracle[slot]
        if error is not None:
            assert isinstance(error, StorageError)
            assert error.block == f"slot {slot}"
            assert error.path
            assert error.offset >= 0
        if kind != "write" and oracle.get(slot) is None:
            assert error is not None


@settings(max_examples=400)
@given(steps, st.integers(0, 2**32), st.integers(1, 6))
def test_any_order_with_passing_trouble_changes_no_byte(
    script: list[tuple[str, int]], seed: int, chunks: int
) -> None:
    order = random.Random(seed)
    engine = ScriptedEngine(order.randrange, Unlucky(seed, 0.4, ["short", "again"]))
    script = [("write", slot) for slot in range(SLOTS)] + script
    asked = play(script, seed, engine, chunks)
    assert [transfer.error for _, _, transfer, _ in asked] == [None] * len(script)


@settings(max_examples=400)
@given(steps, st.integers(0, 2**32), st.integers(1, 6), st.floats(0.02, 0.5))
def test_faults_are_errors_or_harmless_but_never_wrong_bytes(
    script: list[tuple[str, int]], seed: int, chunks: int, rate: float
) -> None:
    order = random.Random(seed)
    kinds = ["short", "again", "fail", "torn", "flip"]
    play(script, seed, ScriptedEngine(order.randrange, Unlucky(seed, rate, kinds)), chunks)


@settings(max_examples=40)
@given(steps, st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["uring", "threads"]))
def test_the_real_engines_change_no_byte(
    script: list[tuple[str, int]], seed: int, chunks: int, name: str
) -> None:
    script = [("write", slot) for slot in range(SLOTS)] + script
    asked = play(script, seed, choose_engine(name)[0](), chunks)
    assert [transfer.error for _, _, transfer, _ in asked] == [None] * len(script)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 8 * sum(SIZES)))
def test_every_flipped_bit_is_seen(seed: int, bit: int) -> None:
    def fault(request: IoRequest, tries: int) -> Fault | None:
        return Fault(flip_bit=bit) if request.op is IoOp.READ else None

    with tempfile.TemporaryDirectory() as folder:
        with SwapFile([Path(folder)], None, CHUNK) as store:
            store.grow(CHUNK)
            extent = store.allocate(CHUNK)
            staging = torch.frombuffer(Memory(CHUNK).view, dtype=torch.uint8)
            with FileMover(store, lambda: ScriptedEngine(fault=fault), staging, CHUNK) as mover:
                data = random.Random(seed).randbytes(CHUNK)
                source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                out = torch.zeros(CHUNK, dtype=torch.uint8)
                write = mover.write(extent, source, label="x")
                read = mover.read(extent, out, label="x")
                mover.wait(read)
    assert write.error is None
    assert isinstance(read.error, IntegrityError)
    assert not out.any(), "wrong bytes must not reach the target"
