"""Budgets that are limits, as users see them: what is taken and given back, and the same bits."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem.config import Settings, parse_budget
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory import device_room
from tiermem.runtime.memory.hostmemory import total_memory
from tiermem.runtime.memory.opening import OpenHbm
from tiermem.storage.devicepieces import Access, Properties
from tiermem.storage.mapped import MappedHostArena
from tiermem.testing.pieces import FakeDevice, FakePieceCalls

MIB = 1 << 20
WIDTH = 64


def no_total() -> int:
    raise AssertionError("nobody asked for a share")


def test_budgets_are_sizes_shares_or_found_out() -> None:
    for value in (None, "auto"):
        assert parse_budget(value, "hbm", no_total) is None
    assert parse_budget("2MiB", "hbm", no_total) == 2 * MIB
    assert parse_budget(7, "dram", no_total) == 7
    assert parse_budget("80%", "hbm", lambda: 1000) == 800
    assert parse_budget(" 12.5 % ", "hbm", lambda: 1000) == 125
    assert parse_budget("100%", "dram", lambda: 1000) == 1000
    for wrong in ("0%", "101%", "0.0%", f"1{'0' * 400}%"):
        with pytest.raises(tiermem.ConfigError, match="above 0% and at most 100%"):
            parse_budget(wrong, "hbm", lambda: 1000)
    for wrong in ("-5%", "%", "many", "Auto ", ""):
        with pytest.raises(tiermem.ConfigError, match=r"hbm is not a size.*'80%'"):
            parse_budget(wrong, "hbm", lambda: 1000)


@pytest.mark.parametrize("hbm", [1 << 50, 1 << 62, 1 << 70])
def test_more_than_there_are_addresses_is_refused(hbm: int) -> None:
    with pytest.raises(tiermem.CapacityError, match=f"tier hbm: no {hbm} bytes of addresses"):
        tiermem.TierManager(device="cpu", hbm=hbm, dram="1MiB")


def test_shares_are_of_what_there_is() -> None:
    with tiermem.TierManager(device="cpu", hbm="1%", dram="2%") as tier:
        budget = tier.stats().budget
        assert budget["hbm"] == pytest.approx(total_memory() / 100, rel=0.01)
        assert budget["dram"] == pytest.approx(total_memory() / 50, rel=0.01)


def test_the_total_is_that_of_the_smallest_cgroup(tmp_path: Any) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    )
    for name, most, used in (("a", "90000", "60000"), ("a/b", "max", "50000")):
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text(used)
    assert total_memory(tmp_path) == 90_000


@pytest.mark.parametrize("tells", [True, False])
def test_an_allocator_without_observers_is_no_error(
    tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's cudaMallocAsync backend is one."""
    observers: list[Any] = []

    def attach(observer: Any) -> None:
        if not tells:
            raise RuntimeError("does not yet support attachOutOfMemoryObserver")
        observers.append(observer)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3, 4))
    attribute = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, attribute, attach, raising=False)
    monkeypatch.setattr(device_room, "_attached", False)
    rooms = [device_room.CudaRoom(torch.device("cuda", 1)) for _ in range(2)]
    assert [room.watched for room in rooms] == [tells, tells]
    assert len(observers) == tells
    for observer in observers:
        observer(1, 2, 3, 4)
    assert [room.ran_out() for room in rooms] == [tells, tells]
    assert (rooms[0].total, rooms[0].free()) == (4, 3)


def test_structures_are_as_long_as_the_drivers() -> None:
    import ctypes

    assert ctypes.sizeof(Properties) == 32
    assert Properties.location.offset == 8
    assert Properties.flags.offset == 24
    assert ctypes.sizeof(Access) == 12


def net(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
    )


