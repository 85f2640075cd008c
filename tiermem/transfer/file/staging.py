"""Staging chunks: the page-locked memory for pieces of files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiermem.core.block import ALIGNMENT
from tiermem.errors import ConfigError
from tiermem.storage.files import Piece
from tiermem.transfer.file.copiers import check_tensor
from tiermem.transfer.file.jobs import Chunk, Job

_FEW_CHUNKS = 8


@dataclass(frozen=True)
class Shares:
    """The maximal numbers of chunks for different uses.

    Attributes:
        on_disk: Used by the disk at once: if it ends all of them together, the other half
            follows immediately.
        writing: Used by writes, so that an urgent read need not wait for writes only.
        parked: Used by reads without a target, so that others never wait for a chunk of theirs.
    """

    on_disk: int
    writing: int
    parked: int

    @classmethod
    def of(cls, count: int) -> Shares:
        """Returns the shares of a number of chunks."""
        on_disk = count if count < _FEW_CHUNKS else count // 2
        return cls(on_disk, max(1, count - max(1, count // 4)), count // 2)


class Staging:
    """The staging chunks, and which of them are free.

    Args:
        memory: uint8, 1-D, a whole number of chunks.
        chunk_nbytes: Bytes of one chunk.

    Attributes:
        count: How many chunks there are.
        spare: Numbers of the free ones.
    """

    def __init__(self, memory: torch.Tensor, chunk_nbytes: int) -> None:
        self._chunk_nbytes = chunk_nbytes
        starts = range(0, memory.numel() - chunk_nbytes + 1, chunk_nbytes)
        self._chunks = [memory.narrow(0, start, chunk_nbytes) for start in starts]
        self.count = len(self._chunks)
        self.spare = list(range(self.count))[::-1]

    def take(self, job: Job, piece: Piece) -> Chunk:
        """Returns a free chunk, assigned to ``piece``."""
        index = self.spare.pop()
        memory = self._chunks[index]
        if piece.nbytes != self._chunk_nbytes:
            memory = memory.narrow(0, 0, piece.nbytes)
        return Chunk(index, memory, memory.data_ptr(), job, piece)


def check_staging(staging: torch.Tensor, chunk_nbytes: int, store_chunk: int) -> None:
    """Refuses staging memory that cannot be used.

    Raises:
        ConfigError: If the chunk is too small or the memory is not a whole number of them.
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
