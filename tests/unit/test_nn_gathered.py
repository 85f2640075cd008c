"""Biases and norms' weights stay in HBM, and their gradients are taken in as a backward ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_nn import assert_same, same_bits
from torch import nn

import tiermem
from tiermem.nn.groups.gathered import GatheredGradients
from tiermem.nn.tensors.lazy import LazyTensor

WIDTH, LAYERS = 192, 6
X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


class Block(nn.Module):
    """A layer with two matrices, and with vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the layer."""
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Pair:
    """A resident model and its twin in the tiers, each with an optimizer."""

    def __init__(self, cls: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain: Any = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.model: Any = copy.deepcopy(self.plain)
        nbytes = sum(p.nbytes for p in self.plain.parameters())
        self.tier = tiermem.TierManager("cpu", hbm=3 * nbytes // 2, dram=8 * nbytes)
        self.tier.wrap(self.model)
        self.both = self.plain, self.model
        self.optimizers = [
            cls(self.plain.parameters(), lr=0.01),
            self.tier.optimizer(self.model, cls, lr=0.01, **options),
        ]

    @property
    def gathered(self) -> GatheredGradients:
        return self.tier._runtime.backward.incoming.gathered

    @property
    def hooked(self) -> int:
        """How many vectors have hooks that announce their gradients."""
        return sum(bool(p._backward_hooks) for p in vectors(self.model))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, times: int = 1) -> None:
        for _ in range(times):
            losses = [one(X).square().mean() for one in self.both]
            assert same_bits(*losses)
            for loss in losses:
                loss.backward()

    def train(self, steps: int = 3, backwards: int = 1) -> None:
        for _ in range(steps):
            self.backward(backwards)
            self.step()
            self.zero_grad()

    def check(self) -> None:
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or same_bits(mine.grad.clone(), theirs.grad)
        assert_same(self.plain.state_dict(), self.model.state_dict(), "weights")


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.tier.close(discard=True)


def test_vectors_stay_and_matrices_move(pair: Pair) -> None:
    rows = {row.block: row for row in pair.tier.residency() if row.role == "param"}
    (small,) = (row for name, row in rows.items() if name.endswith(".small"))
    assert small.home == "hbm"
    assert small.nbytes >= sum(p.nbytes for p in vectors(pair.model))
    pair.train()
    assert not pair.hooked
    assert all(p._backward_hooks for p in pair.model.parameters() if p.dim() > 1)
    pair.check()
    assert "_call_impl" not in pair.model[0].norm.__dict__, "the pass holds what it needs"


def test_where_all_fits_nothing_stays_apart() -> None:
    with tiermem.TierManager("cpu", hbm="64MiB", dram="64MiB") as tier:
        tier.wrap(nn.Sequential(Block(), Block()))
        assert not any(row.block.endswith(".small") for row in tier.residency())


@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adafactor]
)
@pytest.mark.parametrize("overlap", ["auto", False, "forward", "backward"])
def test_each_optimizer_and_overlap(cls: Any, overlap: Any) -> None:
    pair = Pair(cls, overlap=overlap)
    pair.train(5)
    assert bool(pair.hooked) == (overlap == "backward")  # it steps as soon as all of a block came
    pair.check()
    pair.tier.close(discard=True)


def test_gradients_are_in_the_tiers_once_backward_is_over(pair: Pair) -> None:
    pair.backward()
    assert all(isinstance(p.grad, LazyTensor) for p in vectors(pair.model))
    pair.check()


def test_what_is_added_to_is_announced_from_then_on(pair: Pair) -> None:
    pair.train(backwards=2)
    assert pair.hooked == len(vectors(pair.model))
    pair.train()
    pair.backward(2)
    pair.check()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("soon", [False, True])
def test_hooks_of_users_see_what_torch_shows(pair: Pair, later: bool, soon: bool) -> None:
    pair.train(0 if soon else 2)
    seen: list[list[torch.Tensor]] = [[], []]
    for one, found in zip(pair.both, seen, strict=True):
        bias = one[2].first.bias
        if later:
            bias.register_post_accumulate_grad_hook(lambda p, f=found: f.append(p.grad.clone()))
        else:
            bias.register_hook(lambda g, f=found: f.append(g.clone()))
    pair.train(2)
    assert pair.hooked == (0 if later else 1), "that of the user"
    pair.train(2, backwards=2)
    assert len(seen[0]) == 6
    assert_same(*seen, "seen by hooks")
    pair.check()


def test_a_hook_on_a_matrix_reads_a_vectors_gradient(pair: Pair) -> None:
    seen: list[list[Any]] = [[], []]
    for one, found in zip(pair.both, seen, strict=True):
        bias = one[3].second.bias
        one[0].first.weight.register_hook(lambda _, b=bias, f=found: f.append(b.grad.clone()))
    pair.train(3)
    assert_same(*seen, "seen in backward")
    pair.check()


def test_a_gradient_of_the_users_is_added_to(pair: Pair) -> None:
    pair.train(2)
    own = [torch.ones(WIDTH), torch.ones(WIDTH)]
    for one, gradient in zip(pair.both, own, strict=True):
        one[1].norm.weight.grad = gradient
    pair.backward()
    assert same_bits(*own), "the very tensor is added to"
    pair.step()
    pair.check()


def test_a_backward_that_fails_leaves_what_came(pair: Pair) -> None:
    def fails(_gradient: torch.Tensor) -> None:
        raise ValueError("stop")

    pair.train(2)
    for one in pair.both:
        handle = one[2].first.weight.register_hook(fails)
        with pytest.raises(ValueError, match="stop"):
            one(X).square().mean().backward()
        handle.remove()
    for mine, theirs in zip(vectors(pair.model[4]), vectors(pair.plain[4]), strict=True):
        assert same_bits(mine.grad, theirs.grad)
    pair.backward()  # it adds to these
    pair.step()
    pair.zero_grad()
    pair.train()
    pair.check()


def test_frozen_and_trained_again(pair: Pair) -> None:
    pair.train(2)
    for one in pair.both:
        for vector in vectors(one)[::2]:
            vector.requires_grad_(False)
    pair.train(2)
    pair.train(1, backwards=2)
    for one in pair.both:
        one.requires_grad_(True)
    pair.train(2)
    pair.backward()
    pair.check()


def test_gradients_that_are_asked_for_are_not_taken_in(pair: Pair) -> None:
    pair.train(2)
    found = [
        torch.autograd.grad(one(X).square().mean(), vectors(one), create_graph=again)
        for again in (False, True)
        for one in pair.both
    ]
    assert_same(list(found[0]), list(found[1]), "grad")
    assert_same(list(found[2]), list(found[3]), "grad with a graph")
    assert all(p.grad is None for p in pair.model.parameters())
    pair.train(2)
    pair.check()


def test_a_graph_of_gradients(pair: Pair) -> None:
    pair.train(2)
    for one in pair.both:
        loss = one(X).square().mean()
        found = torch.autograd.grad(loss, vectors(one), create_graph=True)
        (loss + sum(g.square().sum() for g in found)).backward()
    pair.step()
    pair.check()


def test_parameters_without_a_gradient(pair: Pair) -> None:
    for number in range(3):
        for one in pair.both:
            one[number : number + 2](X).square().mean().backward()
        pair.check()
        pair.step()
        pair.zero_grad()
    pair.check()


def test_clipping_counts_all_gradients(pair: Pair) -> None:
    for most in (1e9, 1e-3, 1e9):
        pair.backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), most) for one in pair.both]
        assert same_bits(*norms)
        pair.step()
        pair.zero_grad()
    pair.check()


def test_zeros_instead_of_none(pair: Pair) -> None:
    for _ in range(3):
        pair.backward()
        pair.step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad(set_to_none=False)
    pair.check()


def test_a_model_that_leaves_and_comes_back(pair: Pair) -> None:
    pair.train(2)
    pair.tier.unwrap(pair.model)
    assert not any(p._backward_hooks for p in pair.model.parameters())
    pair.tier.wrap(pair.model)
    pair.optimizers = [
        torch.optim.SGD(pair.plain.parameters(), lr=0.1),
        pair.tier.optimizer(pair.model, torch.optim.SGD, lr=0.1),
    ]
    pair.train(2)
    pair.check()
