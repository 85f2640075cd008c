"""Layers that share a block, and blocks that are too little to be moved: the plain model's bits.

Layers are called in any order, several times or not at all, and some are computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import assert_same, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.groups import partition, resident

WIDTH = 64


class Layer(nn.Module):
    """A norm and a gate beside matrices, of which some layers look at a weight by themselves."""

    def __init__(self, matrices: int, looks: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(matrices)])
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.parts(self.norm(x)) * self.scale
        if self.looks:
            y = y * self.parts[0].weight.mean()
        return x + y.tanh()


class Net(nn.Module):
    """Lists and sequences of layers, called as a test says."""

    def __init__(self, shapes: list[tuple[int, bool]], tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*shape) for shape in shapes)
        self.tail = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        if tied:
            self.tail[2].weight = self.tail[0].weight
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, order: list[int], again: bool) -> torch.Tensor:
        for number in order:
            layer = self.layers[number % len(self.layers)]
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return self.last(self.tail(x))


@pytest.fixture(scope="module", autouse=True)
def coarse() -> Iterator[None]:
    """Budgets of a few layers have blocks of several layers, and little ones beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_AT_ONCE", 2)
        patch.setattr(resident, "_OF_WEIGHTS", 4)
        patch.setattr(resident, "_LITTLE_OF_HBM", 1)
        patch.setattr(resident, "_BESIDE", 4)
        yield


@settings(max_examples=examples(10))
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=3, max_size=8),
    orders=st.lists(st.lists(st.integers(0, 7), max_size=9), min_size=1, max_size=3),
    tied=st.booleans(),
    again=st.booleans(),
    overlap=st.sampled_from([False, "auto", "backward"]),
    room=st.sampled_from([3, 6, 40]),
)
def test_any_order_of_calls_gives_the_plain_models_bits(
    shapes: list[tuple[int, bool]],
    orders: list[list[int]],
    tied: bool,
    again: bool,
    overlap: Any,
    room: int,
) -> None:
    seed(1)
    plain = Net(shapes, tied)
    model = copy.deepcopy(plain)
    layer = max(partition.parameter_bytes(layer) for layer in model.layers)
    x = torch.randn(2, WIDTH)
    with tiermem.TierManager("cpu", hbm=room * 4 * layer, dram="64MiB") as tier:
        tier.wrap(model)
        assert any(row.block == "Net.small" for row in tier.residency())
        with torch.no_grad():
            for order in orders:
                assert torch.equal(model(x, order, False), plain(x, order, False))
                number = order[0] % len(shapes) if order else 0
                # a layer by itself, and one module of it that no call of tiermem's is before
                assert torch.equal(model.layers[number](x), plain.layers[number](x))
                assert torch.equal(model.layers[number].norm(x), plain.layers[number].norm(x))
        pair = [
            (plain, torch.optim.AdamW(plain.parameters(), lr=0.01)),
            (model, tier.optimizer(model, torch.optim.AdamW, lr=0.01, overlap=overlap)),
        ]
        for order in orders:
            losses = []
            for net, optimizer in pair:
                loss = net(x, order, again).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert torch.equal(*losses)
        with torch.no_grad():  # looked at, and written, between passes
            for net, _ in pair:
                net.last.weight.mul_(2)
                net.layers[0].scale.data = net.layers[0].scale.data + 1
            assert torch.equal(model(x, orders[0], False), plain(x, orders[0], False))
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state_dict")
        stats = tier.stats()
        assert all(stats.peak[name] <= stats.budget[name] for name in ("hbm", "dram"))
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "given back")
