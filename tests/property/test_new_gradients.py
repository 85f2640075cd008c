"""Gradients that wait for others of their unit: no program tells them from a resident model's.

The oracle is plain torch. Programs use some layers in any order, add up, look at gradients and
change them, have hooks of their own, and stop in the middle of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import assert_same, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.groups import newgrads
from tiermem.nn.tensors.lazy import LazyTensor

LAYERS = 4
_SMALL = 1 << 20  # bytes: more than a layer has


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
        self.held: list[torch.Tensor] = []  # gradients themselves

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
            self.held.append(param.grad)
            param.grad.mul_(2.0)

        self.params[index % len(self.params)].register_post_accumulate_grad_hook(note)

    def spy(self, index: int, watched: int) -> None:
        """Looks at a gradient from a hook: it may wait, or be the one that is added to."""
        index, watched = index % len(self.params), watched % len(self.params)
        if index == watched:  # hooks see their own from the second backward on
            self.optimizer.zero_grad()

        def note(_gradient: torch.Tensor) -> None:
            found = self.params[watched].grad
            if found is not None:
                self.seen.append(found.clone())
                self.held.append(found)

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


@example([("spy", 0, 5), USUAL[0], ("scale", 5)], torch.optim.SGD, _SMALL)
@example([("hook", 5), USUAL[0], ("scale", 5)], torch.optim.SGD, _SMALL)
@example([("spy", 3, 3), USUAL[0], USUAL[0]], torch.optim.SGD, _SMALL)
@settings(max_examples=examples(40))
@given(
    st.lists(CALLS, max_size=14),
    st.sampled_from([torch.optim.SGD, torch.optim.AdamW]),
    st.sampled_from([_SMALL, 400, 800]),
)
def test_no_program_sees_that_gradients_wait(calls: list[Any], kind: Any, at_most: int) -> None:
    """Those of a layer all wait for each other, or two or three of them."""
    plain = build()
    theirs = Side(plain, kind(plain.parameters(), lr=0.1))
    with (
        pytest.MonkeyPatch.context() as patch,
        tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier,
    ):
        patch.setattr(newgrads, "_AT_MOST", at_most)
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
            assert_same(theirs.held, [g.clone() for g in mine.held], "what hooks hold")
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


@pytest.mark.parametrize(
    ("at_most", "together"), [(1 << 20, [6] * LAYERS), (400, [2, 2, 2] * LAYERS), (4, [1] * 24)]
)
def test_a_unit_is_taken_in_at_once_or_in_parts_that_are_not_too_large(
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
            assert all(isinstance(p.grad, LazyTensor) for p in model.parameters())
            model.zero_grad()
    assert found == together


def test_a_parameter_used_twice_is_added_up_in_the_dtype_that_is_kept() -> None:
    """Each recomputed part of a reentrant checkpoint brings a gradient of its own."""

    def use(model: nn.Module) -> torch.Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        x.requires_grad_()
        for _ in range(3):
            x = checkpoint(model, x, use_reentrant=True)
        return x.float().square().sum()

    def make() -> nn.Module:
        seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).bfloat16()

    plain = make()
    sums: dict[int, torch.Tensor] = {}

    def add(param: torch.Tensor) -> None:
        assert param.grad is not None
        sums[id(param)] = sums.get(id(param), torch.zeros(param.shape)) + param.grad.float()
        param.grad = None

    for param in plain.parameters():
        param.register_post_accumulate_grad_hook(add)
    use(plain).backward()
    with tiermem.TierManager("cpu", hbm=1 << 15, dram=1 << 24) as tier:
        model = make()
        tier.wrap(model, [""])
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1, grad_dtype=torch.float32)
        for _ in range(3):
            optimizer.zero_grad()
            use(model).backward()
            mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert_same([sums[id(p)] for p in plain.parameters()], mine, "gradients")


def test_a_hook_is_shown_what_is_in_the_tiers() -> None:
    shown: list[object] = []
    with tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier:
        model = build()
        tier.wrap(model, [f"layers.{i}" for i in range(LAYERS)])
        model.layers[1].up.bias.register_post_accumulate_grad_hook(lambda p: shown.append(p.grad))
        for _ in range(3):
            model(torch.ones(2, 8), [(i, False) for i in range(LAYERS)], -1).sum().backward()
            model.zero_grad()
    assert [type(gradient) for gradient in shown] == [LazyTensor] * 3


def test_a_hook_from_before_the_wrap_may_hold_what_is_added_to_another_gradient() -> None:
    seen: list[torch.Tensor | None] = [None]  # the first is not held
    order = [(i, False) for i in range(LAYERS)]
    plain, model = build(), build()

    def hold(param: torch.Tensor) -> None:
        seen.append(param.grad if any(p.grad is not None for p in others) else None)

    others = list(model.layers[0].parameters())  # they come later, and are there from then on
    model.layers[1].up.bias.register_post_accumulate_grad_hook(hold)
    with tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier:
        tier.wrap(model, [f"layers.{i}" for i in range(LAYERS)])
        for _ in range(3):
            for one in (plain, model):
                one(torch.ones(2, 8), order, -1).sum().backward()
            mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert_same([p.grad for p in plain.parameters()], mine, "gradients")
    assert [gradient is None for gradient in seen] == [True, True, False, False]


def test_a_step_in_backward_finds_subclasses_of_tensors_at_work() -> None:
    """Its code may look at other tensors that are in the tiers."""
    found: list[bool] = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            found.append(torch._C._is_torch_function_enabled())
            super().step(closure)

    with tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier:
        model = build()
        tier.wrap(model, [f"layers.{i}" for i in range(LAYERS)])
        optimizer = tier.optimizer(model, Looking, lr=0.1, overlap="backward")
        for _ in range(4):
            model(torch.ones(2, 8), [(i, False) for i in range(LAYERS)], -1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.stepped_in_backward > 0 and all(found)


@pytest.mark.parametrize("wrapped", [False, True])
def test_nothing_is_added_to_a_gradient_that_was_cleared_since(wrapped: bool) -> None:
    """No forward comes between two backwards through one graph."""
    with tiermem.TierManager("cpu", hbm=1 << 14, dram=1 << 24) as tier:
        model = build()
        if wrapped:
            tier.wrap(model, [f"layers.{i}" for i in range(LAYERS)])
        loss = model(torch.ones(2, 8), [(i, False) for i in range(LAYERS)], -1).sum()
        loss.backward(retain_graph=True)
        first = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        for number, param in enumerate(model.parameters()):
            if number % 2:
                param.grad = None
        loss.backward()
        found = [param.grad for param in model.parameters() if param.grad is not None]
        wanted = [g if number % 2 else g + g for number, g in enumerate(first)]
        assert_same(wanted, [gradient.clone() for gradient in found], "gradients")


def test_what_stays_in_hbm_does_not_part_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are in one block, whose gradients come between those of the blocks around them."""
    model = nn.Sequential(*(Wide() for _ in range(6)))
    nbytes = sum(p.nbytes for p in model.parameters())
    with tiermem.TierManager("cpu", hbm=nbytes // 2, dram=9 * nbytes) as tier:
        tier.wrap(model)
        assert any(row.block.endswith(".small") for row in tier.residency())
        incoming = tier._runtime.backward.incoming
        calls: list[int] = []
        for waiting in (incoming.new, incoming.staying):
            taken = waiting._take_in

            def counted(entries: Any, taken: Any = taken) -> None:
                calls.append(len(entries))
                taken(entries)

            monkeypatch.setattr(waiting, "_take_in", counted)
        for _ in range(3):
            calls.clear()
            model.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
        units = {id(e.unit) for group in tier._runtime.groups for e in group.entries}
        assert sum(calls) == len([*model.parameters()])
        assert len(calls) == len(units)


class Wide(nn.Module):
    """A layer whose matrices are blocks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))
