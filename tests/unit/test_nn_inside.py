"""Calls of modules below a held block make way for a forward, and are back wherever it matters."""

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
from tiermem.nn.scope import CallInterceptor

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
def wrapped(monkeypatch: pytest.MonkeyPatch, threads: int = 1) -> Iterator[tuple[Any, Any]]:
    """Yields a model in the tiers, one block a layer, and the manager's front."""
    monkeypatch.setattr("tiermem.nn.scope.active_count", lambda: threads)
    model = Model()
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier:
        yield tier.wrap(model, blocks=[f"layers.{i}" for i in range(4)]), tier


def intercepted(layer: Layer) -> list[bool]:
    return [isinstance(m.__dict__.get(CALL), CallInterceptor) for m in (layer.first, layer.last)]


def test_calls_make_way_for_a_forward_and_are_back_after_it(
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
        assert all(all(intercepted(each)) for each in model.layers)
        layer.meanwhile = lambda layer: 1 / 0
        with pytest.raises(ZeroDivisionError):
            model(x)
        assert all(all(intercepted(each)) for each in model.layers)
        layer.meanwhile = lambda layer: None
        tier.unwrap(model)
        assert all(CALL not in module.__dict__ for module in model.modules())
        assert torch.equal(model(x), found)


@pytest.mark.parametrize(("threads", "grad"), [(2, False), (1, True)], ids=["threads", "grad"])
def test_calls_stay_where_they_have_something_to_add(
    monkeypatch: pytest.MonkeyPatch, threads: int, grad: bool
) -> None:
    with wrapped(monkeypatch, threads) as (model, _), torch.set_grad_enabled(grad):
        seen: list[bool] = []
        for layer in model.layers:
            layer.meanwhile = lambda layer: seen.extend(intercepted(layer))
        model(torch.randn(3, 8))
        assert seen == [True] * 8


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
        assert all(intercepted(layer))
        layer(x)
        assert all(intercepted(layer))


def test_a_call_that_somebody_else_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(monkeypatch) as (model, _), torch.no_grad():
        inner = model.layers[0].first
        calls: list[int] = []
        ours = inner.__dict__[CALL]

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        inner.__dict__[CALL] = theirs
        model(torch.randn(3, 8))
        assert calls == [1] and inner.__dict__[CALL] is theirs
        inner.__dict__[CALL] = ours


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
