"""Models with stacked experts that are told what to choose, resident and in the tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import tiermem

EXPERTS, WIDTH, INNER, LAYERS = 8, 16, 64, 3
ROW = WIDTH * INNER * 4
LAYER = 2 * EXPERTS * ROW
SEAT = 4096


class Experts(nn.Module):
    """As in transformers, with the plain loop."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for expert in torch.unique(index):
            tokens, place = torch.where(index == expert)
            y = functional.linear(x[tokens], self.up[expert]).relu()
            y = functional.linear(y, self.down[expert]) + self.bias[expert]
            found.index_add_(0, tokens, y * weight[tokens, place, None])
        return found


class Listed(Experts):
    """Copies of the rows of all chosen pairs."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pairs = index.reshape(-1)
        many = x.repeat_interleave(index.shape[1], 0)[:, :, None]
        y = torch.bmm(self.down[pairs], torch.bmm(self.up[pairs], many).relu())[:, :, 0]
        y = (y + self.bias[pairs]) * weight.reshape(-1, 1)
        return y.view(*index.shape, WIDTH).sum(1)


class Model(nn.Module):
    """Layers that are told what to choose."""

    def __init__(self, kind: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.experts = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
        for inner, experts, index in zip(self.inner, self.experts, chosen, strict=True):
            x = inner(x)
            weight = x[:, : index.shape[1]].softmax(-1)
            x = x + experts(x, index, weight)
        return x


LEAST = LAYER + 8 * SEAT


@contextmanager
def twins(
    kind: type[nn.Module] = Experts, hbm: int = LEAST, **options: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a model in the tiers, an ordinary one with the same weights, and the front."""
    torch.manual_seed(0)
    model = Model(kind)
    torch.manual_seed(0)
    plain = Model(kind)
    with tiermem.TierManager("cpu", hbm=hbm, dram=4 << 20, **options) as tier:
        yield tier.wrap(model), plain, tier


def choose(tokens: int, seed: int, among: int = EXPERTS, of: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(LAYERS, tokens, among, generator=generator).argsort(-1)
    return list(order[..., :of])


def states(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
