"""Compares the bytes of a block in two places."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tiermem.core.block import Block
from tiermem.runtime.base.functorch import outside_inference

_CHUNK = 4 << 20


def same_bytes(block: Block, here: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether two copies of a block have the same bytes in its tensors, and whatever in between.

    Next to no memory is taken for that, on the device or elsewhere.

    Args:
        block: The block.
        here: The one copy, 1-D uint8; whoever writes it has been waited for.
        home: The other one, which is brought to where ``here`` is.
    """
    with outside_inference(), torch.no_grad():
        same = torch.ones((), dtype=torch.bool, device=here.device)
        for begin, end in _runs(block):
            same &= (here[begin:end] == home[begin:end].to(here.device)).all()
        return bool(same)


def _runs(block: Block) -> Iterator[tuple[int, int]]:
    """Yields the bytes of its tensors, begin and end, in runs of a chunk; not those in between."""
    for spec in block.tensors:
        last = spec.offset + spec.nbytes
        for begin in range(spec.offset, last, _CHUNK):
            yield begin, min(begin + _CHUNK, last)
