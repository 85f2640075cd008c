"""Block managers for tests: small, on the CPU, with an I/O engine that the test steers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Extent, Role
from tiermem.core.layout import TensorShape
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.slots import Holder, Slot
from tiermem.testing.io import ScriptedEngine
from tiermem.transfer.copy import Event
from tiermem.transfer.stamps import HostClock

PAGE = 4096
CHUNK = 64 << 10
STAGING = 8 * CHUNK


class EvenClock(HostClock):
    """Every reading is ten microseconds after the one before, however busy the machine is.

    By the real clock a pass that the machine was slow in is a reason for another plan.
    """

    def __init__(self) -> None:
        self.readings = itertools.count(step=10_000)

    def stamp(self) -> int:
        return next(self.readings)

    def stamp_copies(self, extent: Extent | None, after: Event | None) -> int:
        return next(self.readings)


def park_always(prefetcher: Prefetcher) -> None:
    """Makes every plan read straight into HBM, and begin before there is room."""
    disk = prefetcher.disk
    plan = disk.plan

    def as_wanted(schedule: Schedule, outlook: StreamPlan) -> None:
        plan(schedule, outlook)
        disk.shared = disk.through_dram = False
        disk.parks = True

    disk.plan = as_wanted  # type: ignore[method-assign]


class Owner(Holder):
    """Points one parameter at a block and follows it, as a module does."""

    def __init__(self, manager: BlockManager, block: Block) -> None:
        self.manager = manager
        self.block = block
        self.away = torch.empty(0, dtype=torch.uint8)
        self.param = torch.nn.Parameter(self.away, requires_grad=False)
        self.held = 0
        manager.parts.holders[block.id] = self

    def hold(self) -> Slot:
        slot = self.manager.acquire(self.block)
        self.held += 1
        self.repoint(slot)
        return slot

    def let_go(self, *, dirty: bool = False, soft: bool = False) -> None:
        self.held -= 1
        if not self.held and not soft:
            self._away()
        self.manager.release(self.block, dirty=dirty)

    def _away(self) -> None:
        slot = self.manager.parts.slots.current.get(self.block.id)
        self.param.data = self.away
        if slot is not None:
            slot.pointed = 0

    def unpoint(self) -> None:
        if not self.held:
            self._away()

    def repoint(self, slot: Slot) -> None:
        self.param.data = slot.views[0]
        slot.pointed = 1

    def leases(self) -> int:
        return self.held


class Rig:
    """A manager, its engine, and what its blocks hold.

    Attributes:
        manager: The manager.
        engine: Its I/O engine; None without an NVMe tier.
        blocks: Its blocks, all with data.
        data: Their bytes, by id.
    """

    def __init__(self, manager: BlockManager, engine: ScriptedEngine | None) -> None:
        self.manager = manager
        self.engine = engine
        self.blocks: list[Block] = []
        self.data: dict[int, bytes] = {}
        self.rng = random.Random(0)

    def add(self, pages: int, home: str, role: Role = Role.PARAM, *, blank: bool = False) -> Block:
        shape = TensorShape("t", (pages * PAGE,), (1,), torch.uint8, 1)
        name = f"block{len(self.blocks)}"
        (block,) = self.manager.add_blocks([(name, role, [shape])], home=home)
        self.blocks.append(block)
        if not blank:
            self.write(block)
        return block

    def noise(self, block: Block) -> torch.Tensor:
        self.data[block.id] = self.rng.randbytes(block.nbytes)
        return torch.frombuffer(bytearray(self.data[block.id]), dtype=torch.uint8)

    def write(self, block: Block) -> None:
        """Gives a block new bytes: at home if it has none, else through HBM."""
        record = self.manager.record(block)
        if not record.defined and record.home_extent is not None and record.extent is None:
            self.manager.write_home(block, [self.noise(block)])
            return
        slot = self.manager.acquire(block)
        slot.bytes.copy_(self.noise(block))
        self.manager.release(block, dirty=True)

    def use(self, block: Block) -> None:
        """Acquires a block, compares its bytes and gives it back."""
        slot = self.manager.acquire(block)
        try:
            self.compare(slot.bytes, block)
        finally:
            self.manager.release(block)

    def compare(self, found: torch.Tensor, block: Block) -> None:
        assert found.numpy().tobytes() == self.data[block.id], block.name

    def check(self) -> None:
        """Checks the table, and the bytes of every block."""
        manager = self.manager
        manager.flush()
        manager.parts.table.check()
        assert not manager.parts.transfers.flights
        slots = manager.parts.slots.current
        assert set(slots) == {r.block.id for r in manager.parts.table if r.extent is not None}
        assert set(manager.parts.slots.by_address.values()) == set(slots.values())
        for block in self.blocks:
            if block.id in self.data:
                self.compare(manager.read(block)[0], block)


@contextmanager
def rig(
    hbm: int,
    blocks: Sequence[tuple[int, str]] = (),
    *,
    nvme: Path | None = None,
    dram: int = 64,
    depth: Any = "auto",
    **engine: Any,
) -> Iterator[Rig]:
    """Opens a manager.

    Args:
        hbm: Pages of HBM.
        blocks: Pages and home of each block; all are given bytes.
        nvme: Folder of the swap file.
        dram: Pages of DRAM, staging not counted.
        depth: Blocks looked ahead.
        **engine: Settings of the I/O engine.
    """
    double = ScriptedEngine(**engine) if nvme is not None else None
    settings = Settings(
        "cpu",
        hbm * PAGE,
        dram * PAGE + (STAGING if nvme else 0),
        (str(nvme),) if nvme else (),
        None,
        Policy(),
        depth,
    )
    manager = BlockManager(settings, (lambda: double) if double is not None else None)
    made = Rig(manager, double)
    try:
        for pages, home in blocks:
            made.add(pages, home)
        yield made
    finally:
        if double is not None:
            double.release()
        manager.close()
