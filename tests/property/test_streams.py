"""Copies and compute on streams in every order that events allow: no byte is read too soon."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_runtime import park_always
from support_virtual import STAGING

import tiermem
from tiermem.config import Policy, Settings
from tiermem.core.block import Extent, Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.residency import State
from tiermem.runtime.manager import BlockManager
from tiermem.testing.io import ScriptedEngine
from tiermem.testing.streams import SimulatedDevice, SimulatedEvent
from tiermem.transfer.file.jobs import FileTransfer
from tiermem.transfer.streams import CudaChunkCopier, StreamCopyEngine

UP, DOWN, FILES = 101, 102, 103
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


class Streamed:
    """A manager of a few blocks whose copies and compute run on simulated streams."""

    def __init__(self, case: Case, nvme: str | None = None) -> None:
        self.case = case
        slots, blocks, poison = case.slots, case.blocks, case.poison
        self.random = Random(case.seed)
        self.device = SimulatedDevice(self.random)
        self.wrong: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tiermem.runtime.assembly.HostCopyEngine",
                lambda: StreamCopyEngine(self.device, UP, DOWN, FILES),
            )
            self.manager = BlockManager(
                Settings(
                    device="cpu",
                    hbm=slots * PAGE,
                    dram=2 * blocks * PAGE + (STAGING if nvme else 0),
                    nvme=(nvme,) if nvme else (),
                    nvme_bytes=None,
                    policy=Policy(params="dram"),
                    prefetch_depth=case.depth,
                ),
                ScriptedEngine,
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
            ran = [s for s in (0, 1, UP, DOWN, FILES) if s != self.case.late]
            self.device.advance(random.choice(ran))

    def stray(self, random: Random) -> None:
        """Now and then it goes on on the other stream, or looks at something from there."""
        if random.random() < 0.1:
            self.switch()
        if random.random() < 0.2:
            self.look_beside()

    def switch(self) -> None:
        """Computes on the other stream from now on, which waits for this one."""
        event = self.device.record(self.device.stream)
        self.device.stream = 1 - self.device.stream
        self.device.wait(self.device.stream, event)

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
            home = manager.parts.homes.arena.bytes_of(Extent(record.home_extent.offset, PAGE))
            if not bool((home == value).all()):
                self.wrong.append(f"home of {block.name}")
        manager.close()


@settings(max_examples=120)
@given(cases(slots=(1, 4), blocks=(2, 7), depth=(0, 3)))
def test_nothing_is_read_or_overwritten_too_soon(case: Case) -> None:
    """Random uses, with the device running behind by random amounts, one stream most of all."""
    bench = Streamed(case)
    random = Random(case.seed + 1)
    loop = [random.randrange(case.blocks) for _ in range(case.blocks)]
    try:
        for round_number in range(4):
            bench.manager.begin_pass("loop")
            for number in loop:
                kind = random.random()
                writable = number > 0  # block 0 is looked at beside, and so only ever read
                bench.use(number, write=writable and kind < 0.3, discard=writable and kind > 0.85)
                bench.stray(random)
                bench.run_on(random)
            if round_number == 2:
                random.shuffle(loop)
    finally:
        bench.finish()
    assert not bench.wrong, bench.wrong[:3]


@settings(max_examples=150)
@given(cases(slots=(1, 3), blocks=(5, 5), depth=(1, 1), lags=(0, 1, 3), poison=st.just(True)))
def test_nothing_is_written_in_dram_while_a_kernel_looks_at_it_there(case: Case) -> None:
    """Looks in place among writes in HBM, writes by the host, and homes that go to others."""
    bench, blocks = Streamed(case), case.blocks
    random = Random(case.seed + 1)
    try:
        for round_number in range(4):
            bench.manager.begin_pass("loop")
            for number in range(blocks):
                for _ in range(random.randint(0, 2)):
                    bench.glance(random.randrange(blocks))
                    if random.random() < 0.2:
                        bench.switch()
                kind = random.random()
                if kind < 0.5:
                    bench.use(number, write=kind < 0.25, discard=False)
                elif kind < 0.7:
                    bench.rewrite(number)
                elif kind < 0.8 and round_number:
                    bench.replace(number)
                bench.run_on(random)
    finally:
        bench.finish()
    assert not bench.wrong, bench.wrong[:3]
    assert bench.glances, "no kernel looked at anything in place"


@settings(max_examples=120)
@given(cases(slots=(2, 5), blocks=(3, 8), depth=(1, 3)))
def test_nothing_is_read_too_soon_in_a_loop_that_repeats(case: Case) -> None:
    """The same where copies go into the places of blocks that leave for them, events and all."""
    bench, blocks = Streamed(case), case.blocks
    bench.manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
    random = Random(case.seed + 1)
    repeated = 0
    try:
        for round_number in range(8):
            bench.manager.begin_pass("loop")
            repeated += bench.manager.replay.repeating
            for number in range(blocks):
                written = round_number == 6 and number == blocks - 1
                bench.use(number, write=written, discard=False)
                if random.random() < 0.1:
                    bench.switch()
                bench.run_on(random)
    finally:
        bench.finish()
    assert not bench.wrong, bench.wrong[:3]
    if case.depth + 2 <= case.slots < blocks:  # else a block is missed in every pass
        assert repeated, "no pass was taken for one that repeats"


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


@settings(max_examples=100)
@given(cases(slots=(1, 4), blocks=(2, 7), depth=(0, 3), late=(UP, FILES)))
def test_what_comes_from_files_overwrites_nothing_too_soon(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """Reads straight into HBM among copies from DRAM; chunks land when they like."""
    stream_from_files(case, str(tmp_path_factory.getbasetemp()))


def test_among_them_are_reads_that_began_before_there_was_room(tmp_path: Path) -> None:
    late = [
        stream_from_files(Case(seed, 3, 5, 2, 3, None, True), str(tmp_path)) for seed in range(5)
    ]
    assert all(late), late


def stream_from_files(case: Case, folder: str) -> int:
    """Uses blocks from files and from DRAM; returns how many reads began before there was room."""
    bench, blocks = Streamed(case, folder), case.blocks
    random = Random(case.seed + 1)
    loop = [random.randrange(2 * blocks) for _ in range(2 * blocks)]
    try:
        for _ in range(4):
            bench.manager.begin_pass("loop")
            for number in loop:
                kind = random.random()
                writable = 0 < number < blocks
                bench.use(number, write=writable and kind < 0.3, discard=writable and kind > 0.8)
                bench.stray(random)
                for _ in range(random.randint(0, 3)):
                    bench.landing.work(random)
                bench.run_on(random)
    finally:
        bench.finish()
    assert not bench.wrong, bench.wrong[:3]
    return bench.landing.landed


def test_a_chunk_that_lands_waits_for_no_later_read_s_room() -> None:
    """Only for what used its own place, however much was submitted meanwhile."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target = torch.zeros(2, PAGE, dtype=torch.uint8)
    ones = torch.ones(PAGE, dtype=torch.uint8)
    first = engine.guards(Extent(0, PAGE))
    device.submit(device.stream, lambda: None)
    second = engine.guards(Extent(PAGE, PAGE))
    engine.up(target[1], ones, Extent(PAGE, PAGE), None)  # behind that compute
    fence = CudaChunkCopier(engine).to_target(target[0], ones, first)
    while device.advance(FILES):
        pass
    assert fence.done() and bool((target[0] == 1).all())
    later = CudaChunkCopier(engine).to_target(target[1], ones, second)
    while device.advance(FILES):
        pass
    assert not later.done()
    device.synchronize()
    assert later.done()


