"""Copies between tensors and the memory that files are read to and written from."""

from __future__ import annotations

import mmap

import pytest
import torch

from tiermem.saving.copies import copy_bytes


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
