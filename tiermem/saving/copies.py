"""Copies within host memory without the GIL and without torch's threads."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.autograd.graph import increment_version

from tiermem.transfer.copy import host_copy

_PART = 8 << 20
_MOST_THREADS = 4
_CORES_FOR_EACH = 4
"""Cores per thread: the others are for the training that continues."""
_MOST_FRESH = 16
_SHARE_FRESH = 0.75
"""Share of the cores while pages are faulted in, which takes several times as long as the copy."""


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies all bytes of a tensor.

    Within host memory it does not use torch, whose threads would spin on cores that others need,
    such as the threads that read and write the files.

    Args:
        target: Contiguous uint8, of the same length; its version counter is raised, as by torch's
            copy.
        source: Contiguous uint8.
    """
    if target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source)
        return
    host_copy(target, source)
    if not target.is_inference():
        increment_version(target)


class MemoryCopier:
    """A context manager for copies by several threads, which end with it.

    One thread copies about 10 GB/s, and host memory permits many times that; torch's own threads
    would all take part in a copy, and the training would wait for them.
    """

    def __init__(self) -> None:
        """Starts no thread yet."""
        cores = os.cpu_count() or 1
        self._few = max(1, min(_MOST_THREADS, cores // _CORES_FOR_EACH))
        self._many = max(1, min(_MOST_FRESH, int(cores * _SHARE_FRESH)))
        self._pool = ThreadPoolExecutor(self._many, thread_name_prefix="tiermem-save-copies")

    def __enter__(self) -> MemoryCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, fresh: bool = False) -> None:
        """Copies all bytes of a tensor.

        Args:
            target: Contiguous uint8 in host memory, at least as long.
            source: Contiguous uint8 in host memory.
            fresh: Whether pages of ``target`` have to be faulted in; then more threads are
                used.
        """
        whole = source.numel()
        to, of = target.data_ptr(), source.data_ptr()
        parts = iter(range(0, whole, _PART))

        def copy_parts(_: int) -> None:
            for begin in parts:  # every thread takes the next one
                ctypes.memmove(to + begin, of + begin, min(_PART, whole - begin))

        list(self._pool.map(copy_parts, range(self._many if fresh else self._few)))