def test_an_event_recorded_again_says_nothing_of_what_it_said_before() -> None:
    """Who waits for it already waits for the point of then; who asks now, for the one of now."""
    device = SimulatedDevice(Random(0))
    ran: list[str] = []
    device.submit(1, lambda: ran.append("first"))
    event = device.record(1)
    device.wait(2, event)
    device.submit(2, lambda: ran.append("after first"))
    device.submit(1, lambda: ran.append("second"))
    assert device.record(1, event) is event
    device.wait(3, event)
    device.submit(3, lambda: ran.append("after second"))
    for _ in range(2):
        device.advance(1)
    assert not event.done()
    while device.advance(2) or device.advance(3):
        pass
    assert ran == ["first", "after first"]
    device.synchronize()
    assert ran == ["first", "after first", "second", "after second"] and event.done()


def test_a_copy_whose_event_says_it_again_is_waited_for_however_many_there_were() -> None:
    """Copies that are over are forgotten when there are many; their events mean nothing then."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target, source = torch.zeros(64, PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    first = engine.up(target[0], source, Extent(0, PAGE), None)
    device.synchronize()
    for page in range(1, 64):
        engine.up(target[page], source, Extent(page * PAGE, PAGE), None)
        device.synchronize()
    target[0] = 0
    second = engine.up(target[0], source, Extent(0, PAGE), None, first)
    assert second is not first
    device.synchronize()
    target[0] = 0
    assert engine.up(target[0], source, Extent(0, PAGE), None, second) is second
    engine.claim(Extent(0, PAGE))
    seen: list[int] = []
    device.submit(device.stream, lambda: seen.append(int(target[0].sum())))
    while device.advance(device.stream):
        pass
    assert not seen
    device.synchronize()
    assert seen == [PAGE]


def test_a_copy_whose_event_is_recorded_again_is_the_last_one() -> None:
    """What overlapped its place was submitted before it, though after the event was made."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target, source = torch.zeros(3 * PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    twice = torch.ones(2 * PAGE, dtype=torch.uint8)
    first = engine.up(target[: 2 * PAGE], twice, Extent(0, 2 * PAGE), None)
    engine.up(target[PAGE:], twice, Extent(PAGE, 2 * PAGE), None)
    device.synchronize()
    target.zero_()
    assert engine.up(target[:PAGE], source, Extent(0, PAGE), None, first) is first
    engine.claim(Extent(0, 3 * PAGE))
    seen: list[int] = []
    device.submit(device.stream, lambda: seen.append(int(target.sum())))
    while device.advance(device.stream):
        pass
    assert not seen, "compute writes the place before the copy up has been made"
    device.synchronize()
    assert seen == [PAGE]


