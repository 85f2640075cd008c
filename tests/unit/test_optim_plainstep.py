"""A plain optimizer's step without torch's wrapper, and with it where it has an effect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from tiermem.optim.rules.plainstep import run

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """A class of a user's own, with a step of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param -= group["lr"] * param.grad


class Above(torch.optim.SGD):
    """Does something before what it inherits."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(2)
        return super().step(closure)


def twice(step: Any) -> Any:
    @functools.wraps(step)
    def both(self: Any) -> None:
        step(self)
        step(self)

    return both


class Decorated(torch.optim.SGD):
    """Its step is wrapped as ``functools.wraps`` does it: with all marks of what it wraps."""


torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)  # from now on torch's wrapper is there
Decorated.step = twice(torch.optim.SGD.step)  # type: ignore[method-assign]
assert Decorated.step.hooked  # type: ignore[attr-defined]

CLASSES: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "own": Own,
    "inherited": lambda p: Above(p, lr=0.1),
    "decorated": lambda p: Decorated(p, lr=0.1),
}


def stepped(make: Make, step: Callable[[torch.optim.Optimizer], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    optimizer = make(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        step(optimizer)
    return params


@pytest.mark.parametrize("name", CLASSES)
def test_it_does_what_step_does(name: str) -> None:
    ours = stepped(CLASSES[name], run)
    theirs = stepped(CLASSES[name], lambda optimizer: optimizer.step())
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def one() -> torch.optim.Optimizer:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return torch.optim.SGD([param], lr=0.5)


@contextmanager
def registered(optimizer: torch.optim.Optimizer, kind: str) -> Iterator[list[str]]:
    seen: list[str] = []
    register: dict[str, Any] = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "global pre": torch_optimizer.register_optimizer_step_pre_hook,
        "global post": torch_optimizer.register_optimizer_step_post_hook,
    }
    handle = register[kind](lambda *_: seen.append(kind))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_are_called(kind: str) -> None:
    optimizer = one()
    with registered(optimizer, kind) as seen:
        run(optimizer)
    assert seen == [kind]
    run(optimizer)
    assert seen == [kind]


@pytest.mark.parametrize("kind", ["global pre", "global post"])
def test_hooks_for_all_optimizers_are_left_to_the_tiered_one(kind: str) -> None:
    optimizer = one()
    with registered(optimizer, kind) as seen:
        run(optimizer)
        assert seen == []
        optimizer.step()
        assert seen == [kind]


def test_a_step_in_the_objects_own_place_is_called() -> None:
    optimizer = one()
    called: list[int] = []
    optimizer.step = lambda closure=None: called.append(1)  # type: ignore[method-assign,assignment]
    run(optimizer)
    assert called == [1]


def test_the_profiler_sees_it() -> None:
    optimizer = one()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_the_wrapper_is_left_out_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = one()
    names: list[str] = []
    real = torch.autograd.profiler.record_function

    def noted(name: str, args: str | None = None) -> Any:
        names.append(name)
        return real(name, args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", noted)
    run(optimizer)
    assert names == []
    optimizer.step()
    assert names == ["Optimizer.step#SGD.step"]
