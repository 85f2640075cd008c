"""Copies between tensors and the memory that files are read to and written from."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest
import torch

from tiermem.saving import copies
from tiermem.saving.copies import MemoryCopier, copy_bytes


def random_bytes(nbytes: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=made)


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) + 3])
def test_bytes_and_nothing_beside_them(nbytes) -> None:
    memory = mmap.mmap(-1, nbytes + 10)
    target = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=5)
    source = random_bytes(nbytes)
    copy_bytes(target, source)
    assert memory[5 : nbytes + 5] == source.numpy().tobytes()
    assert not any(memory[:5]) and not any(memory[nbytes + 5 :])


def test_what_was_written_counts_as_changed() -> None:
    """As it does where torch copies: backward refuses a saved tensor that was loaded over."""
    weight = torch.ones(1024, requires_grad=True)
    x = torch.ones(1024, requires_grad=True)
    output = (weight * x).sum()
    copy_bytes(weight.detach().view(torch.uint8), random_bytes(4096))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        target = torch.zeros(64, dtype=torch.uint8)
    copy_bytes(target, random_bytes(64))
    assert torch.equal(target, random_bytes(64))


@pytest.mark.parametrize(("fresh", "threads"), [(False, 4), (True, 12)])
def test_pages_that_are_not_there_come_with_more_threads(fresh, threads, monkeypatch) -> None:
    """All of them take part: a part of a copy waits until each has one."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(copies, "_PART", 4096)
    source, target = random_bytes(40 * 4096 + 5), torch.zeros(41 * 4096, dtype=torch.uint8)
    all_there, seen, move = threading.Barrier(threads), set(), ctypes.memmove

    def meet(to: int, of: int, nbytes: int) -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            all_there.wait(60)
        move(to, of, nbytes)

    monkeypatch.setattr(ctypes, "memmove", meet)
    with MemoryCopier() as copier:
        copier.copy(target, source, fresh=fresh)
    assert len(seen) == threads
    assert torch.equal(target[: source.numel()], source) and not target[source.numel() :].any()
