"""Compares the bytes of a block in two places."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tiermem.core.block import Block
from tiermem.runtime.base.functorch import outside_inference

_CHUNK = 4 << 20


def same_bytes(block: Block, here: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether two copies of a block have the same bytes in its tensors; padding is ignored.

    It takes hardly any memory, on the device or elsewhere.

    Args:
        block: The block.
        here: One copy, 1-D uint8; its writers have been waited for.
        home: The other one, which is copied to the device of ``here``.
    """
    with outside_inference(), torch.no_grad():
        same = torch.ones((), dtype=torch.bool, device=here.device)
        for begin, end in _runs(block):
            same &= (here[begin:end] == home[begin:end].to(here.device)).all()
        return bool(same)


def _runs(block: Block) -> Iterator[tuple[int, int]]:
    """Yields the bytes of its tensors, begin and end, in runs of a chunk; without padding."""
    for spec in block.tensors:
        last = spec.offset + spec.nbytes
        for begin in range(spec.offset, last, _CHUNK):
            yield begin, min(begin + _CHUNK, last)
