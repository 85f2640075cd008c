"""Models in which one matrix, of a vocabulary, has most of the bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

ROWS, WIDTH, DEPTH = 1000, 32, 6
HEAD = ROWS * WIDTH * 4
LAYER = 4096 + 4096  # of a square layer and its bias, in whole pages
IDS = torch.arange(0, ROWS, 7)[None]


class Model(nn.Module):
    """A few small layers between an embedding and a head that may share its weight."""

    def __init__(self, embed: type[nn.Embedding], *, tied: bool, bias: bool) -> None:
        super().__init__()
        self.embed = embed(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, ROWS, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def inner(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(ids))
        return out


class Predictions(nn.Module):
    """The head of BERT and its kin: a layer, and a decoder whose bias is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, ROWS)
        self.bias = nn.Parameter(torch.randn(ROWS))
        self.decoder.bias = self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(torch.tanh(self.dense(x)))
        return out


class MaskedModel(Model):
    """A model with such a head, whose decoder has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding, tied=True, bias=False)
        self.head = nn.Sequential(Predictions())  # type: ignore[assignment]
        self.head[0].decoder.weight = self.embed.weight

    @property
    def decoder(self) -> nn.Linear:
        decoder: nn.Linear = self.head[0].decoder
        return decoder


class HandModel(Model):
    """A model that multiplies with a view of the embedding's weight itself."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(nn.Embedding, tied=True, bias=False)
        del self.head
        self.view = view

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) @ self.view(self.embed.weight)
