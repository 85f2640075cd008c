"""Packs and unpacks homes in the calling thread, at addresses of host memory: the reference.

For ``device="cpu"``, for simulated devices, and if a device has no room to do it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tiermem.core import packedhome
from tiermem.core.packedhome import PackedHome


def pack_home_tile(tile: int, target: int, source: int, spill: int, raw: int, seen: int) -> None:
    """Packs one tile of a home.

    Args:
        tile: Its number in the home.
        target: Address for the packed tiles of the home.
        source: Address of the words of the home.
        spill: Address for the last bytes of raw tiles of the home.
        raw: Address of a byte for each tile of the home, which says whether it is raw.
        seen: Address of as many bytes with the same meaning.
    """
    words = np.frombuffer(_read(source + tile * packedhome.TILE, packedhome.TILE), dtype="<u2")
    packed, behind = packedhome.pack_tile(words)
    for flags in (raw, seen):
        ctypes.memset(flags + tile, behind is not None, 1)
    _write(target + tile * packedhome.PACKED_TILE, packed.tobytes())
    if behind is not None:
        _write(spill + tile * packedhome.SPILL, behind.tobytes())


def unpack_home_tile(tile: int, target: int, tiles: int, spill: int, raw: int) -> None:
    """Unpacks one tile of a home in place, after those before it.

    Args:
        tile: Its number in the home.
        target: Address for the words of the home, at whose end the packed tiles are.
        tiles: The number of tiles of the piece.
        spill: Address of the last bytes of raw tiles of the home.
        raw: Address of a byte for each tile of the home, which says whether it is raw.
    """
    source = target + tiles * packedhome.SPILL + tile * packedhome.PACKED_TILE
    packed = np.frombuffer(_read(source, packedhome.PACKED_TILE), dtype=np.uint8)
    behind = None
    if _read(raw + tile, 1) != b"\0":
        last = _read(spill + tile * packedhome.SPILL, packedhome.SPILL)
        behind = np.frombuffer(last, dtype=np.uint8)
    _write(target + tile * packedhome.TILE, packedhome.unpack_tile(packed, behind).tobytes())


def pack_home(home: PackedHome, source: int) -> None:
    """Writes a block to a home, packed.

    Args:
        home: The home.
        source: Address of the block's bytes, which are not those of the home.
    """
    for tile in range(home.tiles):
        pack_home_tile(tile, home.address, source, home.spill, home.raw, home.seen)
    behind = source + home.tiles * packedhome.TILE
    ctypes.memmove(home.spill - home.rest, behind, home.rest)


def unpack_home(home: PackedHome, target: int) -> None:
    """Reads a block from a home.

    Args:
        home: The home.
        target: Address for the block's bytes; may be that of the home.
    """
    spill = ctypes.create_string_buffer(_read(home.spill, home.tiles * packedhome.SPILL))
    ctypes.memmove(target + home.tiles * packedhome.SPILL, home.address, home.moved)
    for tile in range(home.tiles):
        unpack_home_tile(tile, target, home.tiles, ctypes.addressof(spill), home.raw)


def _read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
