"""A manager on a device that it shares: limits move, memory is refused, and contents stay.

The oracle is a dictionary of bytes. The device is a double that refuses what a driver refuses, and
that loses what was written where nothing was mapped.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support_examples import examples
from support_runtime import PAGE, Owner, Rig

from tiermem.config import Policy, Settings
from tiermem.core.block import Block
from tiermem.errors import CapacityError
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.opening import OpenHbm
from tiermem.storage.mapped import MappedHostArena
from tiermem.testing.pieces import FakeDevice, FakePieceCalls

CHUNK = 4 * PAGE
TALLY: Counter[str] = Counter()


def on(
    device: FakeDevice, *, most: int, start: int | None
) -> Callable[[Settings, torch.device], OpenHbm]:
    """Returns what opens HBM on a fake device; without a start it is a limit that is given."""

    def opened(settings: Settings, _: torch.device) -> OpenHbm:
        arena = MappedHostArena(most, FakePieceCalls(device), chunk=CHUNK)
        return OpenHbm(arena, start or most, most, device, start is not None)

    return opened


def rig_on(device: FakeDevice, most: int, start: int | None = None, dram: int = 400) -> Rig:
    given = Settings("cpu", most, dram * PAGE, (), None, Policy(), "auto")
    return Rig(BlockManager(given, None, on(device, most=most, start=start)), None)


class Limits(RuleBasedStateMachine):
    numbers = st.integers(0, 9)

    @initialize(
        total=st.integers(40, 160),
        auto=st.booleans(),
        sizes=st.lists(st.integers(1, 9), min_size=6, max_size=12),
        others=st.sampled_from([0.8, 0.5, 0.0]),
    )
    def start(self, total: int, auto: bool, sizes: list[int], others: float) -> None:
        self.device = FakeDevice(total * PAGE)
        self.device.others = int(others * total) * PAGE
        self.auto = auto
        most = total * PAGE if auto else random.Random(total).randrange(30, 200) * PAGE
        self.rig = rig_on(self.device, most, most // 2 if auto else None)
        self.manager = self.rig.manager
        for pages in sizes:
            self.rig.add(pages, "dram")
        self.held: list[Owner] = []
        self.passes = 0

    def block(self, number: int) -> Block:
        return self.rig.blocks[number % len(self.rig.blocks)]

    def attempt(self, what: Callable[[], object]) -> None:
        """Does something that may be refused, where the device has not got the memory."""
        try:
            what()
        except CapacityError as error:
            lacking = self.device.free() < 9 * PAGE + CHUNK or self.manager.parts.table.hbm.walled
            assert lacking or self.held, error

    @rule(number=numbers)
    def use(self, number: int) -> None:
        self.attempt(lambda: self.rig.use(self.block(number)))

    @rule(number=numbers)
    def write(self, number: int) -> None:
        block = self.block(number)
        known = self.rig.data[block.id]
        try:
            self.attempt(lambda: self.rig.write(block))
        finally:
            if not self.manager.record(block).usable:
                self.rig.data[block.id] = known

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        block = self.block(number)
        if len(self.held) < 2 and all(owner.block is not block for owner in self.held):
            owner = Owner(self.manager, block)

            def take() -> None:
                owner.hold()
                self.held.append(owner)

            self.attempt(take)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        owner = self.held.pop()
        self.rig.compare(owner.param.detach(), owner.block)
        owner.let_go()

    @rule(key=st.integers(0, 2), uses=st.lists(numbers, max_size=8))
    def go_through(self, key: int, uses: list[int]) -> None:
        self.manager.begin_pass(key)
        for number in uses:
            self.use(number)

    @rule(rounds=st.integers(1, 4))
    def go_round(self, rounds: int) -> None:
        for _ in range(rounds):
            before = self.manager.parts.table.hbm.capacity
            self.manager.begin_pass("round")
            TALLY["grown"] += self.manager.parts.table.hbm.capacity > before
            TALLY["shrunk"] += self.manager.parts.table.hbm.capacity < before
            for number in range(len(self.rig.blocks)):
                self.use(number)

    @rule(share=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]))
    def others_take(self, share: float) -> None:
        room = self.device.free() + self.device.others
        self.device.others = int(share * room) // PAGE * PAGE

    @rule()
    def torch_runs_out(self) -> None:
        self.device.short = True
        self.manager.begin_pass("again")
        if self.auto and not self.held:
            TALLY["given back"] += 1
            largest = max(block.nbytes for block in self.rig.blocks)
            assert self.manager.parts.slots.arena.mapped <= 2 * largest + 2 * CHUNK

    @rule(pages=st.integers(1, 9))
    def add(self, pages: int) -> None:
        if len(self.rig.blocks) < 14:
            self.rig.add(pages, "dram")

    @invariant()
    def what_is_there_has_memory(self) -> None:
        if not hasattr(self, "manager"):
            return
        arena, table = self.manager.parts.slots.arena, self.manager.parts.table
        table.check()
        TALLY["refused"] += bool(table.hbm.walled)
        (calls,) = self.device.arenas
        for record in table:
            if record.extent is not None:
                calls.use(arena.address + record.extent.offset, record.extent.nbytes)
                if record.usable:
                    self.rig.compare(
                        self.manager.parts.slots.current[record.block.id].bytes, record.block
                    )
        assert arena.mapped == calls.taken
        assert arena.mapped <= -(-self.manager.parts.limit.most // CHUNK) * CHUNK
        assert self.device.free() >= 0

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.held:
            self.let_go()
        self.device.others = 0  # what was refused can be had again
        self.go_round(3)
        self.rig.check()
        self.manager.close()
        self.rig.blocks.clear()
        del self.rig, self.manager
        gc.collect()
        assert self.device.arenas[0].closed


Limits.TestCase.settings = settings(
    max_examples=examples(12), stateful_step_count=15, deadline=None
)


def test_limits() -> None:
    TALLY.clear()
    Limits.TestCase("runTest").runTest()
    for name in ("refused", "grown", "shrunk", "given back"):
        assert TALLY[name], f"no example in which HBM was {name}"


@pytest.mark.parametrize("others", [0, 80])
def test_a_loop_takes_what_is_left_and_no_more(others: int) -> None:
    """From the second round on all that others leave, but for the margin, holds blocks."""
    device = FakeDevice(160 * PAGE)
    made = rig_on(device, 160 * PAGE, 80 * PAGE)
    for _ in range(40):
        made.add(8, "dram")
    limit = made.manager.parts.limit
    for step in range(3):
        made.manager.begin_pass("forward", [block.id for block in made.blocks])
        if step == 0:
            assert made.manager.parts.table.hbm.capacity == 80 * PAGE
            device.others = others * PAGE  # the activations' peak, which torch keeps
        for block in made.blocks:
            made.use(block)
    left = 160 * PAGE - others * PAGE
    assert left - 40 * PAGE - CHUNK <= made.manager.parts.table.hbm.capacity <= left - 40 * PAGE
    assert not made.manager.parts.table.hbm.walled
    device.short = True  # the next batch is larger
    made.manager.begin_pass("forward")
    assert made.manager.parts.slots.arena.mapped <= 16 * PAGE + CHUNK
    for _ in range(2):
        for block in made.blocks:
            made.use(block)
        made.manager.begin_pass("forward")
    assert made.manager.parts.table.hbm.capacity > 16 * PAGE + CHUNK
    assert limit.least <= made.manager.parts.table.hbm.capacity
    made.check()
    made.manager.close()


@pytest.mark.parametrize("watched", [True, False])
def test_a_quarter_is_left_alone_where_nobody_tells_that_torch_ran_out(watched: bool) -> None:
    device = FakeDevice(1 << 33)
    device.watched = watched
    device.others = device.total - 160 * PAGE
    made = rig_on(device, 160 * PAGE, 80 * PAGE)
    for _ in range(40):
        made.add(8, "dram")
    for step in range(3):
        made.manager.begin_pass("forward", [block.id for block in made.blocks])
        if step == 0:
            device.others = device.total - (1 << 30)
        for block in made.blocks:
            made.use(block)
    capacity = made.manager.parts.table.hbm.capacity
    assert capacity == (160 if watched else 80) * PAGE
    made.check()
    made.manager.close()


def test_refused_memory_is_done_without() -> None:
    """A budget that the device has not got: the first pass makes do, the next one fits."""
    device = FakeDevice(64 * PAGE)
    device.others = 24 * PAGE
    made = rig_on(device, 64 * PAGE)
    for _ in range(20):
        made.add(4, "dram")
    made.manager.begin_pass("forward")
    for block in made.blocks:
        made.use(block)
    assert made.manager.parts.table.hbm.walled == 24 * PAGE
    assert made.manager.stats().hbm_mapped == 40 * PAGE
    made.manager.begin_pass("forward")
    assert not made.manager.parts.table.hbm.walled
    assert made.manager.parts.table.hbm.capacity <= 40 * PAGE
    for block in made.blocks:
        made.use(block)
    assert not made.manager.parts.table.hbm.walled
    device.others = 0
    for _ in range(8):
        made.manager.begin_pass("forward")
        for block in made.blocks:
            made.use(block)
    assert made.manager.parts.table.hbm.capacity > 40 * PAGE, "what others gave back is used"
    made.check()
    made.manager.close()


def test_a_device_that_is_full_says_so() -> None:
    device = FakeDevice(16 * PAGE)
    device.others = 12 * PAGE
    made = rig_on(device, 16 * PAGE)
    block = made.add(8, "dram")
    with pytest.raises(CapacityError, match=r"device has no memory for .* of it"):
        made.use(block)
    device.others = 0
    made.manager.begin_pass("forward")
    made.use(block)
    made.manager.close()


def test_what_is_in_use_moves_to_memory_that_comes_back() -> None:
    """Free chunks between blocks in use are given back as well, and taken again to join gaps."""
    device = FakeDevice(64 * PAGE)
    made = rig_on(device, 24 * PAGE, 24 * PAGE)
    manager = made.manager
    before, held, behind, large = (made.add(pages, "dram") for pages in (8, 8, 8, 12))
    manager.begin_pass("forward")
    for block in (before, held, behind):
        made.use(block)
    owner = Owner(manager, held)
    owner.hold()
    made.blocks = [held, large]
    manager.remove_blocks([before, behind])
    assert manager.parts.slots.arena.mapped == 24 * PAGE
    device.short = True
    manager.begin_pass("forward")
    assert manager.parts.table.hbm.capacity == 24 * PAGE
    assert manager.parts.slots.arena.mapped == 8 * PAGE
    made.use(large)
    assert manager.stats().relocations == 1
    (calls,) = device.arenas
    for block in (held, large):
        extent = manager.record(block).extent
        assert extent is not None
        calls.use(manager.parts.slots.arena.address + extent.offset, extent.nbytes)
    made.compare(owner.param.detach(), held)
    owner.let_go()
    made.check()
    manager.close()
