"""Weights of inner modules that a forward uses by themselves: in HBM until its call ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from support_nn import same_bits
from support_runtime import EvenClock
from torch import nn
from torch.nn import functional

import tiermem
from tiermem.core.block import align_up

WIDTH, LAYERS = 64, 12


class Merged(nn.Module):
    """A layer that adds a product of two small matrices to another's weight, as adapters may."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.left, self.right = nn.Linear(2, 4 * WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = self.left.weight @ self.right.weight
        inner = functional.linear(x, self.base.weight + delta, self.base.bias)
        out: torch.Tensor = x + self.last(torch.tanh(inner))
        return out


class Scanned(nn.Module):
    """A layer that calls one part and uses the weight of another one, as a state space model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x))
        inner = (self.second.weight @ inner.t()).t() + self.second.bias
        out: torch.Tensor = x + self.third(inner)
        return out


class Joined(nn.Module):
    """A layer whose parts' weights are joined to one, and used with one product."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkv"})
        self.out = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat([part.weight for part in self.parts.values()])
        out: torch.Tensor = x + self.out(torch.tanh(functional.linear(x, weight)))
        return out


def build(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(LAYERS))).eval()


def each(_name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def size_of(model: nn.Module) -> int:
    """Returns the bytes of its blocks, in whole pages."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(align_up(sum(p.nbytes for p in module.parameters())) for module in linears)


@contextmanager
def planned(model: nn.Module, share: float) -> Iterator[tiermem.TierManager]:
    """Wraps a model, each linear layer a block, and plans for it as on a GPU."""
    nbytes = size_of(model)
    with tiermem.TierManager("cpu", hbm=int(share * nbytes), dram=4 * nbytes) as tier:
        manager = tier._manager
        manager.prefetcher.fetcher.beside = True
        manager.parts.pass_timer.estimates.flops = 1e12
        manager.parts.pass_timer._clock = EvenClock()
        tier.wrap(model, each)
        yield tier


@pytest.mark.parametrize(
    ("kind", "share"),
    [(Merged, 0.4), (Merged, 0.6), (Scanned, 0.4), (Scanned, 0.6), (Joined, 0.6)],
)
def test_such_forwards_are_laid_out(kind: Callable[[], nn.Module], share: float) -> None:
    model = build(kind)
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with planned(model, share) as tier, torch.no_grad():
        arranged, moved = list[bool](), list[int]()
        for _ in range(8):
            tier.reset_stats()
            assert same_bits(model(x), plain(x))
            run = tier._manager.replay.run
            arranged.append(run is not None and run.arranged)
            moved.append(tier.stats().links["dram->hbm"].nbytes)
        assert all(arranged[4:]), arranged
        assert moved[-1] < 1.5 * (1 - share) * size_of(model)


class Native(nn.Module):
    """Hands its parts' weights, all looked up before, to code that torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [part.weight for part in self.parts]
        with torch._C.DisableTorchFunctionSubclass():
            for weight in weights:
                x = x + torch.tanh(x @ weight.detach().clone())
        return x


def test_what_was_looked_up_is_there_until_the_call_ends() -> None:
    model = build(Native)
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with planned(model, 0.25) as tier, torch.no_grad():
        for _ in range(4):
            assert same_bits(model(x), plain(x))
        assert not tier._runtime.away.soft or len(tier._runtime.away.soft) <= 4


class Returned(nn.Module):
    """Returns its part's weight itself, in one form or another."""

    def __init__(self, form: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.part, self.form = nn.Linear(WIDTH, WIDTH, bias=False), form

    def forward(self, _x: torch.Tensor) -> object:
        return self.form(self.part.weight)


class User(nn.Module):
    """Uses what inner calls return with code that torch does not see."""

    def __init__(
        self, form: Callable[[nn.Parameter], object], found: Callable[..., object]
    ) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Returned(form) for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))
        self.found = found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.found(inner(x)) for inner in self.inner]
        for other in self.others:
            x = torch.tanh(other(x))
        with torch._C.DisableTorchFunctionSubclass():
            for weight in weights:
                x = x + torch.tanh(x @ weight.detach().clone())
        return x


class Box:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight


_FORMS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "itself": (lambda w: w, lambda w: w),
    "tuple": (lambda w: (1, [w]), lambda found: found[1][0]),
    "dict": (lambda w: {"weight": w}, lambda found: found["weight"]),
    "object": (Box, lambda found: found.weight),
}


@pytest.mark.parametrize("form", _FORMS)
def test_what_a_call_returns_stays_there(form: str) -> None:
    torch.manual_seed(0)
    model = User(*_FORMS[form]).eval()
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with planned(model, 0.6), torch.no_grad():
        for _ in range(3):
            assert same_bits(model(x), plain(x))


def _in_itself(weight: nn.Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {"weight": weight}
    found["self"] = found
    return found


class Lazy(dict[str, Any]):
    def values(self) -> Any:
        raise AssertionError("what a call returns is looked at with nobody's code")


@pytest.mark.parametrize("form", [_in_itself, lambda w: Lazy(weight=w)])
def test_any_result_may_be_returned(form: Callable[..., object]) -> None:
    torch.manual_seed(0)
    model = User(form, lambda found: found["weight"]).eval()
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with planned(model, 0.6), torch.no_grad():
        for _ in range(3):
            assert same_bits(model(x), plain(x))


def test_calls_end_only_what_was_used_in_them() -> None:
    """A weight that the outer call uses first is left to it, though inner calls use it as well."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Scanned() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = [len(runtime.away.soft)]
            x = x @ self.table.weight
            for layer in self.layers:
                seen.append(len(runtime.away.soft))
                x = layer(x) @ self.table.weight
            counts.append(seen)
            return x

    torch.manual_seed(0)
    model = Outer().eval()
    counts = list[list[int]]()
    with planned(model, 0.6) as tier, torch.no_grad():
        runtime = tier._runtime
        plain = deepcopy(model)
        assert plain is not model
        for _ in range(2):
            model(torch.randn(3, WIDTH))
    assert counts == [[0, 1, 1, 1]] * 2


def test_passes_with_gradients_leave_them_to_the_next_pass() -> None:
    model = build(Scanned)
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with planned(model, 0.6) as tier:
        for net in (model, plain):
            net(x).square().mean().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and same_bits(a.grad, b.grad)
        assert tier.stats().peak["hbm"] > 0
