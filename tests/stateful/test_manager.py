"""The block manager against a dictionary of bytes: random use, budgets, orders and faults.

Whatever is asked in whatever order, and whatever the disk does meanwhile, contents equal the
oracle's, budgets hold, every block keeps a valid copy, errors say where they come from, and what
failed succeeds when the fault has passed.
"""

from __future__ import annotations

import contextlib
import errno
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support_examples import examples
from support_process import nothing_left_open

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape
from tiermem.core.residency import State
from tiermem.errors import CapacityError, IntegrityError, StorageError
from tiermem.io.engine import IoOp, IoRequest
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.slots import Holder, Slot
from tiermem.testing.io import Fault, ScriptedEngine

PAGE = 4096
CHUNK = 64 << 10
SIZES = [PAGE, 3 * PAGE, CHUNK, CHUNK + PAGE, 3 * CHUNK + PAGE]
STAGING = 8 * CHUNK
PATIENCE = 3
MODES = ["well", "short", "busy", "unreadable", "full", "flipping", "shaky"]
TALLY: Counter[str] = Counter()
ROLES = [Role.PARAM, Role.GRAD, Role.OPTIMIZER]


class Disk:
    """Decides the order of completions and what goes wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mode = "well"

    def order(self, pending: int) -> int:
        return self.rng.randrange(pending)

    def fault(self, request: IoRequest, tries: int) -> Fault | None:
        writes = request.op is IoOp.WRITE
        match self.mode:
            case "short" if tries < PATIENCE:
                return Fault(short=self.rng.randrange(1, request.nbytes))
            case "busy" if tries < PATIENCE:
                return Fault(errno=self.rng.choice([errno.EAGAIN, errno.EINTR, errno.EBUSY]))
            case "unreadable" if not writes:
                return Fault(errno=errno.EIO)
            case "full" if writes:
                return Fault(errno=errno.ENOSPC)
            case "flipping" if not writes:
                return Fault(flip_bit=self.rng.randrange(1 << 20))
            case "shaky" if self.rng.random() < 0.4:
                return Fault(errno=errno.EIO)
        return None


class Owner(Holder):
    """Points one parameter at a block, as a module does."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.away = torch.empty(0, dtype=torch.uint8)
        self.param = torch.nn.Parameter(self.away, requires_grad=False)
        self.slot: Slot | None = None
        self.held = 0

    def point(self, slot: Slot) -> None:
        self.param.data = slot.views[0]
        self.slot, slot.pointed = slot, 1

    def go_away(self) -> None:
        self.param.data = self.away
        if self.slot is not None:
            self.slot.pointed = 0
        self.slot = None

    def unpoint(self) -> None:
        if not self.held:
            self.go_away()

    def repoint(self, slot: Slot) -> None:
        self.point(slot)

    def leases(self) -> int:
        return self.held


