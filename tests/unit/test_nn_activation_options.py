"""Saved tensors below HBM: options, room, kinds of tensors, and copies that come late."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support_activations import (
    HOMES,
    ROWS,
    WIDTH,
    Net,
    check_empty,
    check_gradients,
    data,
    manager,
    twins,
)
from support_late import LateCopyEngine, make_late
from support_nn import assert_same, seed
from torch import nn
from torch.nn import functional as F

import tiermem


def test_only_the_first_layers() -> None:
    per_layer = {}
    for mode in ("plain", "nonreentrant"):
        for layers in (0, 1, 3, 6, 99, None):
            _, model = twins(lambda mode=mode: Net(6, mode))
            with manager("dram", activation_layers=layers, activation_min=4096) as tier:
                tier.wrap(model)
                out = model(data())
                per_layer[mode, layers] = tier.stats().activations.offloaded
                del out
    # input, normed input, two of four times the width; `first` saves its input, a leaf
    assert per_layer["plain", 0] == 0
    assert [per_layer["plain", n] for n in (1, 3, 6, 99, None)] == [3, 9, 18, 18, 18]
    assert [per_layer["nonreentrant", n] for n in (0, 1, 3, 6, 99, None)] == [0, 1, 3, 6, 6, 6]


def test_the_minimum_is_in_bytes() -> None:
    found = []
    for minimum in (1, 4096, 4097, 4 * 4096, 4 * 4096 + 1):
        _, model = twins(lambda: Net(2))
        with manager("dram", activation_min=minimum) as tier:
            tier.wrap(model)
            out = model(data())
            found.append(tier.stats().activations.offloaded)
            del out
    assert found == [2 * 5, 2 * 3, 2 * 1, 2 * 1, 0]


def test_hbm_and_auto_leave_them_alone() -> None:
    for home in ("hbm", "auto"):
        _, model = twins(Net)
        with manager(home) as tier:
            tier.wrap(model)
            model(data()).sum().backward()
            assert tier.stats().activations == tiermem.ActivationStats()
            assert not [row for row in tier.residency() if row.role == "activation"]


@pytest.mark.parametrize("home", HOMES)
def test_what_has_no_room_stays(home: str, tmp_path: Path) -> None:
    plain, model = twins(lambda: Net(12))
    limit = {"nvme_bytes": 64 << 10} if home == "nvme" else {"dram": "1100KiB", "hbm": "512KiB"}
    with manager(home, tmp_path if home == "nvme" else None, activation_min=4096, **limit) as tier:
        tier.wrap(model)
        for step in range(2):
            for net in (plain, model):
                net(data(step)).square().sum().backward()
        check_gradients(plain, model)
        found = tier.stats().activations
        assert found.kept > 0 and found.offloaded > 0
        check_empty(tier)


def test_idle_space_goes_to_who_needs_it() -> None:
    """What lies idle in the pool is no reason to refuse a model."""
    _, model = twins(lambda: Net(12))
    with manager("dram", dram="2MiB", activation_min=4096) as tier:
        tier.wrap(model)
        model(data()).sum().backward()
        pool = tier._runtime.activations.store.pool
        assert pool.idle > 0
        free = tier._manager.parts.homes.dram.capacity - tier._manager.parts.homes.dram.used
        pieces = 1 + free // (64 << 10)
        tier.wrap(nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(pieces)]))
        assert pool.idle == 0
        model(data()).sum().backward()


def test_nvme_asks_for_a_folder() -> None:
    _, model = twins(Net)
    before = model.state_dict()
    with manager("nvme") as tier:
        with pytest.raises(tiermem.CapacityError, match=r"activations .*nvme=folder"):
            tier.wrap(model)
    assert_same(before, model.state_dict(), "untouched")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation_min": -1}, "activation_min"),
        ({"activation_min": "many"}, "activation_min"),
        ({"activation_layers": -1}, "activation_layers"),
        ({"activation_layers": True}, "activation_layers"),
        ({"activation_ahead": "two"}, "activation_ahead"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=said):
        manager("dram", **options)


def test_backward_after_close_says_so() -> None:
    _, model = twins(Net)
    tier = manager("dram", activation_ahead=0)
    tier.wrap(model)
    loss = model(data()).sum()
    tier.close()
    with pytest.raises(tiermem.ClosedError):
        loss.backward()
    del loss
    gc.collect()


def test_kinds_of_tensors() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            c = torch.complex(h, h.sin())
            d = (c * c.conj().exp()).imag * c.real
            e = F.conv1d(d[None].transpose(1, 2), d[:, :, None].expand(-1, -1, 3)).squeeze(0)
            wide = h[:, :1].expand(ROWS, 4 * WIDTH)
            m = F.max_pool1d(wide.cos() * wide, 2)
            half = (h.bfloat16() @ h.bfloat16().t()).float()
            parts = F.dropout(half, 0.5) + half.index_select(0, torch.arange(ROWS))
            return e.exp().sum() + m.sum() + parts.sum() + (h.double() ** 3).sum()

    plain, model = twins(Kinds)
    with manager("dram", activation_ahead=0) as tier:
        tier.wrap(model)
        grads = []
        for net in (plain, model):
            x = data()
            seed(5)
            net(x).backward()
            grads.append(x.grad)
        assert_same(grads[0], grads[1], "input gradient")
        check_gradients(plain, model)
        found = tier.stats().activations
        assert found.fetched_late > 5
        check_empty(tier)


@pytest.mark.parametrize("seed_", range(3))
@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.one_in(3)
def test_late_copies_change_nothing(home: str, seed_: int, mode: str, tmp_path: Path) -> None:
    plain, model = twins(lambda: Net(8, mode))
    ahead = [0, "4KiB", "auto"][seed_ % 3]
    with manager(home, tmp_path, activation_ahead=ahead) as tier:
        engine = LateCopyEngine(seed_, eager=[0.0, 0.3][seed_ % 2])
        make_late(tier._manager, engine)
        tier.wrap(model)
        for step in range(4):
            if step == 2:
                out = model(data(7))
                del out
            for net in (plain, model):
                net(data(step)).square().sum().backward(retain_graph=step == 3)
        check_gradients(plain, model)
        assert not engine.harm
        assert tier.stats().activations.offloaded > 0
        gc.collect()
        check_empty(tier)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mode", ["plain", "nonreentrant"])
def test_blocks_that_are_compiled(mode: str) -> None:
    plain, model = twins(lambda: Net(4, mode))
    with manager("dram", activation_min=4096) as tier:
        tier.wrap(model)
        for net in (plain, model):
            for layer in net.layers:
                layer.compile(backend="aot_eager")
        for step in range(2):
            for net in (plain, model):
                net(data(step)).square().sum().backward()
        check_gradients(plain, model)
        found = tier.stats().activations
        assert found.offloaded > 0 and found.fetched_ahead > 0
        check_empty(tier)


@pytest.mark.parametrize("layers_needed", [1, 2, 4])
@pytest.mark.parametrize("home", HOMES)
def test_what_was_fetched_and_never_used_is_let_go_in_order(
    home: str, layers_needed: int, tmp_path: Path
) -> None:
    _, model = twins(lambda: Net(8))
    engine = LateCopyEngine(0, eager=0.0)
    with manager(home, tmp_path, activation_ahead="16KiB") as tier:
        make_late(tier._manager, engine)
        tier.wrap(model)
        for _ in range(3):
            loss = model(data()).square().sum()
            wanted = model.layers[-layers_needed].down.weight
            torch.autograd.grad(loss, [wanted])  # backward stops there, having looked ahead
            del loss
        found = tier.stats().activations
        assert found.fetched_ahead > 0
        tier._runtime.activations.store.reap()
        engine.synchronize()
        assert not engine.harm
        check_empty(tier)


class _Layouts(nn.Module):
    """Saves sparse tensors, or nested ones, between its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        seed(0)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("adjacent", torch.eye(16).to_sparse())

    def forward(self, x: Any) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sparse.mm(self.adjacent, layer(x)) if self.kind == "sparse" else layer(x)
        return x if self.kind == "sparse" else torch.nested.to_padded_tensor(x, 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.parametrize("activations", HOMES)
def test_sparse_and_nested_tensors_stay(kind: str, activations: str, tmp_path: Path) -> None:
    """Neither has bytes of a storage that could be copied, nor sizes, some of them."""
    model, plain = _Layouts(kind), _Layouts(kind)
    x: Any = torch.randn(16, 16)
    if kind == "nested":
        x = torch.nested.as_nested_tensor([torch.randn(3, 16), torch.randn(9, 16)])
    with tiermem.TierManager(
        "cpu", hbm="64KiB", dram="8MiB", nvme=tmp_path,
        policy=tiermem.Policy(activations=activations), activation_min=0,
    ) as tier:  # fmt: skip
        tier.wrap(model)
        for net in (plain, model):
            net(x).square().mean().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            assert torch.equal(mine.grad, other.grad)
