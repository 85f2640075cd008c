"""The description of a torch tensor for a layout, and tensors kept in two precisions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tiermem.core.layout import TensorShape


def shape_of(name: str, tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> TensorShape:
    """Describes a tensor for packing.

    Args:
        name: For messages.
        tensor: Its shape, strides and dtype are used, not its bytes.
        stride: Strides to use instead of the tensor's own.
    """
    return TensorShape(
        name,
        tuple(tensor.shape),
        tuple(tensor.stride()) if stride is None else stride,
        tensor.dtype,
        tensor.dtype.itemsize,
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24


def follow(precise: torch.Tensor, shown: torch.Tensor) -> None:
    """Transfers changes of a less precise copy to the tensor from which it was cast.

    Elements whose cast has the bits of ``shown`` are not changed; the others become
    those of ``shown``.

    Args:
        precise: Changed in place, without waiting for the device; any strides.
        shown: Same shape and device, another floating-point dtype.
    """
    for mine, theirs in _in_pieces(precise, shown):
        bits = _INTEGERS[theirs.dtype.itemsize]
        same = mine.to(theirs.dtype).view(bits) == theirs.view(bits)
        mine.copy_(torch.where(same, mine, theirs.to(mine.dtype)))


def _in_pieces(
    first: torch.Tensor, second: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields two tensors in pieces of a bounded size, if their memory layout is the same."""
    extent = 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True))
    if first.stride() != second.stride() or extent != first.numel():
        yield first, second
        return
    for begin in range(0, extent, _CHUNK):
        size = (min(_CHUNK, extent - begin),)
        yield (
            first.as_strided(size, (1,), first.storage_offset() + begin),
            second.as_strided(size, (1,), second.storage_offset() + begin),
        )
