"""Shallow copies of wrapped modules are modules of their own, also before they are first called."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_nn import assert_same
from torch import nn

import tiermem

WIDTH = 32


class Layer(nn.Module):
    """A module inside and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inside(x) * self.scale
        return found


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)))


def by_attributes(module: Any) -> Any:
    """As libraries do that make a functional twin."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "attributes": by_attributes,
    "replica": lambda module: module._replicate_for_data_parallel(),
}


def changed(module: Any, make: Callable[[Any], Any]) -> Any:
    """Returns a copy that has another module inside, and another parameter."""
    copied = make(module)
    torch.manual_seed(1)
    copied._modules = {"inside": nn.Linear(WIDTH, WIDTH)}
    copied._parameters = {"scale": nn.Parameter(torch.full((WIDTH,), 3.0))}
    return copied


def saved(module: Any, make: Callable[[Any], Any]) -> Any:
    return changed(module, make).state_dict()


def loaded(module: Any, make: Callable[[Any], Any]) -> Any:
    copied = changed(module, make)
    values = {name: value + 1 for name, value in copied.state_dict().items()}
    copied.load_state_dict(values)
    return copied.state_dict()


def deeply_copied(module: Any, make: Callable[[Any], Any]) -> Any:
    copied = changed(module, make)
    copied.number = 5
    found = copy.deepcopy(copied)
    return [found.number, type(found).__name__, found.state_dict(), found(torch.ones(2, WIDTH))]


def copied_again(module: Any, make: Callable[[Any], Any]) -> Any:
    copied = changed(module, make)
    copied.number = 5
    found = copy.copy(copied)
    return [found.number, found.state_dict(), found(torch.ones(2, WIDTH))]


ACTS = [saved, loaded, deeply_copied, copied_again]


@pytest.fixture(params=["16KiB", "1MiB"])
def wrapped(request: pytest.FixtureRequest) -> Iterator[nn.Sequential]:
    with tiermem.TierManager("cpu", hbm=request.param, dram="16MiB") as tier:
        yield tier.wrap(layers())


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", COPIES)
def test_what_is_done_to_a_copy(act: Any, kind: str, wrapped: nn.Sequential) -> None:
    """It shows what the copy has, and leaves the module as it was."""
    plain, x = layers(), torch.ones(2, WIDTH)
    with torch.no_grad():
        expected, found = (act(model[1], COPIES[kind]) for model in (plain, wrapped))
        assert_same(expected, found, "copy")
        assert_same(dict(plain.state_dict()), dict(wrapped.state_dict()), "module")
        assert torch.equal(plain(x), wrapped(x))


def test_hooks_of_a_replica_are_its_own(wrapped: nn.Sequential) -> None:
    seen: list[bool] = []
    replica: Any = COPIES["replica"](wrapped[1])
    replica._forward_hooks = OrderedDict()
    replica.register_forward_hook(lambda module, *_: seen.append(module is replica))
    wrapped(torch.ones(2, WIDTH))
    assert not seen
    replica._parameters = {"scale": torch.ones(WIDTH)}
    replica(torch.ones(2, WIDTH))
    assert seen == [True]
