"""A training loop with the defaults whose steps leave their state by turns, and a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support_nn import assert_same
from torch import nn

import tiermem

WIDTH, LAYERS = 64, 12
NBYTES = LAYERS * WIDTH * WIDTH * 4
ADAMW = (torch.optim.AdamW, {"lr": 0.01})


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class Pair:
    """A plain training loop and one in the tiers, with the defaults."""

    def __init__(
        self,
        cls: Any = ADAMW[0],
        settings: Any = ADAMW[1],
        dram: int = 16 << 20,
        hbm: int = NBYTES * 2 // 3,
    ) -> None:
        self.plain = layers()
        self.own = cls(self.plain.parameters(), **settings)
        self.tier = tiermem.TierManager("cpu", hbm=hbm, dram=dram)
        self.model = self.tier.wrap(layers())
        self.optimizer = self.tier.optimizer(self.model, cls, **settings)
        self.number = 0

    @property
    def ahead(self) -> Any:
        return self.optimizer._timing.ahead

    @property
    def late(self) -> list[str]:
        """Names of the units whose state is late."""
        return [unit.name for unit in self.optimizer._units if unit.late is not None]

    def backward(self) -> None:
        self.number += 1
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.number))
        losses = []
        for model in (self.plain, self.model):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert_same(*losses, "loss")

    def step(self, times: int = 1, *, clear: bool = True) -> None:
        for _ in range(times):
            self.backward()
            for optimizer in (self.own, self.optimizer):
                optimizer.step()
                if clear:
                    optimizer.zero_grad()

    def check(self) -> None:
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        assert_same(self.own.state_dict()["state"], self.optimizer.state_dict()["state"], "state")


@contextmanager
def pair_of(*arguments: Any, **options: Any) -> Iterator[Pair]:
    found = Pair(*arguments, **options)
    try:
        yield found
    finally:
        found.tier.close()
