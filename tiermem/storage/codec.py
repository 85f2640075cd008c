"""Lossless compression of numbers by byte planes and lz4.

The first bytes of all numbers are put together, then the second ones, and so on; lz4 packs each
such plane by itself. Signs and exponents repeat and compress well, mantissas are noise and do not:
lz4 over whole numbers compresses neither. No store packs its data in this way so far (ADR 37);
``tiermem bench --codec`` shows what it would gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt

from tiermem.errors import IntegrityError

CHUNK_NBYTES = 1 << 20
"""Bytes that are packed together: their planes fit into a core's cache."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A run of numbers, packed.

    Attributes:
        nbytes: Its unpacked length.
        planes: The planes, least significant byte first; a plane that lz4 cannot shorten is
            unpacked.
    """

    nbytes: int
    planes: tuple[bytes, ...]

    @property
    def packed_nbytes(self) -> int:
        """Its packed length."""
        return sum(map(len, self.planes))


def pack(data: Bytes, itemsize: int) -> PackedChunk:
    """Packs a run of numbers; lz4 and the sorting of the bytes release the GIL.

    Args:
        data: Its bytes, one-dimensional and contiguous.
        itemsize: Bytes of one number.

    Raises:
        ValueError: If it is not whole numbers.
    """
    numbers = _by_number(data, itemsize)
    planes = []
    for index in range(itemsize):
        plane = np.ascontiguousarray(numbers[:, index])
        packed: bytes = lz4.block.compress(plane, store_size=False)
        planes.append(packed if len(packed) < plane.nbytes else plane.tobytes())
    return PackedChunk(data.nbytes, tuple(planes))


def unpack(chunk: PackedChunk, out: Bytes) -> None:
    """Restores exactly the bytes that were packed.

    Args:
        chunk: The result of :func:`pack`.
        out: Memory of ``chunk.nbytes`` bytes, one-dimensional and contiguous.

    Raises:
        ValueError: If ``out`` has another length.
        IntegrityError: If the packed bytes are damaged so that lz4 notices.
    """
    if out.nbytes != chunk.nbytes:
        raise ValueError(f"{out.nbytes} bytes for what takes {chunk.nbytes}")
    numbers = _by_number(out, len(chunk.planes))
    length = len(numbers)
    for index, plane in enumerate(chunk.planes):
        numbers[:, index] = np.frombuffer(_unpack_plane(plane, length), np.uint8)


def _unpack_plane(plane: bytes, length: int) -> bytes:
    if len(plane) == length:
        return plane
    try:
        found: bytes = lz4.block.decompress(plane, uncompressed_size=length)
    except lz4.block.LZ4BlockError as error:
        raise IntegrityError(f"packed bytes are damaged ({error})", nbytes=len(plane)) from error
    if len(found) != length:
        raise IntegrityError(
            f"packed bytes are damaged: they give {len(found)} bytes, not {length}",
            nbytes=len(plane),
        )
    return found


def _by_number(data: Bytes, itemsize: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if itemsize < 1 or data.nbytes % itemsize:
        raise ValueError(f"{data.nbytes} bytes are not whole numbers of {itemsize}")
    return data.reshape(-1, itemsize)
