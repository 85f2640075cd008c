"""Exceptions that are not tiermem's: a checkpoint's own stop, and those of a user's code.

They pass through calls of tiermem's. Nothing is left half done, so that nothing has to be repaired,
and the order of use is not learned again (ADR 32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from support_nn import check_table, same_bits
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import tiermem

WIDTH, LAYERS = 32, 6


class Refused(Exception):
    """A user's own."""


class Layer(nn.Module):
    """Raises in its forward if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.calls_left: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise Refused
        return x + self.last(y).square()


class Net(nn.Module):
    def __init__(self, mode: str, forgives: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.mode = mode
        self.forgives = forgives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                if self.mode == "plain":
                    x = layer(x)
                else:
                    x = checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
            except Refused:
                if not self.forgives:
                    raise
        return x.square().sum()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(4, WIDTH, generator=generator, requires_grad=True)


@contextmanager
def twins(mode: str, forgives: bool = False) -> Iterator[tuple[nn.Module, nn.Module, Any]]:
    """A resident model and the same one in HBM that holds three of its six blocks."""
    torch.manual_seed(0)
    plain = Net(mode, forgives)
    with tiermem.TierManager("cpu", hbm="56KiB", dram="4MiB") as tier:
        yield plain, tier.wrap(deepcopy(plain), blocks=lambda _n, m: isinstance(m, Layer)), tier


def check_same(plain: nn.Module, model: nn.Module, tier: tiermem.TierManager) -> None:
    """Trains both for two steps from cleared gradients: the same bits, and nothing is held."""
    for step in range(2):
        results = []
        for net in (plain, model):
            net.zero_grad()
            loss = net(batch(100 + step))
            loss.backward()
            results.append((loss, [p.grad.clone() for p in net.parameters()]))
        (loss, grads), (loss2, grads2) = results
        assert same_bits(loss, loss2)
        assert all(same_bits(a, b) for a, b in zip(grads, grads2, strict=True))
    check_table(tier)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("mode", ["nonreentrant", "reentrant"])
def test_a_loop_with_checkpoints_neither_repairs_nor_learns_again(
    mode: str, early_stop: bool
) -> None:
    """A checkpoint ends its recomputation with an exception, through calls of tiermem's."""
    seen: list[tuple[int, int, int]] = []
    with set_checkpoint_early_stop(early_stop), twins(mode) as (plain, model, tier):
        manager = tier._runtime.manager
        for step in range(8):
            model(batch(step)).backward()
            assert not manager.gate.unsure and not manager.gate.torn
            model.zero_grad()
            stats = tier.stats()
            seen.append((stats.hits, stats.misses, manager.parts.planner.learned))
            tier.reset_stats()
        check_same(plain, model, tier)
    assert len(set(seen[4:])) == 1, f"hits, misses and passes learned again: {seen}"
    assert seen[-1][0] > seen[0][0], "what was learned makes hits of misses"


def in_forward(model: Net) -> None:
    model.layers[3].calls_left = 0
    model(batch(0))


def in_recomputation(model: Net) -> None:
    model.layers[3].calls_left = 1
    model(batch(0)).backward()


def in_backward(model: Net) -> None:
    def refuse(_gradient: torch.Tensor) -> None:
        raise Refused

    x = batch(0)
    x.register_hook(refuse)
    model(x).backward()


def in_pack(model: Net) -> None:
    count = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 8:
            raise Refused
        return tensor

    with saved_tensors_hooks(pack, lambda packed: packed):
        model(batch(0))


def in_unpack(model: Net) -> None:
    count = [0]

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 8:
            raise Refused
        return packed

    with saved_tensors_hooks(lambda tensor: tensor * 1, unpack):
        loss = model(batch(0))
    loss.backward()


@pytest.mark.parametrize(
    ("mode", "program"),
    [
        ("plain", in_forward),
        ("nonreentrant", in_forward),
        ("reentrant", in_forward),
        ("nonreentrant", in_recomputation),
        ("reentrant", in_recomputation),
        ("plain", in_backward),
        ("nonreentrant", in_backward),
        ("plain", in_pack),
        ("plain", in_unpack),
    ],
)
def test_a_users_exception_is_no_fault_of_tiermems(
    mode: str, program: Callable[[Any], None]
) -> None:
    with twins(mode) as (plain, model, tier):
        check_same(plain, model, tier)
        for net in (plain, model):
            with pytest.raises(Refused):
                program(net)
            for layer in net.layers:
                layer.calls_left = None
        manager = tier._runtime.manager
        assert not manager.gate.unsure and not manager.gate.torn
        check_same(plain, model, tier)


@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
def test_a_model_that_catches_its_layers_exception_goes_on(mode: str) -> None:
    with twins(mode, forgives=True) as (plain, model, tier):
        for net in (plain, model):
            net.layers[2].calls_left = 0
        manager = tier._runtime.manager
        for step in range(3):
            losses = [net(batch(step)) for net in (plain, model)]
            assert same_bits(*losses)
            for loss in losses:
                loss.backward()
            assert not manager.gate.unsure and not manager.gate.torn
        assert plain.layers[2].linear.weight.grad is None
        assert model.layers[2].linear.weight.grad is None
        for net in (plain, model):
            net.layers[2].calls_left = None
        check_same(plain, model, tier)


def test_a_weight_changed_since_it_was_saved_is_no_fault_of_tiermems() -> None:
    with twins("plain") as (plain, model, tier):
        for net in (plain, model):
            loss = net(batch(0))
            with torch.no_grad():
                net.layers[4].last.weight.mul_(0.5)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        assert not tier._runtime.manager.gate.unsure
        check_same(plain, model, tier)


@pytest.mark.parametrize("activations", ["hbm", "dram"])
def test_an_activation_changed_since_it_was_saved_is_no_fault_of_tiermems(
    activations: str,
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, write: bool) -> torch.Tensor:
            y = self.first(x).tanh()
            z = self.second(y).sum()
            if write:
                y.mul_(2)
            return z

    policy = {"params": "dram", "activations": activations}
    with tiermem.TierManager(
        "cpu", hbm="1MiB", dram="4MiB", policy=policy, activation_min=1
    ) as tier:
        model = tier.wrap(Writes())
        model(batch(0), False).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(0), True).backward()
        assert not tier._runtime.manager.gate.unsure
        assert (tier.stats().activations.offloaded > 0) is (activations == "dram")
        model(batch(0), False).backward()
        check_table(tier)