@pytest.mark.parametrize("hbm", [None, "4GiB"])
def test_a_toy_takes_what_it_needs(hbm: str | None) -> None:
    with tiermem.TierManager(device="cpu", hbm=hbm) as tier:
        model = tier.wrap(net())
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        for _ in range(4):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = tier.stats()
        assert 0 < stats.used["hbm"] <= stats.hbm_mapped < 64 * MIB
        assert stats.budget["hbm"] > 64 * MIB


class Cluttered:
    """A device on which others come and go, and torch runs out of memory now and then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, most: int, start: int | None) -> None:
        self.device = FakeDevice(most)
        arenas: list[MappedHostArena] = []

        def opened(_: Settings, __: torch.device) -> OpenHbm:
            arenas.append(MappedHostArena(most, FakePieceCalls(self.device), chunk=4 * 4096))
            return OpenHbm(arenas[0], start or most, most, self.device, start is not None)

        monkeypatch.setattr("tiermem.tier.BlockManager", partial(BlockManager, hbm=opened))
        self.fails = 0

    def maybe_fail(self, *_: Any) -> None:
        """Raises what torch does where it runs out, as often as was said."""
        if self.fails:
            self.fails -= 1
            if not self.fails:
                self.device.short = True
                raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_training_has_the_same_bits_wherever_torch_runs_out(
    monkeypatch: pytest.MonkeyPatch, auto: bool, seed: int
) -> None:
    """Steps raise at random calls, forward and backward, and are made again."""
    most = 1200 << 10
    clutter = Cluttered(monkeypatch, most=most, start=most // 2 if auto else None)
    made = torch.Generator().manual_seed(seed)
    plain, model = net(), net()
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    sizes, raised = set(), 0
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="64MiB") as tier:
        tier.wrap(model)
        for block in model:
            block.register_forward_hook(clutter.maybe_fail)
        for block in model[1:]:
            block.register_full_backward_hook(clutter.maybe_fail)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for _ in range(14):
            x = torch.randn(4, WIDTH, generator=made)
            clutter.fails = int(torch.randint(0, 24, (1,), generator=made))
            share = float(torch.rand(1, generator=made)) * 0.5
            room = clutter.device.free() + clutter.device.others
            clutter.device.others = int(share * room) // 4096 * 4096
            for attempt in range(2):
                try:
                    loss = F.mse_loss(model(x), x)
                    loss.backward()
                    break
                except torch.OutOfMemoryError:
                    assert not attempt, "a step is repeated once at the most"
                    raised += 1
                    optimizer.zero_grad()
            clutter.fails = 0
            optimizer.step()
            optimizer.zero_grad()
            oracle.zero_grad()
            expected = F.mse_loss(plain(x), x)
            expected.backward()
            oracle.step()
            assert torch.equal(loss, expected)
            sizes.add(tier.stats().budget["hbm"])
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        assert raised
        assert len(sizes) > 1 or not auto
        assert tier.stats().hbm_mapped <= most
    del tier, optimizer, model, loss
    gc.collect()
    assert clutter.device.arenas[0].closed


def test_a_model_that_needs_more_than_the_start_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused with a budget that is given is made room for where it is found out."""
    clutter = Cluttered(monkeypatch, most=4 * MIB, start=64 << 10)
    model, plain = net(2), net(2)
    big = nn.Linear(WIDTH, 4 * WIDTH)
    model.append(big)
    plain.append(copy.deepcopy(big))
    x = torch.randn(4, WIDTH)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="64MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        assert torch.equal(model(x), plain(x))
        model(x).sum().backward()
        optimizer.step()
        assert tier.stats().budget["hbm"] > 64 << 10
    del tier, optimizer
    gc.collect()
    assert clutter.device.arenas[0].closed
    clutter = Cluttered(monkeypatch, most=64 << 10, start=None)
    with (
        tiermem.TierManager(device="cpu", hbm="64KiB", dram="64MiB") as tier,
        pytest.raises(tiermem.CapacityError, match="hbm= at least"),
    ):
        tier.wrap(net(2).append(nn.Linear(WIDTH, 8 * WIDTH)))
