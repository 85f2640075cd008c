"""A few blocks whose copies and compute run on simulated streams, and files among them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support_runtime import park_always
from support_virtual import STAGING

from tiermem.config import Policy, Settings
from tiermem.core.block import Extent, Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.residency import State
from tiermem.runtime.manager import BlockManager
from tiermem.testing.io import ScriptedEngine
from tiermem.testing.streams import SimulatedDevice
from tiermem.transfer.file.jobs import FileTransfer
from tiermem.transfer.streams import CudaChunkCopier, StreamCopyEngine

UP, DOWN, FILES, UNPACK, PACK = 101, 102, 103, 104, 105
PAGE = 4096
SHAPE = TensorShape("w", (PAGE,), (1,), torch.uint8, 1)


@dataclass(frozen=True)
class Case:
    """What a run is like.

    Attributes:
        seed: Of all that is random in it.
        slots: Blocks that HBM holds.
        blocks: How many there are.
        depth: Blocks that are fetched ahead.
        lag: Pieces of work, at most, that the device does after each use.
        late: The stream that does none then.
        poison: Whether what leaves HBM is overwritten.
    """

    seed: int
    slots: int
    blocks: int
    depth: int
    lag: int
    late: int | None
    poison: bool


def cases(
    slots: tuple[int, int],
    blocks: tuple[int, int],
    depth: tuple[int, int],
    lags: Sequence[int] = (0, 1, 3, 8),
    late: Sequence[int] = (UP, DOWN),
    poison: st.SearchStrategy[bool] | None = None,
) -> st.SearchStrategy[Case]:
    """Returns the cases of a test: numbers from and to, lags and copy streams to choose from."""
    return st.builds(
        Case,
        seed=st.integers(0, 1 << 30),
        slots=st.integers(*slots),
        blocks=st.integers(*blocks),
        depth=st.integers(*depth),
        lag=st.sampled_from(lags),
        late=st.sampled_from([None, 0, 1, *late]),
        poison=st.booleans() if poison is None else poison,
    )


def manager_over(
    device: SimulatedDevice, *, hbm: int, dram: int, depth: int = 0, nvme: Sequence[str] = ()
) -> BlockManager:
    """Returns a manager whose copies run on the streams of a simulated device.

    Args:
        device: The device.
        hbm: Bytes.
        dram: Bytes.
        depth: Blocks that are fetched ahead.
        nvme: Folders.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tiermem.runtime.assembly.HostCopyEngine",
            lambda: StreamCopyEngine(device, UP, DOWN, FILES, UNPACK, PACK),
        )
        return BlockManager(
            Settings(
                device="cpu",
                hbm=hbm,
                dram=dram,
                nvme=tuple(nvme),
                nvme_bytes=None,
                policy=Policy(params="dram"),
                prefetch_depth=depth,
            ),
            ScriptedEngine,
        )


