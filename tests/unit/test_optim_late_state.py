"""State that steps ahead leave as it was: whatever a program does, it is brought up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_late_down import LateDownEngine
from support_nn import assert_same
from torch import nn

import tiermem
from tiermem.optim import ahead
from tiermem.runtime import assembly
from tiermem.runtime.services.shadows import Shadows

LAYERS = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor, with_bias: bool) -> torch.Tensor:
        x = x @ self.weight.T
        return torch.tanh(x + self.bias if with_bias else x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, with_bias: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, with_bias)
        return x


@dataclass
class Pair:
    """A plain model and one in the tiers, each with its optimizer."""

    tier: tiermem.TierManager
    models: tuple[nn.Module, nn.Module]
    optimizers: tuple[Any, Any]

    def backward(self, number: int, with_bias: bool = True) -> None:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        losses = [model(x, with_bias).square().mean() for model in self.models]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self, numbers: Sequence[int], with_bias: bool = True) -> None:
        for number in numbers:
            self.backward(number, with_bias)
            self.step()
            self.zero_grad()

    def late(self) -> int:
        return sum(unit.late is not None for unit in self.optimizers[1]._units)

    def check(self) -> None:
        plain, tiered = self.models
        assert_same(dict(plain.state_dict()), dict(tiered.state_dict()), "weights")
        self.check_state()

    def check_state(self) -> None:
        plain, tiered = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert_same(plain, tiered, "state")


@contextlib.contextmanager
def trained(rounds: int = 9, hbm: float = 0.6) -> Iterator[Pair]:
    """Both are trained until state of the one in the tiers is late."""
    models = Net(), Net()
    weights = sum(p.nbytes for p in models[0].parameters())
    with tiermem.TierManager("cpu", hbm=int(weights * hbm), dram="64MiB") as tier:
        plain, tiered = models[0], tier.wrap(models[1])
        optimizers = (
            torch.optim.AdamW(plain.parameters()),
            tier.optimizer(tiered, torch.optim.AdamW),
        )
        pair = Pair(tier, (plain, tiered), optimizers)
        pair.train(range(rounds))
        assert 0 < pair.late() < len(optimizers[1]._units)
        yield pair
        assert not tier._manager.parts.deferred.standing or pair.late()


def test_a_parameter_without_gradient_is_not_stepped_by_the_one_before() -> None:
    with trained() as pair:
        pair.train(range(20, 23), with_bias=False)
        pair.train(range(23, 27))
        pair.check()


def test_gradients_that_are_not_cleared_nor_added_to_are_held_once() -> None:
    with trained() as pair:
        pair.train([20], with_bias=False)  # gradients of biases are apart from then on
        pair.train(range(21, 27))
        for number in range(27, 37):
            pair.backward(number)
            pair.step()
            pair.backward(number + 20, with_bias=False)
            pair.step()
            pair.zero_grad()
            pair.train([number])
        pair.check()


@pytest.mark.parametrize("made", ["nothing", "steps ahead"])
def test_a_model_is_taken_out_of_the_tiers(made: str) -> None:
    """The state is looked at afterwards, whose update needs nothing that is gone."""
    with trained() as pair:
        if made == "steps ahead":
            pair.backward(20)
        pair.tier.unwrap(pair.models[1])
        assert not pair.late()
        pair.check()
        pair.optimizers[1].close()
        assert not pair.tier._manager.parts.homes.dram.used


def test_an_exception_leaves_the_gradients_that_are_kept() -> None:
    with trained() as pair:
        assert cut_short(pair.optimizers[1].zero_grad, 3, ["optim/"])
        assert pair.late()
        pair.check()
        pair.train(range(20, 24))
        pair.check()


@pytest.mark.parametrize("call", ["step", "zero_grad", "finish"])
def test_a_call_cut_short_is_made_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_IN_VAIN", 1 << 30)
    files = ["optim/provisional", "optim/units/late", "optim/units/unit", "core/residency"]
    with trained() as pair:
        optimizer = pair.optimizers[1]

        def cut(what: str, number: int) -> bool:
            found = what == call and bool(cut_short(getattr(optimizer, what), number, files))
            if found or what != call:
                getattr(optimizer, what)()
            return found

        number, found = 1, True
        while found:
            pair.backward(number)
            pair.optimizers[0].step()
            found = cut("step", number)
            if call == "finish":
                found = cut("finish", number)
            pair.optimizers[0].zero_grad()
            found |= cut("zero_grad", number)
            pair.train(range(number, number + 2))
            number += 37
        assert number > 50
        pair.check()


def test_dram_is_asked_for_while_steps_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for activations that make room for them: what the steps need is not given up."""
    turn: Callable[..., None] = Shadows.turn
    with trained() as pair:

        def ask(shadows: Shadows, *args: Any) -> None:
            pair.tier._manager.parts.homes._reclaim()
            turn(shadows, *args)

        monkeypatch.setattr(Shadows, "turn", ask)
        pair.train(range(20, 24))
        pair.check()


def test_two_optimizers_leave_state_over_the_same_gradients() -> None:
    with trained() as pair:
        plain = torch.optim.SGD(pair.models[0].parameters(), lr=0.01, momentum=0.9)
        tiered = pair.tier.optimizer(pair.models[1], torch.optim.SGD, lr=0.01, momentum=0.9)
        adam, sgd = pair.optimizers, (plain, tiered)
        for number in range(20, 40):
            pair.optimizers = (adam, sgd)[number // 5 % 2]
            pair.backward(number)
            pair.step()
            if number % 4 == 0:
                Pair(pair.tier, pair.models, adam).check_state()
            pair.zero_grad()
        for optimizers in (adam, sgd):
            pair.optimizers = optimizers
            pair.check()


def test_state_that_is_left_stays_as_it_is_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although copies of it to there are made late."""
    monkeypatch.setattr(assembly, "HostCopyEngine", LateDownEngine)
    with trained(hbm=0.8) as pair:
        for number in range(20, 40):
            pair.train([number])
            if number % 3 == 0:
                pair.check_state()
        pair.check()


def test_a_setting_that_is_a_tensor_may_become_another() -> None:
    """With weight decay the state is made of the weights, too."""
    models = Net(), Net()
    weights = sum(p.nbytes for p in models[0].parameters())

    def settings() -> dict[str, Any]:
        return {"weight_decay": torch.tensor(0.0), "foreach": False}

    with tiermem.TierManager("cpu", hbm=int(weights * 0.6), dram="64MiB") as tier:
        plain, tiered = models[0], tier.wrap(models[1])
        by_hand = torch.optim.Adam(plain.parameters(), **settings())
        optimizer = tier.optimizer(tiered, torch.optim.Adam, **settings())
        pair = Pair(tier, (plain, tiered), (by_hand, optimizer))
        pair.train(range(9))
        for group in (by_hand.param_groups[0], optimizer.param_groups[0]):
            group["weight_decay"].fill_(0.5)
        pair.train(range(9, 15))
        pair.check()
