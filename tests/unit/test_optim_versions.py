"""A graph that holds a weight is refused once a step of that weight was asked for, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_nn import assert_same, same_bits, seed
from torch import nn

import tiermem
from tiermem.core import parts
from tiermem.optim.host import update as host
from tiermem.optim.units import master
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit

WIDTH = 24


class Scale(torch.autograd.Function):
    """Multiplies by a weight, and saves the weight itself, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, x)
        return x.sum(0).clone()  # the weight itself is not looked at before backward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, x = ctx.saved_tensors
        return None, (gradient * weight.sum()).expand_as(x) * x


class Uncounted(torch.optim.SGD):
    """Writes weights in a way that torch does not count, as many older classes do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    seed(5)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]).to(dtype)


def batch(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    dtype = next(model.parameters()).dtype
    return torch.randn(4, WIDTH, generator=generator).to(dtype).requires_grad_()


OLD_GRAPHS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a function that saves the weight": lambda m, x: Scale.apply(m[1].weight, x).sum(),
    "an operation outside the modules": lambda m, x: (x @ m[1].weight).sum(),
    "the model": lambda m, x: m(x).sum(),
}

STEPS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "put off": {"overlap": "forward"},
    "inside backward": {"overlap": "backward"},
    "masters": {"master_dtype": torch.float32},
    "masters, put off": {"master_dtype": torch.float32, "overlap": "forward"},
    "on the host": {"where": "host"},
    "on the host, put off": {"where": "host", "overlap": "forward"},
    "on the host, inside backward": {"where": "host", "overlap": "backward"},
    "on the host, masters": {"where": "host", "master_dtype": torch.float32},
    "on both": {"where": "both", "host_share": 0.5, "overlap": "forward"},
    "in parts": {},
    "in parts, masters": {"master_dtype": torch.float32, "overlap": "forward"},
}


FOREACH: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.Rprop, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),  # which torch does not count
]


@contextmanager
def tiered(
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    hbm: str = "32KiB",
    dram: str = "4MiB",
    **options: Any,
) -> Iterator[tuple[nn.Module, Any]]:
    dtype = torch.bfloat16 if "master_dtype" in options else torch.float32
    with tiermem.TierManager(device="cpu", hbm=hbm, dram=dram) as tier:
        model = tier.wrap(net(dtype))
        yield model, tier.optimizer(model, cls, lr=0.1, **options)


@pytest.fixture
def _small_parts(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if step.startswith("in parts"):
        monkeypatch.setattr(parts, "_ALIGNED", 64)
        monkeypatch.setattr(parts, "_LEAST", 0)
        monkeypatch.setattr(parts, "_MOST", 0.01)


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch(model)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("old", OLD_GRAPHS)
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("step", STEPS)
def test_an_old_graph_is_refused_after_a_step(step: str, old: str) -> None:
    with tiered(**STEPS[step]) as (model, optimizer):
        assert step.startswith("in parts") == any(
            isinstance(unit, PartedUnit) for unit in optimizer._units
        )
        train(model, optimizer, steps=3)
        loss = OLD_GRAPHS[old](model, batch(model))
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("step", STEPS)
def test_a_graph_made_while_a_step_is_put_off_has_its_weights(step: str) -> None:
    with tiered(**STEPS[step]) as (model, optimizer):
        train(model, optimizer, steps=3)
        x = batch(model)
        loss = Scale.apply(model[1].weight, x).sum()
        version = model[1].weight._version
        optimizer.zero_grad()
        loss.backward()
        assert model[1].weight._version == version
        with torch.no_grad():
            assert same_bits(x.grad, model[1].weight.sum() * x.detach())


@pytest.mark.parametrize(("cls", "settings"), FOREACH)
def test_kernels_over_several_tensors_are_counted_as_torch_does(cls: Any, settings: Any) -> None:
    """A trial of the class runs in a dispatch mode, in which torch does not count these."""
    plain = net()
    before = [param._version for param in plain.parameters()]
    train(plain, cls(plain.parameters(), lr=0.1, **settings), steps=3)
    counts = before != [param._version for param in plain.parameters()]
    assert counts is not settings.get("fused", False)
    for overlap in ("auto", "forward"):
        with tiered(cls, overlap=overlap, **settings) as (model, optimizer):
            train(model, optimizer, steps=3)
            loss = OLD_GRAPHS["a function that saves the weight"](model, batch(model))
            train(model, optimizer)
            if counts:
                with pytest.raises(RuntimeError, match="inplace operation"):
                    loss.backward()
            else:
                loss.backward()


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("step", ["on the device", "masters", "in parts"])
def test_a_step_that_could_not_be_made_ahead_is_counted_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with tiered(dram="16MiB", **STEPS[step]) as (model, optimizer):
        train(model, optimizer, steps=3)
        failing = optimizer._units[1]
        provisional = optimizer._timing.ahead.provisional
        loss = OLD_GRAPHS["a function that saves the weight"](model, batch(model))
        before = [param._version for param in model.parameters()]
        held, failed = StepUnit.held, []

        def unreadable(unit: StepUnit, *args: Any, ahead: Any = None, **options: Any) -> Any:
            if ahead is not None and unit.name.startswith(failing.name):
                failed.append(unit.name)
                raise tiermem.StorageError("cannot read", block="state", path="swap")
            return held(unit, *args, ahead=ahead, **options)

        with monkeypatch.context() as patch:
            patch.setattr(StepUnit, "held", unreadable)
            optimizer.zero_grad()
            model(batch(model)).square().sum().backward()
        assert failed
        assert 0 < len(provisional.units) < len(optimizer._units)
        assert failing not in provisional
        optimizer.step()
        assert all(p._version > v for p, v in zip(model.parameters(), before, strict=True))
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_a_class_that_torch_does_not_count_is_not_counted_here_either() -> None:
    plain = net()
    train(plain, optimizer := Uncounted(plain.parameters(), lr=0.1), steps=3)
    x = batch(plain)
    loss = Scale.apply(plain[1].weight, x).sum()
    train(plain, optimizer)
    loss.backward()
    for step in ("on the device", "put off", "on the host"):
        with tiered(Uncounted, **STEPS[step]) as (model, tiers):
            train(model, tiers, steps=3)
            y = batch(model)
            loss = Scale.apply(model[1].weight, y).sum()
            train(model, tiers)
            loss.backward()
            assert_same(x.grad, y.grad, step)


@pytest.mark.parametrize("overlap", [False, "forward", "backward"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_step_that_is_counted_is_nobody_elses_write(
    monkeypatch: pytest.MonkeyPatch, where: str, overlap: Any
) -> None:
    """Else masters would be compared with their weights at every step."""
    with tiered(where=where, overlap=overlap, master_dtype=torch.float32) as (model, optimizer):
        train(model, optimizer, steps=3)
        looked: list[object] = []
        monkeypatch.setattr(master, "follow", lambda *_: looked.append(master))
        monkeypatch.setattr(host, "follow", lambda *_: looked.append(host))
        train(model, optimizer, steps=2)
        optimizer.finish()
        assert not looked
