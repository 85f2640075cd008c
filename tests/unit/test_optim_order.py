"""The state shows its parameters in the order in which torch's does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

LAYERS, WIDTH = 6, 64
GIVEN = 3, 0, 5, 1, 4, 2  # the layers in the order in which optimizers get them
NBYTES = LAYERS * WIDTH * WIDTH * 4
OVERLAPS = [False, "auto", "forward", "backward"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def weights(model: nn.Sequential) -> list[nn.Parameter]:
    return [model[place].weight for place in GIVEN]


class Two:
    """A plain model and one in the tiers, with an optimizer each; weights by their number there."""

    def __init__(self, overlap: Any, cls: Any = torch.optim.AdamW) -> None:
        self.tier = tiermem.TierManager("cpu", hbm=NBYTES, dram="16MiB")
        plain, own = layers(), self.tier.wrap(layers())
        self.models = [plain, own]
        self.optimizers = [
            cls(weights(plain), lr=0.01),
            self.tier.optimizer(weights(own), cls, lr=0.01, overlap=overlap),
        ]

    def train(self, *frozen: int, times: int = 1) -> None:
        for number in range(times):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                for place, weight in enumerate(weights(model)):
                    weight.requires_grad_(place not in frozen)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    def orders(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the parameters' numbers in the state, and in the state dict."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            numbers = {param: number for number, param in enumerate(weights(model))}
            shown = [numbers[param] for param in optimizer.state]
            yield shown, list(optimizer.state_dict()["state"])

    def check(self, expected: Sequence[int]) -> None:
        for shown, saved in self.orders():
            assert shown == saved == list(expected)

    def pop(self, *numbers: int) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for number in numbers:
                optimizer.state.pop(weights(model)[number])


@pytest.fixture(params=OVERLAPS)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    found = Two(request.param)
    with found.tier:
        yield found


def test_parameters_that_are_thawed_come_last(two: Two) -> None:
    two.train(1, 3)
    two.train(1)
    two.train()
    two.check([0, 2, 4, 5, 3, 1])
    two.train()
    two.check([0, 2, 4, 5, 3, 1])


def test_thawed_once_the_loop_is_known(two: Two) -> None:
    two.train(0, 4, times=6)
    two.train(4, times=3)
    two.train(times=3)
    two.check([1, 2, 3, 5, 0, 4])


def test_state_that_was_deleted_comes_last(two: Two) -> None:
    two.train(times=3)
    two.pop(4, 1)
    two.check([0, 2, 3, 5])
    two.train(times=2)
    two.check([0, 2, 3, 5, 1, 4])


def test_state_that_users_put_there(two: Two) -> None:
    two.train(2)
    for model, optimizer in zip(two.models, two.optimizers, strict=True):
        for number in (5, 0):
            weight = weights(model)[number]
            optimizer.state[weight] = optimizer.state.pop(weight)
    two.check([1, 3, 4, 5, 0])
    two.train()
    two.check([1, 3, 4, 5, 0, 2])


def test_a_loaded_state(two: Two) -> None:
    two.train(1)
    for optimizer in two.optimizers:
        found = optimizer.state_dict()
        order = [5, 3, 0, 4, 2]
        optimizer.load_state_dict({**found, "state": {n: found["state"][n] for n in order}})
    two.check(order)
    two.train(times=2)
    two.check([*order, 1])


def test_a_checkpoint(two: Two, tmp_path: Path) -> None:
    two.train(1)
    two.train()
    two.tier.save(tmp_path / "run")
    two.pop(0, 2)
    two.train()
    two.check([3, 4, 5, 1, 0, 2])
    two.tier.load(tmp_path / "run")
    assert list(two.orders())[1][1] == [0, 2, 3, 4, 5, 1]


def test_state_of_a_class_that_makes_all_of_it_at_once() -> None:
    two = Two("auto", torch.optim.Adagrad)
    with two.tier:
        two.check(range(LAYERS))
        two.train(1)
        two.train()
        two.check(range(LAYERS))


def test_an_exception_while_it_is_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(False)
    with two.tier:
        two.train(1)
        two.train()
        optimizer = two.optimizers[1]
        order, calls = optimizer._units.order, [False, True]
        put_back = order._put_back

        def interrupted() -> None:
            if calls.pop(0):
                assert not order._state
                raise KeyboardInterrupt
            put_back()

        with monkeypatch.context() as patch:
            patch.setattr(order, "_put_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                _ = optimizer.state
        two.train()
        two.check([0, 2, 3, 4, 5, 1])