def test_what_a_file_mover_may_look_at_is_not_recorded_again() -> None:
    """A copy into the place of what came from a file waits for that, and has its own event."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target = torch.zeros(PAGE, dtype=torch.uint8)
    ones, twos = torch.ones(PAGE, dtype=torch.uint8), torch.full((PAGE,), 2, dtype=torch.uint8)
    place = Extent(0, PAGE)
    landed = engine.copy_up(target, ones, engine.guards(place))
    engine.landed(place, landed)
    event = engine.up(target, twos, place, None, landed)
    assert event is not landed
    while device.advance(UP):
        pass
    assert not target.any()
    device.synchronize()
    assert landed.done() and bool((target == 2).all())


def test_who_writes_a_place_waits_for_what_still_comes_there_from_a_file() -> None:
    """A block that was fetched and not used has left; compute has not waited for it."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target, ones = torch.zeros(PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    place = Extent(0, PAGE)
    for write in (engine.claim, partial(engine.poison, target)):
        engine.landed(place, engine.copy_up(target, ones, engine.guards(place)))
        write(place)
        device.submit(device.stream, partial(target.fill_, 2))
        while device.advance(device.stream) or device.advance(UP):
            pass
        device.synchronize()
        assert not bool((target == 1).any())


def test_a_circle_of_waits_is_an_error() -> None:
    """The simulation says so where work waits for what can never run."""
    device = SimulatedDevice(Random(0))
    device.submit(1, lambda: None)
    never = SimulatedEvent(device)
    device.wait(2, never)
    with pytest.raises(RuntimeError, match="in a circle"):
        device.synchronize()


def test_a_block_that_may_move_is_not_captured_in_a_graph() -> None:
    bench = Streamed(Case(0, slots=2, blocks=3, depth=1, lag=0, late=None, poison=True))
    manager = bench.manager
    shape = TensorShape("pinned", (PAGE,), (1,), torch.uint8, 1)
    (pinned,) = manager.add_blocks([("pinned", Role.PARAM, [shape])], home="hbm")
    bench.use(0, write=False, discard=False)
    bench.device.captured = True
    before = manager.stats()
    with pytest.raises(tiermem.ConfigError, match=r"block 'b0' .* CUDA graph"):
        manager.acquire(bench.blocks[0])
    manager.begin_pass("captured")
    slot = manager.acquire(pinned)
    assert slot.extent == manager.parts.table[pinned.id].extent
    manager.release(pinned)
    assert manager.stats() == before  # nothing was fetched, nothing counted
    bench.device.captured = False
    bench.finish()
    assert not bench.wrong
