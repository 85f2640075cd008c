"""Packed homes: five sixths of the bytes of trained weights, gradients and state are copied.

Trained blocks are written home in every step, so a packed copy beside the home
(:mod:`tiermem.core.packing`) would be out of date at once. Here the home itself has the packed
form. Moments and gradients have more different exponents than weights. Of every word the packed
form has the sign and the 7 bits of the mantissa in a byte, and the position of its exponent in a
window of 31 in five bits: 0 stands for the exponent 0 (zeros, subnormals), n from 1 to 31 for the
window's base plus n. The window ends with the largest exponent of the tile. A word with an exponent
below the window is an *escape*.

A tile of 8,192 words takes 13,440 bytes: a byte for each word; the low four bits of each code, the
even word's in the low half of a byte; the highest bit of each code, the first word's in the lowest
bit of a byte; base and number of escapes, a byte each, and six that are not used; number and word
of each of up to 30 escapes, 16 bits each. Numbers are little-endian.

A tile with more escapes is *raw*: it is stored unchanged, its last 2,944 bytes elsewhere. So every
block can be written home without inspecting it first, and never takes too much space. A byte for
each tile, outside of the home, says which tiles are raw.

A home consists of the packed tiles; then the bytes behind the last whole tile, unchanged; and at
its end space for the last bytes of raw tiles, 2,944 for each tile. So it never takes more bytes
than its block.

A device unpacks in place, see :mod:`tiermem.core.packing`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiermem.core.packing import ESCAPES, Bytes, Words

WORDS = 8192
"""Words of a tile."""
TILE = 2 * WORDS
"""Bytes of a tile."""
PACKED_TILE = WORDS + WORDS // 2 + WORDS // 8 + 8 + 4 * ESCAPES
"""Bytes of the packed form of a tile, and the bytes of a raw tile that are stored there."""
SPILL = TILE - PACKED_TILE
"""Bytes of a raw tile that are stored at the end of its home."""
ALIGNED = 16
"""The size of a packed block is a multiple of this many bytes."""
_WINDOW = 31


@dataclass(frozen=True, slots=True)
class PackedHome:
    """A packed home.

    Attributes:
        address: Address of its first byte, the same for the host and for kernels.
        tiles: Number of whole tiles of the block.
        rest: Bytes behind them.
        raw: Address of one byte for each tile, which is not 0 if the tile is raw.
        seen: Where kernels read these bytes: a copy in device memory, as reads over the bus would
            slow them down, or ``raw``.
    """

    address: int
    tiles: int
    rest: int
    raw: int
    seen: int

    @property
    def moved(self) -> int:
        """Bytes that are copied."""
        return self.tiles * PACKED_TILE + self.rest

    @property
    def spill(self) -> int:
        """Address of the space for the last bytes of raw tiles."""
        return self.address + self.tiles * PACKED_TILE + self.rest


def flags_nbytes(capacity: int) -> int:
    """Returns how many bytes say which tiles of all homes in an arena are raw.

    Args:
        capacity: Bytes of the arena.
    """
    return capacity // TILE + 1


def first_flag(offset: int) -> int:
    """Returns the number of the first tile of a home.

    It is the offset divided by the bytes of a tile. As homes do not overlap, no two tiles of an
    arena have the same number.

    Args:
        offset: Offset of the home in the arena.
    """
    return offset // TILE


def pack_tile(words: Words) -> tuple[Bytes, Bytes | None]:
    """Packs a tile like the kernels: the reference, for simulated devices.

    Args:
        words: ``[8192]``.

    Returns:
        The bytes among the packed tiles, ``[13440]``, and those at the end of the home, ``[2944]``,
        if the tile is raw, else None.
    """
    exponents = ((words >> 7) & 0xFF).astype(np.int64)
    base = max(int(exponents.max()) - _WINDOW, 0)
    codes = exponents - base
    escapes = np.flatnonzero((exponents != 0) & (codes < 1))
    if len(escapes) > ESCAPES:
        whole = np.ascontiguousarray(words).view(np.uint8)
        return whole[:PACKED_TILE], whole[PACKED_TILE:]
    codes[exponents == 0] = 0
    codes[escapes] = 0
    low = (((words >> 8) & 0x80) | (words & 0x7F)).astype(np.uint8)
    pairs = ((codes[0::2] & 15) | (codes[1::2] & 15) << 4).astype(np.uint8)
    high = np.packbits((codes >> 4).astype(np.uint8), bitorder="little")
    listed = np.zeros((ESCAPES, 2), dtype="<u2")
    listed[: len(escapes)] = np.stack([escapes.astype(np.uint16), words[escapes]], axis=1)
    head = np.array([base, len(escapes), 0, 0, 0, 0, 0, 0], dtype=np.uint8)
    return np.concatenate([low, pairs, high, head, listed.reshape(-1).view(np.uint8)]), None


def unpack_tile(packed: Bytes, spill: Bytes | None) -> Words:
    """Returns the words of a packed tile; the reference.

    Any bytes can be unpacked: after an interrupted copy home nobody needs the words, but the home
    may still be unpacked.

    Args:
        packed: The bytes among the packed tiles, ``[13440]``.
        spill: The bytes at the end of the home, ``[2944]``, if the tile is raw, else None.
    """
    if spill is not None:
        return np.concatenate([packed, spill]).view("<u2")
    low = packed[:WORDS].astype(np.uint16)
    pairs = packed[WORDS : WORDS + WORDS // 2]
    high = packed[WORDS + WORDS // 2 :][: WORDS // 8]
    head = packed[WORDS + WORDS // 2 + WORDS // 8 :]
    codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1).astype(np.uint16)
    codes |= np.unpackbits(high, bitorder="little").astype(np.uint16) << 4
    exponents = np.where(codes == 0, 0, codes + np.uint16(head[0])).astype(np.uint16)
    words = ((low & 0x80) << 8 | exponents << 7 | low & 0x7F).astype(np.uint16)
    listed = head[8 : 8 + 4 * min(int(head[1]), ESCAPES)].view("<u2").reshape(-1, 2)
    words[listed[:, 0] % WORDS] = listed[:, 1]
    return words
