"""How tensors are packed into blocks. Pure arithmetic on shapes and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiermem.core.block import TensorSpec, align_up

TENSOR_ALIGNMENT = 256
"""Tensors inside a block are aligned to this many bytes, the least of torch's CUDA allocator."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The properties of a tensor that packing needs.

    Attributes:
        name: For messages.
        shape: Sizes.
        stride: Strides in elements.
        dtype: Its dtype; opaque here.
        itemsize: Bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: object
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * self.itemsize


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    stride = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        stride[index] = stride[index + 1] * max(shape[index + 1], 1)
    return tuple(stride)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one run of memory, in any order of dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


def pack(tensors: Iterable[TensorShape]) -> tuple[tuple[TensorSpec, ...], int]:
    """Packs tensors one after another.

    A tensor that is not dense gets contiguous strides.

    Returns:
        The specs, and the bytes of the whole (a multiple of the block alignment).
    """
    specs = []
    offset = 0
    for tensor in tensors:
        dense = is_dense(tensor.shape, tensor.stride)
        stride = tensor.stride if dense else contiguous_stride(tensor.shape)
        specs.append(
            TensorSpec(tensor.name, offset, tensor.nbytes, tensor.shape, stride, tensor.dtype)
        )
        offset = align_up(offset + tensor.nbytes, TENSOR_ALIGNMENT)
    return tuple(specs), align_up(max(offset, 1))


def packed_nbytes(tensors: Iterable[TensorShape]) -> int:
    """Returns the bytes that :func:`pack` would return, without making specs."""
    offset = 0
    for tensor in tensors:
        offset = align_up(offset + tensor.nbytes, TENSOR_ALIGNMENT)
    return align_up(max(offset, 1))


def split(sizes: Sequence[int], limit: int) -> list[range]:
    """Cuts a sequence into runs whose sizes add up to at most ``limit``.

    A single item above the limit gets a run of its own. Order is kept.
    """
    runs = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            runs.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(sizes):
        runs.append(range(start, len(sizes)))
    return runs
