"""The bounds: the bytes that a wrapped model streams, moved with nothing around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tiermem
from tiermem.core.block import Extent
from tiermem.io.engine import IoOp, IoRequest
from tiermem.io.probe import choose_engine
from tiermem.storage.arena import HostArena

_DEPTH = 8


def records_of(tier: tiermem.TierManager, names: str = "layers") -> list[Any]:
    """Returns the table's rows of the blocks with ``names`` in their name, that have a home."""
    table = tier._manager.parts.table
    return [r for r in table if names in r.block.name and r.home_extent is not None]


def nbytes_of_blocks(tier: tiermem.TierManager, names: str = "layers") -> int:
    """Returns the bytes of those blocks."""
    return sum(r.block.nbytes for r in records_of(tier, names))


def raw_copy(
    tier: tiermem.TierManager, nbytes: int | None = None, names: str = "layers"
) -> Callable[[], None]:
    """Returns a call that copies the blocks' home bytes to the device, back to back.

    Args:
        tier: Where they are, in DRAM.
        nbytes: How many of the bytes; all of them by default.
        names: Which blocks.
    """
    manager = tier._manager
    sources = []
    left = nbytes_of_blocks(tier, names) if nbytes is None else nbytes
    for record in [r for r in records_of(tier, names) if r.home is tiermem.Tier.DRAM]:
        source = manager.parts.homes.arena.bytes_of(record.home_extent)[:left]
        if source.numel():
            sources.append(source)
            left -= source.numel()
    largest = max((s.numel() for s in sources), default=0)
    target = torch.empty(largest, dtype=torch.uint8, device=manager.parts.device)

    def copy() -> None:
        for source in sources:
            target[: source.numel()].copy_(source, non_blocking=True)

    return copy


class RawRead:
    """O_DIRECT reads of blocks' home bytes by the bare I/O engine. A context manager.

    Args:
        tier: Whose swap file, or checkpoint.
        names: Which blocks.
    """

    def __init__(self, tier: tiermem.TierManager, names: str = "layers") -> None:
        homes = tier._manager.parts.homes
        files, chunk = homes.files, homes.chunk
        self._chunk = chunk
        self._arena = HostArena(tiermem.Tier.DRAM, chunk * _DEPTH)
        self._arena.bytes_of(Extent(0, chunk * _DEPTH)).fill_(1)
        records = [r for r in records_of(tier, names) if r.home is tiermem.Tier.NVME]
        self._pieces = [piece for r in records for piece in files.pieces(r.home_extent)]
        self._engine = choose_engine()[0]()
        self._engine.open(files.fds, [(self._arena.address, chunk * _DEPTH)])

    def __enter__(self) -> RawRead:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()
        self._arena.close()

    def read(self, nbytes: int | None = None) -> int:
        """Reads the first ``nbytes`` (all by default), 8 requests in flight.

        Where ``nbytes`` is more than all of them together it begins anew.

        Returns:
            Bytes read: whole pieces, so up to one piece more than asked for.
        """
        wanted = sum(p.nbytes for p in self._pieces) if nbytes is None else nbytes
        free, under_way, read, at = list(range(_DEPTH)), 0, 0, 0
        while read < wanted or under_way:
            batch = []
            while free and read < wanted:
                piece, slot = self._pieces[at % len(self._pieces)], free.pop()
                address = self._arena.address + slot * self._chunk
                batch.append(
                    IoRequest(IoOp.READ, piece.file, piece.file_offset, address, piece.nbytes, slot)
                )
                read += piece.nbytes
                at += 1
            under_way += len(batch)
            if batch:
                self._engine.submit(batch)
            for done in self._engine.wait(None):
                if done.errno:
                    raise OSError(done.errno, "raw read failed")
                free.append(done.token)
                under_way -= 1
        return read
