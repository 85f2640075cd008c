"""Small models and loops that tests of integrations share; plain torch is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

WIDTH = 64
TOKENS = 16
BATCH = 4


class Layer(nn.Module):
    """A residual layer of two matrices and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return out


class Decoder(nn.Module):
    """An embedding, a list of layers, a norm and a head, named as models name them."""

    def __init__(self, layers: int = 8, width: int = WIDTH, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the head's input."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.norm(hidden)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, -2), tokens.roll(-1).flatten())


def decoder(layers: int = 8, **settings: int) -> Decoder:
    """Returns a model with weights drawn from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(layers, **settings)


def batches(steps: int, vocabulary: int = 32) -> Iterator[Tensor]:
    """Yields token ids, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(vocabulary, (BATCH, TOKENS), generator=generator)


def resident_losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    max_norm: float | None = 1.0,
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, tokens: model(tokens),
) -> list[float]:
    """Trains a resident model in plain torch; returns the losses."""
    losses = []
    for tokens in batches(steps):
        value = loss(model, tokens)
        value.backward()
        if max_norm is not None:
            # in the order of the groups: a norm of norms is rounded by it
            params = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def twin(model: nn.Module) -> nn.Module:
    """Returns a copy of a model that is not wrapped."""
    return copy.deepcopy(model)
