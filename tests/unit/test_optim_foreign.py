"""Which code wrote a weight: an optimizer's step, or other code that its master has to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem

WIDTH = 64


class Stack(nn.Module):
    """Layers under recomputation, whose last operation has the weight at hand meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(self.linear(), nn.Tanh(), self.linear()) for _ in range(4)
        )

    @staticmethod
    def linear() -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@contextmanager
def trained(
    where: str, hbm: str = "128KiB", overlap: Any = "backward"
) -> Iterator[tuple[tiermem.TierManager, Stack, tiermem.TieredOptimizer]]:
    torch.manual_seed(0)
    model = Stack().to(torch.bfloat16)
    policy = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB", policy=policy) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(
            model,
            torch.optim.AdamW,
            master_dtype=torch.float32,
            where=where,
            overlap=overlap,
            lr=0.01,
        )
        yield tier, model, optimizer


def step(model: Stack, optimizer: tiermem.TieredOptimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, WIDTH, generator=generator).to(torch.bfloat16).requires_grad_()
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_recomputation_writes_no_weights() -> None:
    """Steps on the host: what goes down is the gradients, to the byte."""
    with trained("host") as (tier, model, optimizer):
        for _ in range(4):
            step(model, optimizer)
        optimizer.finish()
        tier.reset_stats()
        for _ in range(3):
            step(model, optimizer)
        optimizer.finish()
        manager = tier._manager
        gradients = sum(
            record.block.nbytes
            for record in manager.parts.table
            if record.block.role.value == "grad"
        )
        assert tier.stats().links["hbm->dram"].nbytes == 3 * gradients


def looks(model: Stack, optimizer: tiermem.TieredOptimizer) -> list[bool]:
    """Makes a step; returns for each unit whether its masters followed their weights."""
    found = []
    for unit in optimizer._units:
        look = unit.foreign.look

        def seen(look: Callable[[], bool] = look) -> bool:
            found.append(look())
            return found[-1]

        unit.foreign.look = seen  # type: ignore[method-assign]
    try:
        step(model, optimizer)
        optimizer.finish()
    finally:
        for unit in optimizer._units:
            del unit.foreign.look
    assert len(found) == len(optimizer._units)
    return found


def value_of(weight: nn.Parameter) -> torch.Tensor:
    """Returns a copy; an alias, through which it might be written, would count as a write."""
    with torch.no_grad():
        return weight.clone()


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def by_data(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def through_a_view(weight: nn.Parameter) -> None:
    view = weight.detach()[3]
    view.mul_(2)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("write", [in_place, by_data, through_a_view])
def test_masters_follow_what_others_write_and_nothing_else(
    where: str, write: Callable[[nn.Parameter], None]
) -> None:
    with trained(where) as (_, model, optimizer):
        for _ in range(4):
            step(model, optimizer)
        optimizer.finish()
        assert not any(looks(model, optimizer))
        weight = model.layers[2][0].weight
        before = value_of(weight)
        write(weight)
        expected = before.clone()
        expected[3 if write is through_a_view else slice(None)] *= 2
        assert torch.equal(value_of(weight), expected)
        followed = looks(model, optimizer)
        assert any(followed) and not all(followed)
        # a step of 0.01 moves no weight far from what was written
        assert torch.allclose(value_of(weight).float(), expected.float(), atol=0.05)
        assert not any(looks(model, optimizer))


def test_a_step_on_the_host_that_is_given_up_leaves_writes_to_be_followed() -> None:
    """It has looked for them, and its masters have not followed."""
    with trained("host", overlap=False) as (_, model, optimizer):
        for _ in range(4):
            step(model, optimizer)
        weight = model.layers[2][0].weight
        expected = value_of(weight) * 2
        (unit,) = [u for u in optimizer._units if any(p is weight for p, _ in u.members)]
        update = unit.host.update

        def fail(*_: Any) -> None:
            del update.update
            raise MemoryError

        in_place(weight)
        update.update = fail
        with pytest.raises(tiermem.StepError, match="MemoryError"):
            step(model, optimizer)
        optimizer.abandon_step()
        optimizer.zero_grad()
        step(model, optimizer)
        assert torch.allclose(value_of(weight).float(), expected.float(), atol=0.05)
