"""Staging chunks: the memory that pieces of files pass through, and how it is copied on."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tiermem.core.block import ALIGNMENT
from tiermem.errors import ConfigError, InvariantError
from tiermem.storage.swapfile import Piece
from tiermem.transfer.driver import Signal
from tiermem.transfer.file.jobs import Job


class Fence(Protocol):
    """The end of a copy that may complete later.

    Attributes:
        event: For streams to wait for; None where only the host can. Copies into targets that
            have one end in the order in which they were started.
    """

    event: Signal | None

    def done(self) -> bool:
        """Returns whether the copy has completed; never blocks."""

    def wait(self) -> None:
        """Blocks until the copy has completed."""


class ChunkCopier(Protocol):
    """Copies between a staging chunk (host memory) and where a tensor lives."""

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Signal] = ()
    ) -> Fence:
        """Starts a copy out of staging; the chunk is reused once the fence is done.

        Args:
            target: Where to.
            staging: The chunk.
            after: Events that it waits for, as the read was given them.
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
    """Copies between host tensors, at once.

    A plain ``memmove``: torch's own copy would start a team of threads, and would raise the
    version counter of tensors that autograd has saved. Such a copy takes as long as it takes,
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


class Task(enum.Enum):
    """What a helper thread does with a chunk."""

    CHECK = "check"
    """Compute the checksum."""
    FILL = "fill"
    """Copy the source into staging, then compute the checksum."""
    LAND = "land"
    """Compute the checksum and, where it is right, copy on to the target."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One staging chunk, and the piece that is in it.

    Attributes:
        index: Number of the chunk; the token of its requests.
        memory: Staging, as long as the piece.
        address: Where the disk reads or writes: staging, or the source itself.
        job: Whose piece it is.
        piece: Where that is in the file and in the extent.
        check: Whether its checksum is computed.
        expected: What that has to be, or ``None`` for a write.
        checksum: What it is, once computed.
        on_disk: Whether the engine is at it.
        task: What a helper is doing with it.
        fence: Of the copy under way.
        written: Whether the disk has taken all of it.
        parked: Whether it waits for a target.
        ended: Whether its piece has ended; a copy out of it that streams wait for may go on.
        checksum_ns: Time spent in the checksum.
        copy_ns: Time spent in the copy.
    """

    index: int
    memory: torch.Tensor
    address: int
    job: Job
    piece: Piece
    check: bool = False
    expected: int | None = None
    checksum: int | None = None
    on_disk: bool = False
    task: Task | None = None
    fence: Fence | None = None
    written: bool = False
    parked: bool = False
    ended: bool = False
    checksum_ns: int = 0
    copy_ns: int = 0

    @property
    def rising(self) -> bool:
        """Whether all that is left of its piece is a copy that streams wait for."""
        fence = self.fence
        return fence is not None and fence.event is not None

    @property
    def wrong(self) -> bool:
        """Whether the bytes read are known to be others than were written."""
        return self.expected is not None and self.check and self.checksum != self.expected

    def part(self) -> torch.Tensor:
        """Returns the part of the target or source that belongs to the piece."""
        tensor = self.job.tensor
        if tensor is None:
            raise InvariantError(f"the read of {self.job.transfer.label!r} has no target yet")
        return tensor.narrow(0, self.piece.extent_offset, self.piece.nbytes)


class Staging:
    """The staging chunks, and which of them are spare.

    Args:
        memory: uint8, 1-D, a whole number of chunks.
        chunk_nbytes: Bytes of one.

    Attributes:
        memory: As given.
        count: How many chunks there are.
        spare: Numbers of those not in use.
    """

    def __init__(self, memory: torch.Tensor, chunk_nbytes: int) -> None:
        self.memory = memory
        self._chunk_nbytes = chunk_nbytes
        starts = range(0, memory.numel() - chunk_nbytes + 1, chunk_nbytes)
        self._chunks = [memory.narrow(0, start, chunk_nbytes) for start in starts]
        self.count = len(self._chunks)
        self.spare = list(range(self.count))[::-1]

    def take(self, job: Job, piece: Piece) -> Chunk:
        """Returns a spare chunk with ``piece`` in it."""
        index = self.spare.pop()
        memory = self._chunks[index]
        if piece.nbytes != self._chunk_nbytes:
            memory = memory.narrow(0, 0, piece.nbytes)
        return Chunk(index, memory, memory.data_ptr(), job, piece)


def check_staging(staging: torch.Tensor, chunk_nbytes: int, store_chunk: int) -> None:
    """Refuses staging memory that cannot serve.

    Raises:
        ConfigError: If the chunk is too small or the memory no whole number of them.
        ValueError: If the memory is not 1-D, contiguous and uint8.
    """
    if chunk_nbytes < store_chunk or chunk_nbytes % ALIGNMENT:
        raise ConfigError(
            f"staging chunks of {chunk_nbytes} bytes do not fit: at least {store_chunk}, "
            f"and a multiple of {ALIGNMENT}, is needed"
        )
    check_tensor(staging, staging.numel())
    if staging.device.type != "cpu" or staging.data_ptr() % ALIGNMENT:
        raise ConfigError(f"staging must be host memory aligned to {ALIGNMENT} bytes")
    if staging.numel() < chunk_nbytes or staging.numel() % chunk_nbytes:
        raise ConfigError(
            f"staging of {staging.numel()} bytes is no whole number of chunks of {chunk_nbytes}"
        )


def check_tensor(tensor: torch.Tensor, nbytes: int) -> None:
    """Refuses a tensor that is no run of ``nbytes`` bytes.

    Raises:
        ValueError: If it is not 1-D, contiguous, uint8 and that long.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a file transfer takes a contiguous 1-D uint8 tensor")
    if tensor.numel() != nbytes:
        raise ValueError(f"the tensor has {tensor.numel()} bytes, the extent {nbytes}")
