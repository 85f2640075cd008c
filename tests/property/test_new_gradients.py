"""Gradients that wait for others of their unit: no program tells them from a resident model's.

The oracle is plain torch. Programs use some layers in any order, add up, look at gradients and
change them, have hooks of their own, and stop in the middle of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_nn import assert_same, seed
from torch import nn

import tiermem
from tiermem.nn.groups import newgrads

LAYERS = 4


class Layer(nn.Module):
    """Several parameters, so that some can wait for others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor, part: bool) -> torch.Tensor:
        x = self.norm(x)
        return x if part else x + self.down(torch.tanh(self.up(x)))


class Stop(Exception):
    """Ends a backward in the middle."""


class Net(nn.Module):
    """Layers that are used in an order that is given, or left out, or used in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self, x: torch.Tensor, order: Sequence[tuple[int, bool]], stop: int
    ) -> torch.Tensor:
        for number, (index, part) in enumerate(order):
            x = self.layers[index](x, part)
            if number == stop:
                x.register_hook(_stop)
        return x


def _stop(_gradient: torch.Tensor) -> None:
    raise Stop


def build() -> Net:
    seed(0)
    return Net()


class Side:
    """A model, its optimizer, and what its hooks have seen."""

    def __init__(self, model: Net, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.params = list(model.parameters())
        self.seen: list[torch.Tensor] = []

    def backward(self, order: Sequence[tuple[int, bool]], stop: int) -> None:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(len(order)))
        loss = self.model(x, order, stop).square().mean()
        try:
            loss.backward()
        except Stop:
            pass

    def look(self, index: int) -> torch.Tensor | None:
        gradient = self.params[index % len(self.params)].grad
        return None if gradient is None else gradient.clone()

    def scale(self, index: int) -> None:
        gradient = self.params[index % len(self.params)].grad
        if gradient is not None:
            gradient.mul_(0.5)

    def hook(self, index: int) -> None:
        def note(param: torch.Tensor) -> None:
            assert param.grad is not None
            self.seen.append(param.grad.clone())
            param.grad.mul_(2.0)

        self.params[index % len(self.params)].register_post_accumulate_grad_hook(note)

    def spy(self, index: int, watched: int) -> None:
        """Looks at another parameter's gradient while that may wait."""
        index, watched = index % len(self.params), watched % len(self.params)
        watched += index == watched  # its own has made way for the new one

        def note(_gradient: torch.Tensor) -> None:
            found = self.look(watched)
            self.seen.append(torch.zeros(0) if found is None else found)

        self.params[index].register_hook(note)


ORDERS = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.booleans()), min_size=1, max_size=6)
INDEX = st.integers(0, 6 * LAYERS - 1)
CALLS = st.one_of(
    st.tuples(st.just("backward"), ORDERS, st.integers(-1, 8)),
    st.tuples(st.just("backward"), ORDERS, st.just(-1)),
    st.tuples(st.just("look"), INDEX),
    st.tuples(st.just("scale"), INDEX),
    st.tuples(st.just("hook"), INDEX),
    st.tuples(st.just("spy"), INDEX, INDEX),
    st.tuples(st.just("step")),
    st.tuples(st.just("zero")),
)
USUAL = [("backward", [(i, False) for i in range(LAYERS)], -1), ("step",), ("zero",)]


@given(st.lists(CALLS, max_size=14), st.sampled_from([torch.optim.SGD, torch.optim.AdamW]))
def test_no_program_sees_that_gradients_wait(calls: list[Any], kind: Any) -> None:
    plain = build()
    theirs = Side(plain, kind(plain.parameters(), lr=0.1))
    with tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier:
        model = build()
        tier.wrap(model, [f"layers.{i}" for i in range(LAYERS)])
        mine = Side(model, tier.optimizer(model, kind, lr=0.1))
        for name, *given_ in (*USUAL, *USUAL, *calls, *USUAL):
            results = []
            for side in (theirs, mine):
                if name == "step":
                    side.optimizer.step()
                elif name == "zero":
                    side.optimizer.zero_grad()
                else:
                    results.append(getattr(side, name)(*given_))
            if results:
                assert_same(results[0], results[1], name)
            assert_same(theirs.seen, mine.seen, "what hooks have seen")
        assert_same([p.grad for p in theirs.params], [mine.look(i) for i in range(24)], "gradients")
    assert_same(list(plain.parameters()), list(model.parameters()), "weights")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which is added how many gradients are taken in at a time."""
    found: list[int] = []
    init = newgrads.NewGradients.__init__

    def counting(
        self: newgrads.NewGradients, device: torch.device, take_in: Callable[..., None]
    ) -> None:
        def take(entries: Sequence[Any]) -> None:
            found.append(len(entries))
            take_in(entries)

        init(self, device, take)

    monkeypatch.setattr(newgrads.NewGradients, "__init__", counting)
    return found


@pytest.mark.parametrize(("at_most", "together"), [(1 << 20, [6] * LAYERS), (64, [1] * 24)])
def test_a_unit_is_taken_in_at_once_where_it_is_small(
    monkeypatch: pytest.MonkeyPatch, at_most: int, together: list[int]
) -> None:
    found = counted(monkeypatch)
    monkeypatch.setattr(newgrads, "_AT_MOST", at_most)
    with tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier:
        model = build()
        tier.wrap(model, [f"layers.{i}" for i in range(LAYERS)])
        for _ in range(2):
            found.clear()
            model(torch.ones(2, 8), [(i, False) for i in range(LAYERS)], -1).sum().backward()
            model.zero_grad()
    assert found == together
