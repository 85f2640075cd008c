"""Calls of modules below the one where a block begins are out of the way, save where it matters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.nn.wrap.scope import CallInterceptor

CALL = CallInterceptor.method


class Layer(nn.Module):
    """Two inner modules with weights, and a hook for the test in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.meanwhile: Callable[[Layer], Any] = lambda layer: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.meanwhile(self)
        return self.last(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def wrapped(monkeypatch: pytest.MonkeyPatch, threads: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields a model in the tiers, one block a layer, and the manager's front."""
    monkeypatch.setattr("tiermem.nn.wrap.scope.other_threads", lambda: threads)
    model = Model()
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier:
        yield tier.wrap(model, blocks=[f"layers.{i}" for i in range(4)]), tier


def intercepted(layer: Layer) -> list[bool]:
    return [isinstance(m.__dict__.get(CALL), CallInterceptor) for m in (layer.first, layer.last)]


def test_calls_are_out_of_the_way_from_the_first_one_of_their_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 8)
    with wrapped(monkeypatch) as (model, tier), torch.no_grad():
        layer, other = model.layers[1], model.layers[2]
        seen: list[list[bool]] = []
        layer.meanwhile = lambda layer: seen.append(intercepted(layer) + intercepted(other))
        found = model(x)
        assert seen == [[False, False, True, True]]
        assert isinstance(layer.__dict__[CALL], CallInterceptor)  # where a block begins it stays
        assert not any(any(intercepted(each)) for each in model.layers)
        assert torch.equal(model(x), found)
        tier.unwrap(model)
        assert all(CALL not in module.__dict__ for module in model.modules())
        assert torch.equal(model(x), found)


@pytest.mark.parametrize("how", ["threads", "gradients"])
def test_calls_come_back_where_they_have_something_to_add(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with wrapped(monkeypatch) as (model, _):
        with torch.no_grad():
            model(torch.randn(3, 8))
        if how == "threads":
            monkeypatch.setattr("tiermem.nn.wrap.scope.other_threads", lambda: 1)
        seen: list[bool] = []
        for layer in model.layers:
            layer.meanwhile = lambda layer: seen.extend(intercepted(layer))
        with torch.set_grad_enabled(how == "gradients"):
            model(torch.randn(3, 8))
        assert seen == [True] * 8 and all(all(intercepted(each)) for each in model.layers)
        for layer in model.layers:
            layer.meanwhile = lambda layer: None
        monkeypatch.setattr("tiermem.nn.wrap.scope.other_threads", lambda: 0)
        with torch.no_grad():
            model(torch.randn(3, 8))
        assert not any(any(intercepted(each)) for each in model.layers)


@pytest.mark.parametrize("hbm", [2 * 4096, 6 * 4096], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer.last(layer.first(x)),
        lambda layer, x: nn.functional.linear(x, layer.first.weight) * layer.last.weight.sum(),
        lambda layer, x: next(layer.parameters()) * 2,
    ],
    ids=["modules", "weights", "a weight kept"],
)
def test_modules_called_by_themselves_are_right_and_intercepted_again(
    monkeypatch: pytest.MonkeyPatch, hbm: int, use: Callable[[Layer, torch.Tensor], torch.Tensor]
) -> None:
    monkeypatch.setattr("tiermem.nn.wrap.scope.other_threads", lambda: 0)
    x = torch.randn(3, 8)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    with tiermem.TierManager("cpu", hbm=hbm, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{i}" for i in range(4)])
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
            for mine, theirs in zip(model.layers, plain.layers, strict=True):
                assert not any(intercepted(mine))
                assert torch.equal(use(mine, x), use(theirs, x))
                assert all(intercepted(mine))


def test_calls_of_recurrent_modules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use their weights by a list, where nobody sees it."""
    monkeypatch.setattr("tiermem.nn.wrap.scope.other_threads", lambda: 0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)) for _ in range(2)])
    with tiermem.TierManager("cpu", hbm=1 << 16, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=["0", "1"])
        for layer in model:
            layer(torch.randn(3, 8))
            assert all(isinstance(m.__dict__.get(CALL), CallInterceptor) for m in layer)


def test_calls_are_back_as_soon_as_another_thread_comes_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 8)
    with wrapped(monkeypatch) as (model, _), torch.no_grad():
        layer = model.layers[0]
        seen: list[list[bool]] = []
        found: list[torch.Tensor] = []

        def beside(layer: Layer) -> None:
            layer.meanwhile = lambda layer: None

            def run() -> None:
                with torch.no_grad():
                    found.append(layer(x))

            thread = threading.Thread(target=run)
            seen.append(intercepted(layer))
            thread.start()
            thread.join()
            seen.append(intercepted(layer))

        layer.meanwhile = beside
        alone = layer(x)
        assert seen == [[False, False], [True, True]] and torch.equal(found[0], alone)
        layer(x)
        assert not any(intercepted(layer))


class Slow(nn.Linear):
    """Stops before it uses its weight, where the test says so."""

    stop: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stop()
        return super().forward(x)


@pytest.mark.parametrize("unwrap", [False, True])
def test_a_thread_that_came_in_unseen_keeps_its_block(
    monkeypatch: pytest.MonkeyPatch, unwrap: bool
) -> None:
    """Its call was not intercepted, and what it uses is held by another thread just then."""
    x = torch.randn(3, 8)
    reached, go_on = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def stop() -> None:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert go_on.wait(60)

    with wrapped(monkeypatch) as (model, tier), torch.no_grad():
        layer = model.layers[0]
        layer.first.__class__, layer.first.stop = Slow, stop
        (group,) = layer.__dict__[CALL].scope.groups
        expected = model(x)
        inner = layer.first(x)
        model(x)
        assert not any(intercepted(layer))

        def call() -> None:
            with torch.no_grad():
                results.append(layer.first(x))

        other = threading.Thread(target=call)
        other.start()
        assert reached.wait(60)
        monkeypatch.setattr("tiermem.nn.wrap.scope.other_threads", lambda: 1)
        assert torch.equal(model(x), expected)
        assert group.holds == 1 and all(intercepted(layer))
        assert torch.equal(model(x), expected) and group.holds == 1
        go_on.set()
        other.join()
        assert torch.equal(results[0], inner)
        if unwrap:
            tier.unwrap(model)
        assert torch.equal(model(x), expected) and group.holds == 0


def test_a_call_that_somebody_else_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(monkeypatch) as (model, _), torch.no_grad():
        inner = model.layers[0].first
        calls: list[int] = []
        ours = inner.__dict__[CALL]

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        inner.__dict__[CALL] = theirs
        for count in (1, 2):
            model(torch.randn(3, 8))
            assert calls == [1] * count and inner.__dict__[CALL] is theirs
        inner.__dict__[CALL] = ours
        model(torch.randn(3, 8))
        inner.__dict__[CALL] = theirs
        model.layers[0].last(torch.randn(3, 8))
        assert all(intercepted(model.layers[0])[1:]) and inner.__dict__[CALL] is theirs


def test_a_copy_made_in_the_middle_of_forward_is_a_plain_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 8)
    with wrapped(monkeypatch) as (model, _), torch.no_grad():
        layer = model.layers[0]
        copies: list[Layer] = []

        def copy(layer: Layer) -> None:
            layer.meanwhile = lambda layer: None
            copies.append(deepcopy(layer))

        layer.meanwhile = copy
        found = layer(x)
        assert not any(
            isinstance(m.__dict__.get(CALL), CallInterceptor) for m in copies[0].modules()
        )
        assert torch.equal(copies[0](x), found)
        nn.init.zeros_(copies[0].last.weight)
        assert torch.equal(layer(x), found)


def test_a_module_compiled_in_the_middle_of_forward_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 8)
    monkeypatch.setattr(torch, "compile", lambda plain, **_: plain)  # what counts is who is called
    with wrapped(monkeypatch) as (model, _), torch.no_grad():
        layer = model.layers[0]
        before = layer(x)

        def compile_first(layer: Layer) -> None:
            layer.meanwhile = lambda layer: None
            layer.first.compile()

        layer.meanwhile = compile_first
        assert torch.equal(layer(x), before)
        call = layer.first.__dict__[CALL]
        assert isinstance(call, CallInterceptor) and call.compiled is not None
        assert torch.equal(layer(x), before) and layer.first.__dict__[CALL] is call
