"""Views of an optimizer's state are live, as those of a plain optimizer's: both ways, at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

Use = Callable[[nn.Module, Any], Sequence[torch.Tensor]]
SIDES = pytest.mark.parametrize(
    ("where", "overlap"),
    [("device", False), ("device", True), ("device", "backward"), ("host", False), ("host", True)],
)


class Anew(torch.optim.Optimizer):
    """Momentum whose state is another tensor after every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state = self.state[param]
                    before = state.get("momentum", torch.zeros_like(param))
                    state["momentum"] = 0.9 * before + param.grad
                    param -= group["lr"] * state["momentum"]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()


def saved(optimizer: Any) -> list[torch.Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    return [value.clone() for _, state in states for _, value in sorted(state.items())]


def row_of(model: nn.Module, optimizer: Any) -> torch.Tensor:
    """Returns a view of some of the state of the first parameter."""
    row = next(iter(optimizer.state[next(model.parameters())].values()))[0]
    assert isinstance(row, torch.Tensor)
    return row


def follow(use: Use, where: Any, overlap: Any, cls: Any = None) -> None:
    """Does the same with a plain optimizer and with one in the tiers, and compares every bit."""

    def momentum(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    plain = build()
    expected = use(plain, (cls or momentum)(plain.parameters()))
    with tiermem.TierManager(
        device="cpu",
        hbm="40KiB",
        dram="4MiB",
        policy=tiermem.Policy(params="dram", grads="dram", optimizer="dram"),
    ) as tier:
        model = tier.wrap(build())
        settings = {} if cls else {"lr": 0.1, "momentum": 0.9, "foreach": False}
        optimizer = tier.optimizer(
            model, cls or torch.optim.SGD, where=where, overlap=overlap, **settings
        )
        found = use(model, optimizer)
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)


@SIDES
def test_what_is_written_through_a_view_is_saved(where: str, overlap: object) -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        train(model, optimizer)
        row_of(model, optimizer).fill_(3.0)
        return saved(optimizer)

    follow(use, where, overlap)


@SIDES
def test_a_view_shows_every_step_and_what_is_written_to_it_counts(
    where: str, overlap: object
) -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        train(model, optimizer)
        row, found = row_of(model, optimizer), []
        for _ in range(4):
            train(model, optimizer)
            found.append(row.clone())
            row.mul_(0.5)
        return [*found, *saved(optimizer)]

    follow(use, where, overlap)


def around(model: nn.Module, optimizer: Any, change: Callable[[], None]) -> list[torch.Tensor]:
    """Returns what a view shows before a change and after it, and what writing to it then does."""
    train(model, optimizer)
    row = row_of(model, optimizer)
    before = row.clone()
    change()
    found = [before, row.clone()]
    row.fill_(7.0)
    train(model, optimizer)
    return [*found, row, *saved(optimizer)]


@SIDES
def test_views_are_of_what_there_was_before_a_state_was_loaded(where: str, overlap: object) -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        train(model, optimizer)
        kept = copy.deepcopy(optimizer.state_dict())
        return around(model, optimizer, lambda: optimizer.load_state_dict(kept))

    follow(use, where, overlap)


@SIDES
def test_views_are_of_what_there_was_before_a_step_made_it_anew(
    where: str, overlap: object
) -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        return around(model, optimizer, lambda: train(model, optimizer))

    follow(use, where, overlap, Anew)
