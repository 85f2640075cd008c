"""Packs blocks that are in host memory, using a little memory of the device.

The device does it many times as fast as the host. Three streams work on different pieces at the
same time: one copies them to the device, one packs, one copies the results back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermem.core.block import align_up
from tiermem.core.packing import PACKED_TILE, TILE, Part, packed_nbytes
from tiermem.transfer.driver import StreamCalls

PIECE = 512
"""Tiles that are packed at once."""
PLACES = 3
_FLAG = 4
_FLAGS = 256
"""This many more than there are places, so a flag has been copied before it is used again."""


def room_nbytes(piece: int = PIECE) -> int:
    """Returns the bytes of device memory needed for pieces of so many tiles."""
    return _FLAG * _FLAGS + PLACES * piece * (TILE + PACKED_TILE)


def home_nbytes(parts: Sequence[Part]) -> int:
    """Returns the bytes of host memory for the packed form of a block and its flag."""
    return align_up(packed_nbytes(parts) + _FLAG)


def is_spoiled(target: torch.Tensor) -> bool:
    """Whether a block turned out to have too many escapes to be packed.

    Args:
        target: The packed form, 1-D uint8; no copy to it is in progress.
    """
    return bool(target[-_FLAG:].any())


class Packing:
    """Packs one block after the other."""

    def __init__(
        self,
        calls: StreamCalls,
        streams: tuple[int, int, int],
        room: torch.Tensor,
        piece: int,
    ) -> None:
        """Stores its arguments; begins no work.

        Args:
            calls: The device.
            streams: Handles of the streams for copies up, kernels and copies down; all of them
                wait for earlier users of the room.
            room: Device bytes, :func:`room_nbytes` of them.
            piece: Tiles that are packed at once.
        """
        self._calls = calls
        self._streams = streams
        self._room = room
        self._piece = piece
        self._pieces = self._blocks = 0
        self._free: list[Any] = [None] * PLACES

    def pack(self, source: torch.Tensor, target: torch.Tensor, parts: Sequence[Part]) -> None:
        """Submits the packing of a block.

        Args:
            source: Its bytes in host memory.
            target: Host memory for the packed form, :func:`home_nbytes` of it.
            parts: The parts in which it is packed, at least one whole tile.
        """
        calls, (_, kernels, down) = self._calls, self._streams
        flag = self._room.data_ptr() + _FLAG * (self._blocks % _FLAGS)
        self._blocks += 1
        calls.fill(kernels, flag, 0, _FLAG)
        at, to = source.data_ptr(), target.data_ptr()
        for part in parts:
            for first in range(0, part.tiles, self._piece):
                tiles = min(self._piece, part.tiles - first)
                begin, offset = part.begin + first * TILE, part.offset + first * PACKED_TILE
                self._pack_piece(at + begin, to + offset, tiles, flag)
            rest = part.nbytes - part.tiles * TILE
            if rest:  # little: no copy of its own
                last = part.begin + part.nbytes
                behind = part.offset + part.moved
                target[behind - rest : behind].copy_(source[last - rest : last])
        calls.follow(down, kernels)
        calls.copy(down, to + target.numel() - _FLAG, flag, _FLAG)

    def _pack_piece(self, source: int, target: int, tiles: int, flag: int) -> None:
        """Submits the packing of some tiles."""
        calls, (up, kernels, down) = self._calls, self._streams
        number = self._pieces % PLACES
        self._pieces += 1
        place = self._room.data_ptr() + _FLAG * _FLAGS + number * self._piece * (TILE + PACKED_TILE)
        packed, free = place + self._piece * TILE, self._free[number]
        if free is not None:
            calls.wait(up, free)
        calls.copy(up, place, source, tiles * TILE)
        calls.follow(kernels, up)
        calls.pack(kernels, packed, place, tiles, flag)
        calls.follow(down, kernels)
        calls.copy(down, target, packed, tiles * PACKED_TILE)
        self._free[number] = calls.record(down, free)
