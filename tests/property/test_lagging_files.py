"""Blocks and saved tensors in files and DRAM, used at random while links and files lag."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support_lagging import lagging
from support_runtime import EvenClock, Rig

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.errors import CapacityError, StorageError
from tiermem.io.engine import IoRequest
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.homes import HomeRequest
from tiermem.runtime.services.activation_copies import Copy
from tiermem.runtime.services.activation_store import ActivationStore
from tiermem.runtime.services.host_staging import HostStage, Load
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.storage.checkpointstore import SourceRange
from tiermem.testing.io import Fault

PAGE = 4096
ROLES = [Role.PARAM, Role.GRAD, Role.OPTIMIZER]


class Disk:
    """Fails now and then, where it is told to."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.share = 0.0

    def __call__(self, request: IoRequest, tries: int) -> Fault | None:
        if self._random.random() < self.share:
            return Fault(errno=self._random.choice([errno.EIO, errno.ENOSPC, errno.EAGAIN]))
        return None


class Bench(Rig):
    """A rig at which things happen at random.

    Attributes:
        failed: Calls that have raised the error of a disk.
    """

    def __init__(self, seed: int, chunks: int, folder: Path, disk: Disk) -> None:
        random = Random(seed)
        self.count = random.randint(4, 9)
        self.hbm = random.randint(6, 14)
        dram = chunks + random.randint(8, 40)
        policy, depth = Policy(), random.choice(["auto", "auto", 0, 1, 3])
        settings = Settings(
            "cpu", self.hbm * PAGE, dram * PAGE, (str(folder),), None, policy, depth
        )
        super().__init__(BlockManager(settings), None)
        self.manager.parts.pass_timer._clock = EvenClock()
        self.rng = self.random = random
        self.disk, self.folder = disk, folder
        self.failed, self.loaded = 0, False
        self.kept: list[tuple[Copy, bytes]] = []
        self.loans: list[tuple[Tier, Any, bytes]] = []
        window = random.choice([0, 0, 2, 8]) * PAGE
        self.store = ActivationStore(
            self.manager, random.choice(["dram", "nvme", "nvme"]), lambda: window
        )
        for _ in range(self.count):
            self.grow()
        self.order = list(range(self.count))

    def grow(self) -> Block | None:
        """Adds a block."""
        home = self.random.choice(["nvme", "nvme", "nvme", "auto", "dram"])
        try:
            return self.add(self.random.choice([1, 2, 3, 5]), home, self.random.choice(ROLES))
        except CapacityError:
            return self.add(1, "nvme")

    def run(self, rounds: int, faults: float = 0.0) -> None:
        """Does some rounds of a loop, and other things between its uses."""
        acts = [
            self.change, self.change, self.anew, self.anew, self.look, self.replace, self.flush,
            self.lend, self.sweep, self.borrow, self.borrow, self.send, self.send, self.send,
            self.open, self.both, self.drop, self.load, self.stage,
        ]  # fmt: skip
        for number in range(rounds):
            if number == rounds // 2:
                self.random.shuffle(self.order)
            self.manager.begin_pass("loop")
            for place in list(self.order):
                self.disk.share = faults
                self.attempt(self.use, self.blocks[place])
                while self.random.random() < 0.4:
                    self.attempt(self.random.choice(acts), self.random.choice(self.blocks))
                self.disk.share = 0.0
            self.manager.end_pass()
        while self.kept:
            self.open(self.blocks[0])
        while self.loans:
            self.borrow(self.blocks[0], give=True)
        self.check()

    def attempt(self, what: Any, block: Block) -> None:
        """Does something that the disk may fail."""
        data = self.data.get(block.id)
        try:
            what(block)
        except StorageError:
            assert self.disk.share
            self.failed += 1
            if data is not None and block in self.blocks:
                self.data[block.id] = data  # nothing was written
        except CapacityError:
            if data is not None and block in self.blocks:
                self.data[block.id] = data

    def change(self, block: Block) -> None:
        slot = self.manager.acquire(block)
        self.compare(slot.bytes, block)
        slot.bytes.copy_(self.noise(block))
        self.manager.release(block, dirty=True)

    def anew(self, block: Block) -> None:
        """Gives a block other bytes without a look at those it had."""
        record = self.manager.record(block)
        if self.manager.parts.homes.read_only(record.home_extent):
            return
        self.manager.discard(block)
        self.disk.share = 0.0  # else it may have none
        self.write(block)

    def look(self, block: Block) -> None:
        self.compare(self.manager.read(block)[0], block)

    def replace(self, block: Block) -> None:
        """Another block comes in the place of one."""
        place = self.blocks.index(block)
        self.disk.share = 0.0
        self.manager.remove_blocks([block])
        del self.data[block.id]
        count = len(self.blocks)
        self.grow()
        self.blocks[place] = self.blocks.pop()
        assert len(self.blocks) == count

    def flush(self, _: Block) -> None:
        self.manager.flush()

    def lend(self, block: Block) -> None:
        """The host writes a block where it lies in DRAM."""
        if self.manager.record(block).home is not Tier.DRAM:
            return
        loans = self.manager.host_loans
        if loans.can_lend([block]):
            return
        loans.settle([block])
        (tensors,), events = loans.lend([block])
        for event in events:
            event.synchronize()
        self.compare(tensors[0], block)
        tensors[0].copy_(self.noise(block))
        loans.give_back([block])

    def sweep(self, block: Block) -> None:
        """What was written goes home, and others come."""
        sweep = BlockSweep(self.manager)
        with sweep.sweeping():
            sweep.write(self.random.sample(self.blocks, 3), gradients=True, staying=True)
            sweep.fetch(self.random.sample(self.blocks, 2))

    def borrow(self, _: Block, *, give: bool = False) -> None:
        """Something else has DRAM or a place in the file for a while, or gives it back."""
        homes = self.manager.parts.homes
        if self.loans and (give or self.random.random() < 0.6):
            tier, extent, data = self.loans.pop()
            if tier is Tier.DRAM:
                found = homes.arena.bytes_of(extent).numpy().tobytes()
                assert found == data, "DRAM was written that had been given away"
            homes.release(tier, extent)
            return
        nbytes = self.random.choice([1, 3, 8]) * PAGE
        ((tier, extent),) = homes.reserve([HomeRequest("loan", nbytes, "dram")])
        assert extent is not None
        data = self.random.randbytes(nbytes)
        homes.arena.bytes_of(extent).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.loans.append((tier, extent, data))

    def send(self, _: Block) -> None:
        """A saved tensor goes below HBM."""
        nbytes = self.random.choice([PAGE, 3 * PAGE, 2 * PAGE + 500])
        data = self.random.randbytes(nbytes)
        saved = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        copy = self.store.send(saved.untyped_storage(), 0, nbytes, f"saved{len(self.kept)}")
        if copy is not None:
            self.kept.append((copy, data))

    def open(self, _: Block) -> None:
        """The one saved last is used."""
        if not self.kept:
            return
        copy, data = self.kept[-1]
        storage, low = self.store.open(copy)
        found = torch.empty(0, dtype=torch.uint8).set_(storage)[: len(data)]
        assert low == 0 and found.numpy().tobytes() == data, copy.name
        self.kept.pop()

    def drop(self, _: Block) -> None:
        """A graph is let go without backward."""
        if self.kept and self.random.random() < 0.5:
            del self.kept[self.random.randrange(len(self.kept)) :]
            self.store.reap()

    def load(self, _: Block) -> None:
        """Other files are opened, and some more blocks are at home there."""
        if self.loaded:
            return
        self.loaded, shares = True, [3, 2]
        path = self.folder / "checkpoint"
        data = [self.random.randbytes(pages * PAGE) for pages in shares]
        path.write_bytes(b"".join(data))
        file = self.manager.attach_files([path])
        begins = [0, shares[0] * PAGE]
        wanted = [
            (f"stored{i}", Role.PARAM, [TensorShape("t", (n * PAGE,), (1,), torch.uint8, 1)])
            for i, n in enumerate(shares)
        ]
        stored = [
            [[SourceRange(file, begin, len(bytes_), 0)]]
            for begin, bytes_ in zip(begins, data, strict=True)
        ]
        found = self.manager.add_blocks(wanted, stored=stored)
        for block, bytes_ in zip(found, data, strict=True):
            self.data[block.id] = bytes_
        self.order += range(len(self.blocks), len(self.blocks) + len(found))
        self.blocks += found

    def stage(self, _: Block) -> None:
        """Code on the host changes blocks in files, by way of DRAM."""
        manager, homes = self.manager, self.manager.parts.homes
        files = [b for b in self.blocks if self.in_swap(b)]
        chosen = self.random.sample(files, min(len(files), 3))
        loans = manager.host_loans
        if not chosen or loans.can_lend(chosen):
            return
        loans.settle(chosen)
        loads = [Load([block], []) for block in chosen]
        try:
            stage = HostStage(manager, loads)
        except CapacityError:
            return
        homes.owners.append(stage.owned)
        loans.lend(chosen)
        self.disk.share = 0.0
        orders = [stage.order(load) for load in loads]
        for order in orders:
            stage.announce(order)
        for block, order in zip(chosen, orders, strict=True):
            cargo = stage.bring(order)[block.id]
            self.compare(cargo.bytes, block)
            cargo.bytes.copy_(self.noise(block))
            stage.write_home(order, [block.id])
        stage.settle(chosen)
        loans.give_back(chosen)
        homes.owners.remove(stage.owned)
        stage.close()

    def in_swap(self, block: Block) -> bool:
        """Whether a block is at home in the swap file."""
        record = self.manager.record(block)
        return record.home is Tier.NVME and not self.manager.parts.homes.read_only(
            record.home_extent
        )

    def both(self, block: Block) -> None:
        """One block is used while another is."""
        other = self.random.choice(self.blocks)
        slot = self.manager.acquire(block)
        try:
            self.attempt(self.change if other is not block else self.use, other)
            self.compare(slot.bytes, block)
        finally:
            self.manager.release(block)


def tried(seed: int, folder: Path, rounds: int, faults: float = 0.0) -> Bench:
    """Runs a bench; returns it."""
    random, disk = Random(seed), Disk(seed)
    chunks, eager = random.choice([2, 3, 5, 16]), random.choice([0.0, 0.0, 0.1, 0.5])
    lags = lagging(seed, eager, chunks=chunks, beside=random.random() < 0.7, fault=disk)
    with lags as engines:
        bench = Bench(seed, chunks, folder, disk)
        try:
            bench.run(rounds, faults)
        finally:
            bench.manager.close()
        assert not any(engine.faults for engine in engines), engines[0].faults
    return bench


@pytest.mark.parametrize("seed", [*range(12), 20, 28, 43, 103])
def test_nothing_is_seen_too_soon_or_too_late(tmp_path: Path, seed: int) -> None:
    tried(seed, tmp_path, 5)


@pytest.mark.parametrize("seed", range(8))
def test_nor_where_the_disk_fails_now_and_then(tmp_path: Path, seed: int) -> None:
    tried(seed, tmp_path, 5, 0.1)