class Streamed:
    """A manager of a few blocks whose copies and compute run on simulated streams."""

    def __init__(self, case: Case, nvme: str | None = None) -> None:
        self.case = case
        slots, blocks, poison = case.slots, case.blocks, case.poison
        self.random = Random(case.seed)
        self.saved = torch.zeros(2, PAGE, dtype=torch.uint8)
        self.device = SimulatedDevice(self.random)
        self.wrong: list[str] = []
        self.manager = manager_over(
            self.device,
            hbm=slots * PAGE,
            dram=2 * blocks * PAGE + (STAGING if nvme else 0),
            depth=case.depth,
            nvme=[nvme] if nvme else (),
        )
        self.manager.parts.transfers.poisons = poison
        self.manager.prefetcher.fetcher.beside = True
        self.glances = 0
        self.blocks = self.manager.add_blocks(
            [(f"b{i}", Role.PARAM, [SHAPE]) for i in range(blocks)]
        )
        self.values = list(range(1, blocks + 1))
        for block, value in zip(self.blocks, self.values, strict=True):
            self.manager.write_home(block, [torch.full((PAGE,), value, dtype=torch.uint8)])
        if nvme:
            self.add_files(blocks)

    def add_files(self, count: int) -> None:
        """Adds as many blocks whose homes are files, of which none has room in DRAM."""
        manager = self.manager
        transfers, copy = manager.parts.transfers, manager.parts.copy
        assert manager.parts.mover is not None and isinstance(copy, StreamCopyEngine)
        manager.parts.mover.close()
        found = manager.add_blocks(
            [(f"f{i}", Role.PARAM, [SHAPE]) for i in range(count)], home="nvme"
        )
        content: dict[int, int] = {}
        for number, block in enumerate(found):
            record = manager.record(block)
            record.defined, record.at_home = True, State.VALID
            assert record.home_extent is not None
            content[record.home_extent.offset] = 100 + number
            self.values.append(100 + number)
        self.blocks += found
        self.landing = Landing(copy, content)
        transfers.mover = self.landing  # type: ignore[assignment]
        park_always(manager.prefetcher)
        dram = manager.parts.homes.dram
        dram.allocate(dram.capacity - dram.used)
        assert dram.used == dram.capacity and len(self.blocks) == len(self.values)

    def use(self, number: int, *, write: bool, discard: bool) -> None:
        """One kernel on a block: it looks at every byte, and may write every byte."""
        block = self.blocks[number]
        if discard:
            self.manager.discard(block)
        # like a kernel's, its operands are addresses: no tensor keeps the slot
        address = self.manager.acquire(block).address
        expected = self.values[number]
        if not discard:
            look = partial(self.check, number, expected, address, "in HBM")
            self.device.submit(self.device.stream, look)
        if write or discard:
            value = self.values[number] = (expected + 7) % 251
            for half in (address, address + PAGE // 2):
                self.device.submit(
                    self.device.stream, partial(ctypes.memset, half, value, PAGE // 2)
                )
        self.manager.release(block, dirty=write or discard)

    def glance(self, number: int) -> None:
        """One kernel looks at a block where it lies in DRAM, if it may."""
        expected = self.values[number]

        def look(tensors: Sequence[torch.Tensor]) -> bool:
            address = tensors[0].data_ptr()
            self.device.submit(
                self.device.stream, partial(self.check, number, expected, address, "in place")
            )
            return True

        again = self.random.random() < 0.5
        self.glances += bool(
            self.manager.zero_copy.read(self.blocks[number], look, PAGE, again=again)
        )

    def rewrite(self, number: int) -> None:
        """The host writes a block where it lies in DRAM, as soon as it may."""
        block, host_loans = self.blocks[number], self.manager.host_loans
        assert not host_loans.can_lend([block])
        host_loans.settle([block])
        (tensors,), events = host_loans.lend([block])
        for event in events:
            event.synchronize()
        value = self.values[number] = (self.values[number] + 11) % 251
        tensors[0].fill_(value)
        host_loans.give_back([block])

    def replace(self, number: int) -> None:
        """A block is taken out, and another one has its home, which the host writes."""
        value = self.values[number] = (self.values[number] + 13) % 251
        self.manager.remove_blocks([self.blocks[number]])
        (block,) = self.manager.add_blocks([(f"b{number}", Role.PARAM, [SHAPE])])
        self.blocks[number] = block
        self.manager.write_home(block, [torch.full((PAGE,), value, dtype=torch.uint8)])

    def check(self, number: int, expected: int, address: int, where: str) -> None:
        """Looks at every byte."""
        seen = ctypes.string_at(address, PAGE)
        if seen.count(expected) != PAGE:
            self.wrong.append(f"block {number} {where}: {sorted(set(seen))} != {expected}")

    def look_beside(self) -> None:
        """A kernel on the other stream looks at block 0, and this stream does not wait for it."""
        here = self.device.stream
        event = self.device.record(here)
        self.device.stream = 1 - here
        self.device.wait(self.device.stream, event)
        self.use(0, write=False, discard=False)
        self.device.stream = here

    def run_on(self, random: Random) -> None:
        """The device does some of its work, and one stream is late with its."""
        for _ in range(random.randint(0, self.case.lag)):
            ran = [s for s in (0, 1, UP, DOWN, FILES, UNPACK, PACK) if s != self.case.late]
            self.device.advance(random.choice(ran))

    def stray(self, random: Random) -> None:
        """Now and then it goes on on the other stream, or looks at something from there."""
        if random.random() < 0.1:
            self.switch()
        if random.random() < 0.2:
            self.look_beside()
        if random.random() < 0.3:
            self.copy_saved(random)

    def copy_saved(self, random: Random) -> None:
        """A tensor that autograd has saved goes below HBM or comes back; it is in no block."""
        copy, nowhere = self.manager.parts.copy, Extent(0, 0)
        device, host = self.saved
        if random.random() < 0.5:
            copy.down(host, device, nowhere, None)
        else:
            copy.up(device, host, nowhere, None)

    def switch(self) -> None:
        """Computes on the other stream from now on, which waits for this one."""
        event = self.device.record(self.device.stream)
        self.device.stream = 1 - self.device.stream
        self.device.wait(self.device.stream, event)

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Looks at everything once more; fails if any byte was ever another than expected."""
        self.finish()
        assert kind or not self.wrong, self.wrong[:3]

    def finish(self) -> None:
        """Looks at everything once more, and at what came home."""
        for number in range(len(self.blocks)):
            self.use(number, write=False, discard=False)
        manager = self.manager
        for record in list(manager.parts.table):
            if record.in_hbm is State.DIRTY:
                manager.parts.transfers.drain(record)
        self.device.synchronize()
        for block, value in zip(self.blocks, self.values, strict=True):
            record = manager.parts.table[block.id]
            if record.home is Tier.NVME:
                continue
            assert record.home_extent is not None
            manager.parts.homes.open(record.home_extent)
            home = manager.parts.homes.arena.bytes_of(Extent(record.home_extent.offset, PAGE))
            if not bool((home == value).all()):
                self.wrong.append(f"home of {block.name}")
        manager.close()


@dataclass(eq=False)
class Reading:
    """A read under way.

    Attributes:
        transfer: What the caller has.
        target: Where to; None as long as it has no place.
        after: What its copies wait for.
        left: Halves of it that the disk has not read.
        held: Those that are read and wait for a place.
    """

    transfer: FileTransfer
    target: torch.Tensor | None = None
    after: Sequence[Any] = ()
    left: list[int] = field(default_factory=lambda: [0, 1])
    held: list[int] = field(default_factory=list)


class Landing:
    """A file mover whose reads land a chunk at a time, whenever the test likes.

    Args:
        engine: Copies the chunks up.
        content: What is in the file, by offset.

    Attributes:
        landed: Reads that had begun before they had a place.
    """

    parks = True

    def __init__(self, engine: StreamCopyEngine, content: dict[int, int]) -> None:
        self._copier = CudaChunkCopier(engine)
        self._content = content
        self._reading: list[Reading] = []
        self._over: list[FileTransfer] = []
        self._chunks: list[torch.Tensor] = []
        self.landed = 0

    def read(self, extent: Extent, target: torch.Tensor, **settings: Any) -> FileTransfer:
        after = settings.pop("after")
        transfer = FileTransfer(extent, is_read=True, **settings)
        self._reading.append(Reading(transfer, target, after))
        return transfer

    def park(self, extent: Extent, *, label: str) -> FileTransfer:
        transfer = FileTransfer(extent, is_read=True, label=label, urgent=False)
        self._reading.append(Reading(transfer))
        return transfer

    def land(
        self, transfer: FileTransfer, target: torch.Tensor, *, urgent: bool, after: Sequence[Any]
    ) -> FileTransfer:
        reading = next(reading for reading in self._reading if reading.transfer is transfer)
        assert reading.target is None
        reading.target, reading.after = target, after
        self.landed += 1
        while reading.held:
            self._copy(reading, reading.held.pop())
        return transfer

    def cancel(self, transfer: FileTransfer) -> None:
        self._reading = [reading for reading in self._reading if reading.transfer is not transfer]

    def rest(self, transfer: FileTransfer) -> None:
        pass

    def work(self, random: Random) -> None:
        """The disk is done with a chunk of any read."""
        able = [reading for reading in self._reading if reading.left]
        if able:
            reading = random.choice(able)
            half = reading.left.pop()
            if reading.target is None:
                reading.held.append(half)
            else:
                self._copy(reading, half)

    def _copy(self, reading: Reading, half: int) -> None:
        assert reading.target is not None
        part, transfer = reading.target.chunk(2)[half], reading.transfer
        chunk = torch.full_like(part, self._content[transfer.extent.offset])
        self._chunks.append(chunk)  # its bytes are read when the copy runs
        transfer.event = self._copier.to_target(part, chunk, reading.after).event
        if not (reading.left or reading.held):
            self._reading.remove(reading)
            transfer.finished, transfer.finished_ns = True, time.perf_counter_ns()
            self._over.append(transfer)

    def poll(self) -> list[FileTransfer]:
        over, self._over = self._over, []
        return over

    def wait(self, transfer: FileTransfer, **_: Any) -> None:
        while not transfer.finished:
            self.work(Random(0))

    def close(self) -> None:
        self._reading.clear()
