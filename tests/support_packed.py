"""Packed copies in tests: tiles that are small enough for blocks of a few kilobytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import pytest
import torch
from support_streams import manager_over

from tiermem.core.block import Block, Extent, Role
from tiermem.core.layout import TensorShape
from tiermem.core.packing import Packed, packed_nbytes, parts_of
from tiermem.core.residency import Record, State
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services.packer import Packer, Wanted
from tiermem.runtime.transfers.packed_copies import PackedCopy
from tiermem.testing.streams import SimulatedDevice
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
        transfers.packed.add(block, PackedCopy(packed, extent, record.stamp))
        made += 1
    return made


COUNT = 4
NBYTES = 8 * 2 * WORDS
HALVES = TensorShape("w", (NBYTES // 2,), (1,), torch.bfloat16, 2)
FLOATS = TensorShape("w", (NBYTES // 4,), (1,), torch.float32, 4)


class Bench:
    """A manager over simulated streams, with blocks that HBM has no room for together."""

    def __init__(self, shape: TensorShape = HALVES, *, hbm: int = 3, dram: int = 4 * COUNT) -> None:
        self.device = SimulatedDevice(Random(0))
        self.manager = manager_over(self.device, hbm=hbm * NBYTES + (1 << 17), dram=dram * NBYTES)
        self.packed = self.manager.parts.transfers.packed
        self.shape = shape
        self.blocks = self.add(40)
        generator = torch.Generator().manual_seed(0)
        self.values = []
        for block in self.blocks:
            value = (torch.randn(shape.shape, generator=generator) * 0.02).to(shape.dtype)
            self.values.append(value)
            self.manager.write_home(block, [value])
        self.packer = Packer(self.manager, 2)

    def add(self, count: int) -> list[Block]:
        """Adds blocks."""
        return self.manager.add_blocks([(f"b{i}", Role.PARAM, [self.shape]) for i in range(count)])

    def pack(self, rows: Sequence[tuple[int, int]] = ()) -> int:
        """Packs all blocks."""
        return self.packer.pack([Wanted(block, rows) for block in self.blocks])

    def used_dram(self) -> int:
        """Bytes of DRAM in use."""
        return self.manager.parts.homes.dram.used

    def write(self, number: int, value: torch.Tensor) -> None:
        """Writes a block in HBM, and what is there home."""
        block, self.values[number] = self.blocks[number], value
        with self.manager.lock:
            view = self.manager.acquire(block).views[0]
            self.manager.parts.copy.synchronize()
            view.copy_(value)
            del view
            self.manager.release(block, dirty=True)
            self.manager.parts.transfers.drain(self.manager.parts.table[block.id])
            self.manager.parts.copy.synchronize()

    def seen(self, number: int) -> torch.Tensor:
        """Returns what a kernel sees of a block."""
        with self.manager.lock:
            view = self.manager.acquire(self.blocks[number]).views[0]
            self.manager.parts.copy.synchronize()
            found = view.clone()
            del view
            self.manager.release(self.blocks[number])
        return found

    def up(self) -> int:
        """Bytes that came up from DRAM."""
        return self.manager.stats().links["dram->hbm"].nbytes
