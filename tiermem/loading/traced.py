"""Tensors of a checkpoint that have not been read, and rearrangements of them.

Stacking, concatenating and splitting only determine the order of bytes. So the code that
converts a checkpoint is run on :class:`StoredView` objects: the result knows where in the files
each byte of the converted tensor is, and is read from there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

_MOST_RUNS = 1 << 16
"""Maximal number of runs of a tensor; beyond, reading it whole and rearranging it is faster."""


class NotTracedError(Exception):
    """An operation that is not a rearrangement of whole runs of bytes."""


class Run(NamedTuple):
    """Bytes of one file.

    Attributes:
        file: Index of the file.
        offset: First byte.
        nbytes: Length in bytes.
    """

    file: int
    offset: int
    nbytes: int


class StoredView:
    """A contiguous tensor whose bytes are in files.

    Works as an argument of ``torch.stack``, ``cat``, ``chunk``, ``split``, ``narrow`` and methods
    of tensors that change neither value nor order.

    Args:
        shape: Sizes.
        dtype: Dtype of the elements.
        runs: Its bytes in order.

    Attributes:
        shape: As given.
        dtype: As given.
        runs: As given, neighbours joined.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, runs: Sequence[Run]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.runs = _joined(runs)
        if len(self.runs) > _MOST_RUNS:
            raise NotTracedError(f"{len(self.runs)} runs of bytes")
        self._ends = list(accumulate(run.nbytes for run in self.runs))

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        operation = _OPERATIONS.get(name)
        if operation is None or name.startswith("_"):
            raise NotTracedError(f"Tensor.{name}")
        return lambda *args, **kwargs: operation(self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Performs ``torch.stack`` and so on.

        Raises:
            NotTracedError: If it is another function.
        """
        operation = _OPERATIONS.get(func.__name__)
        if operation is None:
            raise NotTracedError(f"torch.{func.__name__}")
        return operation(*args, **(kwargs or {}))

    def part(self, begin: int, end: int) -> list[Run]:
        """Returns the runs of its bytes from ``begin`` to ``end``."""
        found = []
        index = bisect_right(self._ends, begin)
        while begin < end:
            run = self.runs[index]
            first = begin - (self._ends[index] - run.nbytes)
            length = min(end - begin, run.nbytes - first)
            found.append(Run(run.file, run.offset + first, length))
            begin += length
            index += 1
        return found


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    found: list[Run] = []
    for run in runs:
        if not run.nbytes:
            continue
        last = found[-1] if found else None
        if last and last.file == run.file and last.offset + last.nbytes == run.offset:
            found[-1] = Run(last.file, last.offset, last.nbytes + run.nbytes)
        else:
            found.append(run)
    return tuple(found)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise IndexError(f"dimension {dim} of a tensor with {ndim}")
    return dim % ndim


def _cat(tensors: Sequence[StoredView], dim: int = 0) -> StoredView:
    first = tensors[0]
    dim = _dim(dim, first.ndim)
    for other in tensors:
        alike = [
            i == dim or a == b
            for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=False))
        ]
        if other.ndim != first.ndim or not all(alike):
            raise ValueError(f"shapes {tuple(first.shape)} and {tuple(other.shape)}, dim={dim}")
        if other.dtype is not first.dtype:
            raise NotTracedError("several dtypes")
    rows = prod(first.shape[:dim])
    if rows * len(tensors) > _MOST_RUNS:
        raise NotTracedError(f"{rows * len(tensors)} runs of bytes")
    runs: list[Run] = []
    for row in range(rows):
        for tensor in tensors:
            length = tensor.nbytes // rows
            runs += tensor.part(row * length, (row + 1) * length)
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return StoredView(shape, first.dtype, runs)


def _unsqueeze(tensor: StoredView, dim: int) -> StoredView:
    dim = _dim(dim, tensor.ndim + 1)
    shape = [*tensor.shape[:dim], 1, *tensor.shape[dim:]]
    return StoredView(shape, tensor.dtype, tensor.runs)


def _squeeze(tensor: StoredView, dim: int) -> StoredView:
    dim = _dim(dim, tensor.ndim)
    shape = [size for i, size in enumerate(tensor.shape) if i != dim or size != 1]
    return StoredView(shape, tensor.dtype, tensor.runs)


def _stack(tensors: Sequence[StoredView], dim: int = 0) -> StoredView:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], _dim(dim, tensors[0].ndim + 1))


def _narrow(tensor: StoredView, dim: int, start: int, length: int) -> StoredView:
    dim = _dim(dim, tensor.ndim)
    rows, size = prod(tensor.shape[:dim]), tensor.shape[dim]
    if rows > _MOST_RUNS:
        raise NotTracedError(f"{rows} runs of bytes")
    if not 0 <= start <= start + length <= size:
        raise IndexError(f"{start} to {start + length} of {size}")
    row = tensor.nbytes // rows if rows else 0
    each = row // size if size else 0
    runs: list[Run] = []
    for index in range(rows):
        begin = index * row + start * each
        runs += tensor.part(begin, begin + length * each)
    shape = list(tensor.shape)
    shape[dim] = length
    return StoredView(shape, tensor.dtype, runs)


def _split(tensor: StoredView, sizes: int | Sequence[int], dim: int = 0) -> tuple[StoredView, ...]:
    whole = tensor.shape[_dim(dim, tensor.ndim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"sizes {list(sizes)} are not {whole} together")
    starts = [0, *accumulate(sizes)]
    return tuple(_narrow(tensor, dim, at, n) for at, n in zip(starts, sizes, strict=False))


def _chunk(tensor: StoredView, chunks: int, dim: int = 0) -> tuple[StoredView, ...]:
    whole = tensor.shape[_dim(dim, tensor.ndim)]
    return _split(tensor, max(1, -(-whole // chunks)), dim)


def _size(tensor: StoredView, dim: int | None = None) -> Any:
    return tensor.shape if dim is None else tensor.shape[dim]


def _same(tensor: StoredView) -> StoredView:
    return tensor


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "chunk": _chunk,
    "split": _split,
    "narrow": _narrow,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "size": _size,
    "contiguous": _same,
    "detach": _same,
    "clone": _same,
}
