"""Packed copies in tests: tiles that are small enough for blocks of a few kilobytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from tiermem.core.block import Block, Extent
from tiermem.core.packing import Packed, packed_nbytes, parts_of
from tiermem.core.residency import Record, State
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.transfers.packed_copies import PackedCopy, stamp_of
from tiermem.transfer.packing import home_nbytes, is_spoiled, room_nbytes
from tiermem.transfer.streams import StreamCopyEngine

WORDS = 512
SMALL = {"WORDS": WORDS, "TILE": 2 * WORDS, "PACKED_TILE": 896, "GROWS": 128}
_MODULES = (
    "tiermem.core.packing",
    "tiermem.transfer.packing",
    "tiermem.transfer.streams",
    "tiermem.testing.streams",
)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Makes tiles small, inside ``with``; for devices that are simulated."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _MODULES:
            for name, value in SMALL.items():
                patch.setattr(f"{module}.{name}", value, raising=module == _MODULES[0])
        yield


def always_used(manager: BlockManager) -> None:
    """Makes every pass use packed copies, whatever it waits for."""
    packed = manager.parts.transfers.packed
    begin = packed.begin

    def begin_using(load: int, *, link_binds: bool) -> None:
        begin(load, link_binds=True)

    packed.begin = begin_using  # type: ignore[method-assign]


def at_rest(record: Record) -> bool:
    """Whether the home of a block has its bytes, and nobody is at them."""
    return record.at_home is State.VALID and not record.leases and record.home_extent is not None


def pack(
    manager: BlockManager, blocks: Sequence[Block], rows: Sequence[tuple[int, int]] = ()
) -> int:
    """Packs blocks at rest without a copy, by way of device memory of its own.

    Returns:
        How many of them.
    """
    copy, homes, transfers = manager.parts.copy, manager.parts.homes, manager.parts.transfers
    assert isinstance(copy, StreamCopyEngine)
    room = torch.zeros(room_nbytes(2), dtype=torch.uint8)
    packing = copy.packing(room, Extent(1 << 40, 0), 2)
    made = 0
    for block in blocks:
        record = manager.parts.table[block.id]
        if block in transfers.packed or not at_rest(record):
            continue
        parts = parts_of(block.nbytes, rows)
        extent = homes.lend(home_nbytes(parts))
        home = transfers.in_dram(record)
        if extent is None:  # those of before are given back as the next pass begins
            break
        assert home is not None
        copy.wait(transfers.home_ready.get(block.id))
        target = homes.arena.bytes_of(extent)
        packing.pack(home, target, parts)
        copy.synchronize()
        assert not is_spoiled(target)
        packed = Packed(target.data_ptr(), parts, packed_nbytes(parts))
        transfers.packed.add(block, PackedCopy(packed, extent, stamp_of(record)))
        made += 1
    return made
