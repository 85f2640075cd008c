"""Packed copies of blocks: lossless, with three quarters of the bytes to copy over the link.

Weights in bfloat16 use few of the 256 exponents: nearly all of a matrix are in a window of 15. Of
every word the packed form has the sign and the 7 bits of the mantissa in a byte, and the position
of its exponent in the window in four bits: 0 stands for the exponent 0 (zeros, subnormals), n from
1 to 15 for the window's base plus n. A word with another exponent is an *escape* and is stored
unchanged. It is known that exponents can be compressed without loss (DFloat11, ZipNN); codes of
a fixed width take a few per cent more than an entropy code, but a simple kernel unpacks them.

A part of a block is packed in *tiles* of 8,192 words, each with a base of its own and room for 30
escapes; where a tile has more, the block is not packed. A tile takes 12,416 bytes: a byte for each
word; four bits for each word, the even one in the low half of a byte; base and number of escapes,
a byte each, and six that are not used; number and word of each escape, 16 bits each. Numbers are
little-endian. The bytes behind the last whole tile follow unchanged.

A device unpacks in place: packed bytes are copied to the end of the part's place, and tiles are
written from its beginning on. For each tile, 3,968 bytes more are written than read, so an unpacked
tile never overlaps the packed form of a later tile: it can be written once the packed tiles that
it overlaps have been read. The bytes behind the last tile are where they belong already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORDS = 8192
"""Words of a tile."""
TILE = 2 * WORDS
"""Bytes of a tile."""
ESCAPES = 30
PACKED_TILE = WORDS + WORDS // 2 + 8 + 4 * ESCAPES
"""Bytes of the packed form of a tile."""
GROWS = TILE - PACKED_TILE
MOST = 1 << 30
"""The most bytes that a part may have."""
_WINDOW = 15
_EXPONENTS = 256

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a block, and its packed form.

    Attributes:
        begin: Its first byte in the block.
        nbytes: Its bytes in the block.
        offset: Offset of its packed form in that of the block.
    """

    begin: int
    nbytes: int
    offset: int

    @property
    def tiles(self) -> int:
        """Whole tiles."""
        return self.nbytes // TILE

    @property
    def moved(self) -> int:
        """Bytes of the packed form."""
        return self.nbytes - self.tiles * GROWS


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed form of a block, or of a part of it.

    Attributes:
        address: Address of the first byte of the block's packed form, accessible to the device.
        parts: The parts, in order and without gaps.
        moved: Bytes of all packed parts.
    """

    address: int
    parts: tuple[Part, ...]
    moved: int

    def within(self, begin: int, nbytes: int) -> Packed | None:
        """Returns the packed form of some bytes of the block.

        Args:
            begin: The first byte.
            nbytes: How many bytes.

        Returns:
            The packed form; None if they do not begin and end with tiles of one part.
        """
        for part in self.parts:
            first = begin - part.begin
            if not 0 <= first < part.nbytes:
                continue
            ends = first + nbytes == part.nbytes
            if first % TILE or first + nbytes > part.nbytes or not (ends or nbytes % TILE == 0):
                return None
            offset = part.offset + first // TILE * PACKED_TILE
            inside = Part(begin, nbytes, offset)
            return Packed(self.address, (inside,), inside.moved)
        return None


def parts_of(nbytes: int, rows: Iterable[tuple[int, int]] = ()) -> tuple[Part, ...]:
    """Returns the parts in which a block is packed.

    Args:
        nbytes: Bytes of the block.
        rows: First byte and bytes of each tensor of which single rows are fetched, in order.
    """
    bounds, at = list[tuple[int, int]](), 0
    for begin, size in [*rows, (nbytes, 0)]:
        bounds += [(at, begin), (begin, begin + size)]
        at = begin + size
    found, offset = list[Part](), 0
    for begin, end in bounds:
        for first in range(begin, end, MOST):
            part = Part(first, min(MOST, end - first), offset)
            found.append(part)
            offset += part.moved
    return tuple(found)


def packed_nbytes(parts: Sequence[Part]) -> int:
    """Returns the bytes of the packed form of a block."""
    return parts[-1].offset + parts[-1].moved if parts else 0


def pack_tile(words: Words) -> Bytes | None:
    """Packs a tile like the kernels: the reference, for simulated devices.

    Args:
        words: ``[8192]``.

    Returns:
        The packed form, 1-D; None if the tile has too many escapes.
    """
    exponents = ((words >> 7) & 0xFF).astype(np.int64)
    counts = np.concatenate([[0], np.cumsum(np.bincount(exponents, minlength=_EXPONENTS))])
    inside = counts[_WINDOW + 1 :] - counts[1:-_WINDOW]
    base = int(np.argmax(inside))
    codes = exponents - base
    escapes = np.flatnonzero((exponents != 0) & ((codes < 1) | (codes > _WINDOW)))
    if len(escapes) > ESCAPES:
        return None
    codes[exponents == 0] = 0
    codes[escapes] = 0
    low = (((words >> 8) & 0x80) | (words & 0x7F)).astype(np.uint8)
    pairs = (codes[0::2] | codes[1::2] << 4).astype(np.uint8)
    listed = np.zeros((ESCAPES, 2), dtype="<u2")
    listed[: len(escapes)] = np.stack([escapes.astype(np.uint16), words[escapes]], axis=1)
    head = np.array([base, len(escapes), 0, 0, 0, 0, 0, 0], dtype=np.uint8)
    return np.concatenate([low, pairs, head, listed.reshape(-1).view(np.uint8)])


def unpack_tile(packed: Bytes) -> Words:
    """Returns the words of a packed tile; the reference.

    Args:
        packed: ``[12416]``.
    """
    low, pairs = packed[:WORDS].astype(np.uint16), packed[WORDS : WORDS + WORDS // 2]
    head = packed[WORDS + WORDS // 2 :]
    codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1).astype(np.uint16)
    exponents = np.where(codes == 0, 0, codes + np.uint16(head[0])).astype(np.uint16)
    words = ((low & 0x80) << 8 | exponents << 7 | low & 0x7F).astype(np.uint16)
    listed = head[8 : 8 + 4 * int(head[1])].view("<u2").reshape(-1, 2)
    words[listed[:, 0]] = listed[:, 1]
    return words
