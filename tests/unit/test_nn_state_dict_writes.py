"""Values of ``state_dict()`` are copies: who writes to them is told so once."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

X = torch.ones(2, 16)


@pytest.fixture
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    with tiermem.TierManager("cpu", hbm="64KiB", dram="8MiB") as tier:
        net.tier = tier
        yield tier.wrap(net)


def _copy(model: Any) -> None:
    model.state_dict()["0.weight"].copy_(torch.zeros(16, 16))


def _scale_all(model: Any) -> None:
    for value in model.state_dict().values():
        value.mul_(2)


def _foreach(model: Any) -> None:
    torch._foreach_zero_([v for v in model.state_dict().values() if v.is_floating_point()])


def _part(model: Any) -> None:
    model[2].state_dict()["weight"][0].zero_()


def _running(model: Any) -> None:
    model.state_dict()["1.running_mean"].zero_()


def _step(model: Any) -> None:
    optimizer = model.tier.optimizer(model, torch.optim.SGD, lr=0.1)
    optimizer.step()


@pytest.mark.parametrize("use", [lambda model: model(X), lambda model: model[0](X), _step])
@pytest.mark.parametrize("write", [_copy, _scale_all, _foreach, _part, _running])
def test_a_write_is_told_of_once(
    model: Any, write: Callable[[Any], None], use: Callable[[Any], object]
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write(model)
    with pytest.warns(UserWarning, match=r"was written in place, which does not change the model"):
        use(model)
    if use is not _step:
        weights = {name for name, _ in model.named_parameters()}
        assert all(torch.equal(before[name], model.state_dict()[name]) for name in weights)
    write(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def test_a_warning_that_is_an_error_leaves_everything_in_order(model: Any) -> None:
    expected = model(X)
    _copy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="was written in place"):
            model(X)
        assert not model.tier._manager.gate.torn
        assert torch.equal(model(X), expected)


def test_what_is_only_read_is_not_told_of(model: Any) -> None:
    kept = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            model(X)
            model.load_state_dict(kept)
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            for value in kept.values():
                value.zero_()


def test_one_that_is_kept_is_looked_at_now_and_then(model: Any) -> None:
    kept = model.state_dict()
    model(X)
    kept["2.bias"].add_(1)
    with pytest.warns(UserWarning, match=r"state_dict\(\)\['2.bias'\]"):
        for _ in range(16):
            model(X)


def test_nothing_is_kept_alive(model: Any) -> None:
    copies = [weakref.ref(value) for value in model.state_dict().values()]
    model(X)
    gc.collect()
    assert not any(copy() is not None for copy in copies)


def test_what_is_large_is_not_held_until_then(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr("tiermem.nn.passes.givenstates._HELD", 100)
    state = model.state_dict()
    large = weakref.ref(state["0.weight"])
    del state
    gc.collect()
    assert large() is None


class _Outer(nn.Module):
    """Has a wrapped model inside, and loads it with the rest of its own state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _load_all(model: Any) -> None:
    state = model.state_dict()
    for value in state.values():
        value.mul_(2)
    model.load_state_dict(state)


def _load_some(model: Any) -> None:
    state = model.state_dict()
    state["0.weight"].fill_(0.5)
    model.load_state_dict({name: state[name] for name in ("0.weight", "2.bias")}, strict=False)


def _load_part(model: Any) -> None:
    state = model[2].state_dict()
    state["weight"].copy_(torch.eye(16))
    model[2].load_state_dict(state)


def _load_outside(model: Any) -> None:
    outer = _Outer(model)
    state = outer.state_dict()
    state["inner.0.weight"].neg_()
    outer.load_state_dict(state)


@pytest.mark.parametrize("write", [_load_all, _load_some, _load_part, _load_outside])
def test_what_is_written_and_loaded_then_is_not_told_of(
    model: Any, write: Callable[[Any], None]
) -> None:
    plain = copy.deepcopy(model)
    write(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(model)
        assert torch.equal(model(X), plain(X))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_what_is_written_after_it_was_loaded_is_told_of(model: Any) -> None:
    state = model.state_dict()
    state["0.weight"].mul_(2)
    model.load_state_dict(state)
    state["0.weight"].mul_(2)
    with pytest.warns(UserWarning, match=r"state_dict\(\)\['0.weight'\]"):
        model(X)


def test_what_was_written_and_is_not_loaded_is_told_of(model: Any) -> None:
    state = model.state_dict()
    state["0.weight"].mul_(2)
    model.load_state_dict({"2.bias": state["2.bias"]}, strict=False)
    with pytest.warns(UserWarning, match=r"state_dict\(\)\['0.weight'\]"):
        model(X)