class Manager(RuleBasedStateMachine):
    numbers = st.integers(0, 11)

    @initialize(
        seed=st.integers(0, 1 << 30),
        hbm=st.integers(1, 8),
        homes=st.lists(st.sampled_from(["dram", "nvme", "nvme"]), min_size=4, max_size=8),
        depth=st.sampled_from(["auto", 0, 1, 3]),
    )
    def start(self, seed: int, hbm: int, homes: list[str], depth: Any) -> None:
        self.rng = random.Random(seed)
        self.disk = Disk(seed)
        self.engine = ScriptedEngine(self.disk.order, self.disk.fault)
        self.folder = tempfile.TemporaryDirectory()
        hbm_nbytes = max(SIZES) + hbm * CHUNK
        config = Settings(
            "cpu", hbm_nbytes, STAGING + 12 * max(SIZES), (self.folder.name,), None, Policy(), depth
        )
        self.manager = BlockManager(config, lambda: self.engine)
        self.blocks: list[Block] = []
        self.owners: dict[int, Owner] = {}
        self.oracle: dict[int, bytes | None] = {}
        self.aliases: list[tuple[torch.Tensor, bytes]] = []
        for home in homes:
            self.add(home)
        for number in range(len(homes)):
            if self.rng.random() < 0.8:
                self.write_at_home(number)

    def add(self, home: str) -> None:
        nbytes = self.rng.choice(SIZES)
        shape = TensorShape("t", (nbytes,), (1,), torch.uint8, 1)
        role = self.rng.choice(ROLES)
        name = f"block{len(self.oracle)}"
        (block,) = self.manager.add_blocks([(name, role, [shape])], home=home)
        self.blocks.append(block)
        self.owners[block.id] = self.manager.parts.holders[block.id] = Owner(block)
        self.oracle[block.id] = None

    def noise(self, nbytes: int) -> bytes:
        return self.rng.randbytes(nbytes)

    def pick(self, number: int) -> tuple[Block, Owner]:
        block = self.blocks[number % len(self.blocks)]
        return block, self.owners[block.id]

    # -- faults --------------------------------------------------------------

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Does something; if the disk makes it fail, does it again on a disk that works."""
        self.engine.release()
        try:
            return call()
        except StorageError as error:
            assert self.disk.mode in ("unreadable", "full", "flipping", "shaky")
            self.check_error(error)
            self.manager.parts.table.check()
        self.disk.mode = "well"
        self.manager.flush()  # what was begun on the failing disk comes to its end
        self.agrees()
        return call()

    def check_error(self, error: StorageError) -> None:
        assert error.block in {block.name for block in self.blocks}
        assert error.tier == "nvme"
        assert error.path == self.folder.name
        assert error.offset >= 0 and error.offset % PAGE == 0
        if isinstance(error, IntegrityError):
            assert self.disk.mode == "flipping"
        else:
            assert error.errno in (errno.EIO, errno.ENOSPC)
        for part in (error.block, error.path, str(error.offset)):
            assert part in str(error)

    @rule(
        mode=st.sampled_from(["short", "busy", "unreadable", "full", "flipping", "shaky", "well"])
    )
    def disk_turns(self, mode: str) -> None:
        self.disk.mode = mode

    @rule()
    def disk_stops(self) -> None:
        self.engine.hold()

    @rule(uses=st.integers(0, 6))
    def circles(self, uses: int) -> None:
        """From now on plans hand HBM out in a ring, or do not."""
        prefetcher = self.manager.prefetcher
        prefetcher._outlooks.clear()
        maker = prefetcher._maker
        make = maker.make
        maker.make = lambda *args, **options: replace(  # type: ignore[method-assign]
            make(*args, **options), turn=uses
        )
        self.manager.parts.evictor.ring.uses = uses

    # -- use -----------------------------------------------------------------

    def room_for(self, block: Block) -> bool:
        """Whether the block fits beside what is in use, by sizes alone."""
        table = self.manager.parts.table
        used = sum(o.block.nbytes for o in self.owners.values() if o.held)
        mine = 0 if self.owners[block.id].held else block.nbytes
        return used + mine <= table.hbm.capacity

    def acquire(self, block: Block) -> Slot | None:
        try:
            return self.attempt(lambda: self.manager.acquire(block))
        except CapacityError as error:
            assert self.aliases or not self.room_for(block), error
            assert repr(block.name) in str(error)
            return None

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        block, owner = self.pick(number)
        slot = self.acquire(block)
        if slot is None:
            return
        owner.held += 1
        owner.point(slot)
        self.compare(slot.bytes, block)

    def compare(self, found: torch.Tensor, block: Block) -> None:
        expected = self.oracle[block.id]
        if expected is not None:
            assert found.numpy().tobytes() == expected, block.name

    @rule(number=numbers, say=st.booleans())
    def write(self, number: int, say: bool) -> None:
        block, owner = self.pick(number)
        if not owner.held or self.seen(owner):
            return
        data = self.noise(block.nbytes)
        owner.param.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.oracle[block.id] = data
        if say:
            self.release(number, True, True)
        else:
            self.manager.mark_dirty(block)

    def seen(self, owner: Owner) -> bool:
        return owner.slot is not None and owner.slot.aliased

    @rule(number=numbers, dirty=st.booleans(), soft=st.booleans())
    def release(self, number: int, dirty: bool, soft: bool) -> None:
        block, owner = self.pick(number)
        if not owner.held:
            return
        dirty = dirty and self.oracle[block.id] is not None
        owner.held -= 1
        if not owner.held and not soft:
            owner.go_away()
        self.manager.release(block, dirty=dirty)

    @rule(number=numbers)
    def keep_a_view(self, number: int) -> None:
        block, owner = self.pick(number)
        data = self.oracle[block.id]
        if owner.held and data is not None and len(self.aliases) < 2:
            self.aliases.append((owner.param.detach()[5:], data[5:]))

    @rule()
    def drop_a_view(self) -> None:
        if self.aliases:
            del self.aliases[self.rng.randrange(len(self.aliases))]

    @rule(picks=st.lists(numbers, min_size=1, max_size=4))
    def hold_together(self, picks: list[int]) -> None:
        blocks = list({b.id: b for b in (self.pick(n)[0] for n in picks)}.values())
        used = sum(o.block.nbytes for o in self.owners.values() if o.held)
        more = sum(b.nbytes for b in blocks if not self.owners[b.id].held)
        try:
            slots = self.attempt(lambda: self.manager.acquire_all(blocks))
        except CapacityError:
            assert self.aliases or used + more > self.manager.parts.table.hbm.capacity
            return
        for block, slot in zip(blocks, slots, strict=True):
            self.compare(slot.bytes, block)
            assert self.manager.slot_at_hand(block) is slot
            self.manager.release(block)

    @rule(number=numbers)
    def discard(self, number: int) -> None:
        block, owner = self.pick(number)
        if owner.held:
            return
        self.attempt(lambda: self.manager.discard(block))
        self.oracle[block.id] = None

    @rule(number=numbers)
    def read(self, number: int) -> None:
        block, _ = self.pick(number)
        if self.oracle[block.id] is not None:
            (found,) = self.attempt(lambda: self.manager.read(block))
            self.compare(found, block)

    @rule(number=numbers)
    def write_at_home(self, number: int) -> None:
        block, _ = self.pick(number)
        record = self.manager.record(block)
        if record.in_hbm is State.ABSENT and not record.defined:
            data = self.noise(block.nbytes)
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.attempt(lambda: self.manager.write_home(block, [tensor]))
            self.oracle[block.id] = data

    @rule(number=numbers, home=st.sampled_from(["dram", "nvme"]))
    def replace(self, number: int, home: str) -> None:
        block, owner = self.pick(number)
        if owner.held:
            return
        self.attempt(lambda: self.manager.remove_blocks([block]))
        self.blocks.remove(block)
        del self.owners[block.id], self.manager.parts.holders[block.id]
        self.add(home)

    # -- passes --------------------------------------------------------------

    @rule(picks=st.one_of(st.none(), st.lists(numbers, max_size=6)), through=st.booleans())
    def share_dram(self, picks: list[int] | None, through: bool) -> None:
        """From now on plans say so, or that order of use alone decides; as beside a GPU."""
        prefetcher = self.manager.prefetcher
        prefetcher.fetcher.beside = True
        prefetcher._outlooks.clear()
        maker = prefetcher._maker
        make = type(maker).make

        def shared(*args: Any, **settings: Any) -> StreamPlan:
            outlook = make(maker, *args, **settings)
            kept = None if picks is None else frozenset(self.pick(n)[0].id for n in picks)
            plan = replace(outlook.plan, in_dram=kept)
            return replace(outlook, plan=plan, through_dram=through)

        maker.make = shared  # type: ignore[method-assign]

    @invariant()
    def what_is_read_ahead_has_places_of_its_own(self) -> None:
        if not hasattr(self, "manager"):
            return
        ahead = self.manager.parts.transfers.ahead
        entries = [*ahead.staged.values(), *ahead._dying]
        held = {entry.extent for entry in entries}
        assert len(held) == len(entries), "two blocks in one place"
        mine = held | set(ahead._places.values())
        assert ahead.nbytes == sum(extent.nbytes for extent in mine)
        ends = sorted((extent.offset, extent.end) for extent in mine)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))

    @rule(key=st.sampled_from("fbo"), guess=st.lists(numbers, max_size=8))
    def begin_pass(self, key: str, guess: list[int]) -> None:
        ids = [self.pick(number)[0].id for number in guess]
        self.manager.begin_pass(key, ids)

    @rule(rounds=st.integers(1, 5), beside=st.booleans())
    def sweep(self, rounds: int, beside: bool) -> None:
        """A loop as a model makes it: everything in order, forth and back.

        As beside a GPU, where such rounds are laid out once they are known.
        """
        self.manager.prefetcher.fetcher.beside |= beside
        for _ in range(rounds):
            for key, blocks in (("f", self.blocks), ("b", self.blocks[::-1])):
                self.manager.begin_pass(key, [])
                for block in blocks:
                    slot = self.acquire(block)
                    if slot is not None:
                        self.compare(slot.bytes, block)
                        self.manager.release(block)

    @rule(picks=st.lists(numbers, min_size=2, max_size=6), rounds=st.integers(1, 3))
    def train(self, picks: list[int], rounds: int) -> None:
        """A loop that writes some of what it uses."""
        for _ in range(rounds):
            self.manager.begin_pass("o", [self.pick(number)[0].id for number in picks])
            for turn, number in enumerate(picks):
                block, owner = self.pick(number)
                if not owner.held and turn % 2:
                    self.hold(number)
                    self.write(number, True)
                elif not owner.held and self.acquire(block) is not None:
                    self.manager.release(block)

    @rule(picks=st.lists(numbers, min_size=2, max_size=4))
    def nest(self, picks: list[int]) -> None:
        """Calls inside calls: what is outside stays held while more comes in."""
        before = {number: self.pick(number)[1].held for number in picks}
        for number in picks:
            self.hold(number)
            self.agrees()
        for number in reversed(picks):
            if self.pick(number)[1].held > before[number]:
                self.release(number, False, False)

    @rule()
    def flush(self) -> None:
        self.engine.release()
        self.manager.flush()
        assert not self.manager.parts.transfers.flights

    @rule()
    def poll(self) -> None:
        with self.manager.lock:
            self.manager.parts.transfers.poll()

    # -- what always holds ---------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.parts.table.check()
        stats = manager.stats()
        for tier in ("hbm", "dram"):
            assert stats.used[tier] <= stats.peak[tier] <= stats.budget[tier]
        slots = manager.parts.slots.current
        present = {r.block.id for r in manager.parts.table if r.extent is not None}
        assert set(slots) == present
        assert set(manager.parts.slots.by_address.values()) == set(slots.values())
        moving = (State.FILLING, State.DRAINING)
        flying = {r.block.id for r in manager.parts.table if r.in_hbm in moving}
        assert set(manager.parts.transfers.flights) == flying
        for record in manager.parts.table:
            owner = self.owners[record.block.id]
            assert record.leases == owner.held
            if owner.slot is not None:
                assert owner.slot is slots[record.block.id], "it was not pointed anew"
                self.compare(owner.param.detach(), record.block)
            if record.extent is not None:
                assert slots[record.block.id].extent == record.extent
        for alias, data in self.aliases:
            assert alias.numpy().tobytes() == data, "bytes that were looked at have changed"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.disk.mode = "well"
        self.engine.release()
        manager = self.manager
        try:
            for block in self.blocks:
                if self.oracle[block.id] is not None:
                    self.compare(manager.read(block)[0], block)
        finally:
            TALLY.update(
                examples=1,
                errors=manager.parts.counters.errors,
                relocations=manager.parts.counters.relocations,
                prefetches=manager.parts.counters.prefetches,
                evictions=manager.parts.counters.evictions,
            )
            if self.rng.random() < 0.5:
                self.engine.hold()
                with contextlib.suppress(CapacityError, StorageError):
                    manager.begin_pass("last", [block.id for block in self.blocks])
            manager.close()
            manager.close()
            self.folder.cleanup()
        assert self.engine.in_flight == 0
        assert manager.gate.closed


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=examples(60), stateful_step_count=50)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor outlives a manager."""
    with nothing_left_open():  # the manager collects where space is short: older objects are frozen
        yield


def test_everything_was_met() -> None:
    """Runs after the machine: a search that never evicts or fails would show nothing."""
    if TALLY["examples"] < 100:
        pytest.skip("the machine has not run")
    wanted = ("errors", "relocations", "prefetches", "evictions")
    assert min(TALLY[what] for what in wanted) > 3, TALLY
