"""Copies pieces of files between staging chunks and the memory of a tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from tiermem.transfer.driver import Signal


class Fence(Protocol):
    """The end of a copy that may complete later.

    Attributes:
        event: The event for streams to wait for; None if only the host can wait. Copies into
            targets that have one end in the order in which they were started.
    """

    event: Signal | None

    def done(self) -> bool:
        """Returns whether the copy has completed; never blocks."""

    def wait(self) -> None:
        """Blocks until the copy has completed."""


class ChunkCopier(Protocol):
    """Copies between a staging chunk (host memory) and the memory of a tensor."""

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Signal] = ()
    ) -> Fence:
        """Starts a copy out of staging; the chunk is reused once the fence is done.

        Args:
            target: The target.
            staging: The chunk.
            after: Events that the copy waits for, as they were passed to the read.
        """

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Fence:
        """Starts a copy into staging; the chunk is read once the fence is done."""


class _Done:
    """A fence that is done from the start."""

    event: Signal | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_DONE = _Done()


class HostCopier:
    """Copies between host tensors, synchronously.

    A plain ``memmove``: torch's own copy would start several threads, and would raise the
    version counter of tensors that autograd has saved. Such a copy is synchronous,
    so a file mover leaves it (and any subclass's) to its helper threads.
    """

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Signal] = ()
    ) -> Fence:
        """Copies out of staging; host memory has nothing to wait for."""
        ctypes.memmove(target.data_ptr(), staging.data_ptr(), target.numel())
        return _DONE

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Fence:
        """Copies into staging."""
        ctypes.memmove(staging.data_ptr(), source.data_ptr(), source.numel())
        return _DONE


def check_tensor(tensor: torch.Tensor, nbytes: int) -> None:
    """Refuses a tensor that is not a run of ``nbytes`` bytes.

    Raises:
        ValueError: If it is not 1-D, contiguous, uint8 and that long.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a file transfer takes a contiguous 1-D uint8 tensor")
    if tensor.numel() != nbytes:
        raise ValueError(f"the tensor has {tensor.numel()} bytes, the extent {nbytes}")
