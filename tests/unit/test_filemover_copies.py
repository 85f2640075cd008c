"""The file mover beside copies that complete late, as a device's do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tiermem.io import ThreadEngine
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Memory
from tiermem.transfer.filemover import FileMover

PAGE = 4096
CHUNK = 4 * PAGE
SECONDS = 30.0  # what never takes that long, however slow the machine


def host(nbytes: int) -> torch.Tensor:
    """Page-aligned host memory."""
    return torch.frombuffer(Memory(nbytes).view, dtype=torch.uint8)


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)


class HeldFence:
    """A fence that is done when the test says so; whoever waits for it waits for the test.

    Attributes:
        waited: Set once somebody waits.
    """

    def __init__(self, copy: Callable[[], object]) -> None:
        self.waited = threading.Event()
        self._copy = copy
        self._let_go = threading.Event()

    def done(self) -> bool:
        return self._let_go.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self._let_go.wait(SECONDS)

    def let_go(self) -> None:
        self._copy()
        self._let_go.set()


class LateCopier:
    """Copies that happen only when their fence is let go, as a device's do."""

    def __init__(self) -> None:
        self.fences: list[HeldFence] = []
        self.changed = threading.Condition()

    def _late(self, target: torch.Tensor, source: torch.Tensor) -> HeldFence:
        with self.changed:
            fence = HeldFence(lambda: target.copy_(source))
            self.fences.append(fence)
            self.changed.notify_all()
        return fence

    def to_target(self, target: torch.Tensor, staging: torch.Tensor) -> HeldFence:
        return self._late(target, staging)

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> HeldFence:
        return self._late(staging, source)

    def until_asked(self, count: int) -> list[HeldFence]:
        """Waits until that many copies are under way; returns them in order."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.fences) >= count, SECONDS)
            return list(self.fences)

    def let_go(self, count: int) -> None:
        """Completes that many copies, the latest first, each once it was asked for."""
        for _ in range(count):
            with self.changed:
                assert self.changed.wait_for(lambda: bool(self.fences), SECONDS)
                fence = self.fences.pop()
            fence.let_go()


def test_chunks_are_kept_until_their_late_copies_are_done(tmp_path: Path) -> None:
    copier = LateCopier()
    data, out = noise(9 * CHUNK), host(9 * CHUNK)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(data.numel())
        extent = store.allocate(data.numel())
        with FileMover(store, ThreadEngine, host(3 * CHUNK), CHUNK, copier) as mover:
            write = mover.write(extent, data, label="w")
            copier.let_go(9)
            mover.wait(write)
            assert write.error is None
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
        first, *others = copier.until_asked(3)
        assert first.waited.wait(SECONDS)
        mover._pump.ask_to_close()
        first.let_go()  # the pump goes on to its end, and there waits for the others
        for fence in others:
            assert fence.waited.wait(SECONDS)
            assert not write.finished
            fence.let_go()
        mover.close()
        assert write.error is not None
