"""The file mover beside copies that complete late, as a device's do."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support_copies import SECONDS, LateCopier

from tiermem.io import ThreadEngine
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Memory
from tiermem.transfer.filemover import FileMover

PAGE = 4096
CHUNK = 4 * PAGE


def host(nbytes: int) -> torch.Tensor:
    """Page-aligned host memory."""
    return torch.frombuffer(Memory(nbytes).view, dtype=torch.uint8)


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)


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
        fences = copier.until_asked(3)
        mover._pump.ask_to_close()
        for fence in fences:  # the pump goes on to its end, and there waits for each
            assert fence.waited.wait(SECONDS)
            assert not write.finished
            fence.let_go()
        mover.close()
        assert write.error is not None
