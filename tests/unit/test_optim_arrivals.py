"""Gradients of one block in any order and number: its step is made once the last has arrived."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from support_nn import Tiers
from support_optim import Net, Twins, made, watched
from torch import nn

from tiermem.nn.tensors.lazy import LazyTensor

ORDERS = [order for size in (1, 2, 3) for order in permutations("abc", size)]


class Branches(nn.Module):
    """Three linear maps, of which some are used, in an order that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.order = "abc"
        self.parts = nn.ModuleDict({name: nn.Linear(24, 24) for name in "abc"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = x + torch.tanh(self.parts[name](x))
        return x


class Branching(Net):
    """Some layers have branches."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.layers.extend(Branches().to(torch.bfloat16) for _ in range(2))

    def use(self, order: tuple[str, ...]) -> None:
        for layer in self.layers:
            if isinstance(layer, Branches):
                layer.order = "".join(order)


def taking_part(pair: Twins) -> tuple[int, int]:
    """How many units have a gradient, used up or not, and how many parameters."""
    members = [[p.grad is not None for p, _ in unit.members] for unit in pair.optimizer._units]
    return sum(map(any, members)), sum(map(sum, members))


@pytest.mark.parametrize("shift", [1, 4, 7])
def test_branches_that_change_from_step_to_step(shift: int) -> None:
    tiers = Tiers("dram")
    with watched(
        Twins(Branching, tiers, overlap="backward", blocks=[f"layers.{i}" for i in range(3)])
    ) as pair:
        parts: set[int] = set()
        for number in range(len(ORDERS)):
            order = ORDERS[(shift * number) % len(ORDERS)]
            for model in (pair.plain, pair.model):
                assert isinstance(model, Branching)
                model.use(order)
            pair.backward(number)
            units, params = taking_part(pair)
            parts.add(params)
            assert made(pair) == units
            pair.step()
            pair.check()
        assert len(parts) == 3


@pytest.mark.parametrize("where", ["device", "host"])
def test_who_keeps_the_state_sees_it_as_it_is(where: str) -> None:
    tiers = Tiers("dram")
    with watched(Twins(Net, tiers, overlap="backward", where=where)) as pair:
        param = pair.optimizer.param_groups[0]["params"][3]
        state = pair.optimizer.state[param]
        kept = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
        assert all(isinstance(value, LazyTensor) for value in kept.values())
        for number in range(3):
            was = {key: value.clone() for key, value in kept.items()}
            pair.backward(number)
            pair.step()
            now = pair.optimizer.state_dict()["state"][3]
            for key, value in kept.items():
                assert torch.equal(value, now[key])
                assert not torch.equal(value, was[key])


def test_writes_through_a_view_of_the_state_are_taken_up() -> None:
    with watched(Twins(Net, Tiers("dram"), overlap="backward")) as pair:
        param = pair.optimizer.param_groups[0]["params"][3]
        theirs = pair.by_hand.optimizer.state[pair.by_hand.masters[3]]["exp_avg"]
        view = pair.optimizer.state[param]["exp_avg"][0]
        for values in (view, theirs[0]):
            values.fill_(0.5)
        for number in range(3):
            pair.backward(number)
            pair.step()
            pair.check()
            for values in (view, theirs[0]):
                values.fill_(number)
