"""Training whose homes lie packed: the same bits, whatever looks at them; and what it takes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support_interrupts import deep, depth_here
from support_nn import assert_same
from support_packed_homes import packing_always, small_tiles
from support_streams import PAGE, SHAPE, manager_over
from torch import nn

import tiermem
from tiermem.core.block import Role
from tiermem.core.residency import State
from tiermem.optim.looptrial import LoopTrial
from tiermem.runtime.services import home_packing
from tiermem.runtime.services.home_packing import HomePacking
from tiermem.runtime.transfers.packed_homes import PackedHomes
from tiermem.testing.streams import SimulatedDevice

WIDTH, LAYERS = 64, 8


@pytest.fixture(autouse=True)
def packing() -> Iterator[None]:
    with small_tiles() as patch, packing_always(patch):
        yield


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()


class Pair:
    """The same model in plain torch and over the tiers, where it leaves HBM."""

    def __init__(self, cls: Any = torch.optim.AdamW, **settings: Any) -> None:
        self.plain = layers()
        self.own = cls(self.plain.parameters(), **settings)
        nbytes = sum(p.numel() * p.element_size() for p in self.plain.parameters())
        self.tier = tiermem.TierManager("cpu", hbm=nbytes * 3 // 4 // 4096 * 4096, dram=20 * nbytes)
        self.model = self.tier.wrap(layers())
        self.optimizer = self.tier.optimizer(self.model, cls, **settings)

    @property
    def packed(self) -> int:
        """How many homes lie packed."""
        return len(self.tier._manager.parts.homes.packed)

    def train(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            losses = []
            for model, stepper in ((self.plain, self.own), (self.model, self.optimizer)):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
                loss = model(x.bfloat16()).float().square().mean()
                loss.backward()
                stepper.step()
                stepper.zero_grad()
                losses.append(loss.detach())
            assert_same(*losses, f"loss {number}")

    def same_weights(self) -> None:
        for name, value in self.plain.state_dict().items():
            assert_same(value, self.model.state_dict()[name], name)

    def same_state(self) -> None:
        self.same_weights()
        theirs = self.optimizer.state_dict()["state"]
        for key, values in self.own.state_dict()["state"].items():
            for name, value in values.items():
                assert_same(value, theirs[key][name], name)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    ],
)
def test_steps_have_the_same_bits(cls: Any, settings: Any) -> None:
    pair = Pair(cls, **settings)
    with pair.tier:
        pair.train(0, 14)
        assert pair.packed > LAYERS
        pair.same_state()
        pair.train(14, 3)
        assert pair.packed > LAYERS
        pair.same_state()


def test_it_is_tried_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([True, True, False, False, True, False, False, False, True, True] * 3)
    monkeypatch.setattr(LoopTrial, "for_step", lambda trial, ticket: next(turns))
    pair = Pair(lr=1e-2)
    with pair.tier:
        seen = set()
        for number in range(0, 24, 2):
            pair.train(number, 2)
            seen.add(pair.packed > LAYERS)
        assert seen == {False, True}
        pair.same_state()


def test_one_optimizer_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[LoopTrial] = []

    def for_step(trial: LoopTrial, _ticket: object) -> bool:
        tried.append(trial)
        return True

    monkeypatch.setattr(LoopTrial, "for_step", for_step)
    pair = Pair(lr=1e-2)
    with pair.tier:
        other = pair.tier.wrap(layers())
        second = pair.tier.optimizer(other, torch.optim.SGD, lr=0.1)
        pair.train(0, 10)
        for number in range(10):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            other(x.bfloat16()).float().square().mean().backward()
            second.step()
            second.zero_grad()
        pair.train(10, 2)
        assert tried
        assert all(trial is pair.optimizer._timing.ahead._left._trial for trial in tried)
        pair.same_state()


def test_gradients_weights_and_values_that_no_window_has() -> None:
    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        for model in (pair.plain, pair.model):
            with torch.no_grad():
                for number, param in enumerate(model.parameters()):
                    flat = param.view(-1)
                    generator = torch.Generator().manual_seed(number)
                    words = torch.randint(-(1 << 15), 1 << 15, flat.shape, generator=generator)
                    wild = words.to(torch.int16).view(torch.bfloat16)
                    flat.copy_(torch.where(wild.abs() < 1, wild, flat))
        pair.train(10, 4)
        pair.same_state()
        for model in (pair.plain, pair.model):
            model(torch.ones(2, WIDTH).bfloat16()).float().sum().backward()
        for plain, tiered in zip(pair.plain.parameters(), pair.model.parameters(), strict=True):
            assert plain.grad is not None
            assert tiered.grad is not None
            assert_same(plain.grad, tiered.grad, "gradient")


def test_a_save_and_what_loads_it(tmp_path: Path) -> None:
    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        assert pair.packed
        pair.tier.save(tmp_path / "whole")
        saving = pair.tier.save(tmp_path / "later", wait=False)
        pair.train(10, 2)
        saving.wait()
        assert pair.packed
        weights = {name: value.clone() for name, value in pair.plain.state_dict().items()}
        pair.train(12, 2)
        pair.tier.load(tmp_path / "later")
        again = pair.model.state_dict()
        assert any(not torch.equal(value, again[name]) for name, value in weights.items())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="8MiB") as tier:
        model = tier.wrap(layers())
        tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        tier.load(tmp_path / "whole")
        for name, value in model.state_dict().items():
            assert_same(value, again[name], name)


def test_the_model_comes_back() -> None:
    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        assert pair.packed
    pair.same_weights()


def test_an_optimizer_that_is_closed_leaves_nothing_packed() -> None:
    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        homes = pair.tier._manager.parts.homes
        pair.optimizer.close()
        assert not homes.packed
        names = [record.block.name for record in pair.tier._manager.parts.table]
        assert home_packing._NAME not in names
        pair.same_weights()


def test_what_needs_its_room_has_it() -> None:
    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        packing = pair.optimizer._timing.ahead._left._packing
        assert packing.is_on
        assert packing.give_way()
        assert not packing.is_on
        assert pair.packed
        pair.train(10, 4)
        assert not pair.packed
        pair.same_state()
        assert not packing.begin()


class Bench:
    """A manager over simulated streams, and what packs its homes."""

    def __init__(self) -> None:
        self.device = SimulatedDevice(Random(0))
        self.manager = manager_over(self.device, hbm=64 * PAGE, dram=256 * PAGE)
        self.packing = HomePacking(self.manager)

    def used(self) -> tuple[int, int]:
        """Bytes of HBM and DRAM in use."""
        parts = self.manager.parts
        return parts.table.hbm.used, parts.homes.dram.used


def test_it_gives_back_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_packing, "_OF_HBM", 16)
    bench = Bench()
    with bench.manager.lock:
        before = bench.used()
        assert bench.packing.begin()
        assert bench.used() > before
        bench.packing.end()
        assert bench.used() == before
        assert bench.packing.begin()
        assert bench.packing.give_way()
        assert not bench.packing.give_way()
        assert not bench.packing.begin()  # it would be needed again
    bench.manager.close()


def test_nothing_is_packed_where_kernels_do_not_see_dram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_packing, "_OF_HBM", 16)
    bench = Bench()
    with bench.manager.lock:
        before = bench.used()
        monkeypatch.setattr(bench.manager.parts.copy, "seen", lambda _: None)
        assert not bench.packing.begin()
        assert bench.used() == before
    bench.manager.close()


def test_a_block_that_has_no_place_gets_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_packing, "_OF_HBM", 16)
    bench = Bench()
    manager = bench.manager
    with manager.lock:
        assert bench.packing.begin()
        blocks = manager.add_blocks([(f"b{i}", Role.PARAM, [SHAPE]) for i in range(64)])
        for block in blocks:
            manager.write_home(block, [torch.ones(PAGE, dtype=torch.uint8)])
        bench.packing.stays = True
        with pytest.raises(tiermem.CapacityError):
            manager.acquire_all(blocks)
        bench.packing.stays = False
        assert bench.packing.is_on
        manager.acquire_all(blocks)
        assert not bench.packing.is_on
        for block in blocks:
            manager.release(block)
            assert manager.record(block).in_hbm is State.VALID
    manager.close()


def test_an_exception_anywhere_leaves_room_and_homes_in_order() -> None:
    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        packing = pair.optimizer._timing.ahead._left._packing
        pair.optimizer._runtime.repair()
        pair.train(10, 2)
        assert packing.is_on
        packing._block = None  # its room was being given back
        pair.optimizer._runtime.repair()
        pair.train(12, 3)
        assert not packing.is_on
        pair.same_state()


def test_what_a_copy_that_was_cut_short_has_left_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut_short(*_: object) -> None:
        raise KeyboardInterrupt

    tier = tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB")
    manager = tier._manager
    with manager.lock:
        [block] = manager.add_blocks([("b", Role.PARAM, [SHAPE])])
        manager.write_home(block, [torch.full((PAGE,), 0x3F, dtype=torch.uint8)])
        packing = HomePacking(manager)
        assert packing.begin()
        manager.record(block).packs = True
        manager.acquire(block).views[0].fill_(7)
        manager.release(block, dirty=True)
        with monkeypatch.context() as patch:
            patch.setattr("tiermem.transfer.hosthomes.pack_home_tile", cut_short)
            with pytest.raises(KeyboardInterrupt):
                manager.parts.transfers.drain(manager.record(block))
        assert manager.parts.homes.packed  # and its bytes are no packed ones
        packing.end()
        assert not manager.parts.homes.packed
        assert bool((manager.acquire(block).views[0] == 7).all())
        manager.release(block)
    tier.close()


def test_a_home_that_has_no_place_gets_its_dram() -> None:
    tier = tiermem.TierManager("cpu", hbm="64KiB", dram=f"{64 * PAGE}B")
    manager = tier._manager
    with manager.lock:
        [block] = manager.add_blocks([("b", Role.PARAM, [SHAPE])])
        manager.write_home(block, [torch.zeros(PAGE, dtype=torch.uint8)])
        packing = HomePacking(manager)
        assert packing.begin()
        manager.record(block).packs = True
        manager.acquire(block).views[0].fill_(7)
        manager.release(block, dirty=True)
        manager.parts.transfers.drain(manager.record(block))
        manager.parts.evictor.evict(manager.record(block))
        assert manager.parts.homes.packed
        manager.add_blocks([(f"c{number}", Role.PARAM, [SHAPE]) for number in range(63)])
        assert not packing.is_on
        assert not manager.parts.homes.packed
        assert bool((manager.acquire(block).views[0] == 7).all())
        manager.release(block)
    tier.close()


def test_what_is_cut_short_as_it_begins_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(home_packing, "_OF_HBM", 16)
    bench = Bench()
    with bench.manager.lock:
        before = bench.used()
        with monkeypatch.context() as patch:
            patch.setattr(PackedHomes, "begin", cut_short)
            with pytest.raises(KeyboardInterrupt):
                bench.packing.begin()
        bench.packing.repair()
        assert not bench.packing.has_room
        assert bench.used() == before
    bench.manager.close()


def test_what_is_cut_short_as_it_gives_its_dram_back_packs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut_short(*_: object) -> bool:
        raise KeyboardInterrupt

    pair = Pair(lr=1e-2)
    with pair.tier:
        pair.train(0, 10)
        packing, homes = pair.optimizer._timing.ahead._left._packing, pair.tier._manager.parts.homes
        with monkeypatch.context() as patch, pair.tier._manager.lock:
            patch.setattr(HomePacking, "give_way", cut_short)
            with pytest.raises(KeyboardInterrupt):
                packing._give_dram_back()
        pair.optimizer._runtime.repair()
        taken = homes.lend(homes.dram.capacity - homes.dram.used - (1 << 14), spare=True)
        assert taken is not None
        before = homes.arena.bytes_of(taken).fill_(7).clone()
        pair.train(10, 4)
        assert bool((homes.arena.bytes_of(taken) == before).all())
        assert not packing.is_on
        pair.same_state()


def test_a_home_is_opened_whole_at_the_end_of_a_threads_stack() -> None:
    tier = tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB")
    manager = tier._manager
    homes, wrong, raised = manager.parts.homes, [], []

    def open_it(headroom: int) -> None:
        with manager.lock:
            record = manager.record(block)
            extent = record.home_extent
            assert extent is not None
            try:
                levels = sys.getrecursionlimit() - depth_here() - headroom
                deep(levels, lambda: homes.open(extent))
            except RecursionError:
                raised.append(headroom)
            if extent.offset not in homes.packed or headroom == 24:
                wrong.extend(homes.opened(extent) != 7)

    with manager.lock:
        [block] = manager.add_blocks([("b", Role.PARAM, [SHAPE])])
        manager.write_home(block, [torch.zeros(PAGE, dtype=torch.uint8)])
        assert HomePacking(manager).begin()
        manager.record(block).packs = True
    for headroom in range(2, 25):
        with manager.lock:
            manager.acquire(block).views[0].fill_(7)
            manager.release(block, dirty=True)
            manager.parts.transfers.drain(manager.record(block))
            manager.parts.evictor.evict(manager.record(block))
        thread = threading.Thread(target=open_it, args=(headroom,))
        thread.start()
        thread.join()
        with manager.lock:
            assert bool((manager.acquire(block).views[0] == 7).all()), headroom
            manager.release(block)
    assert raised and max(raised) < 24 and not any(wrong)
    tier.close()
