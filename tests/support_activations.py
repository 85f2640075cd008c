"""A small net with several ways to be checkpointed, and what saved tensors are checked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support_nn import check_table, same_bits, seed
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tiermem

HOMES = ["dram", "nvme"]
WIDTH = 32
ROWS = 32  # WIDTH * ROWS floats are one page, so that all of it goes to a file


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers, each by itself or in a checkpoint of one of the two kinds."""

    def __init__(self, layers: int = 6, mode: str = "plain") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.mode == "region":
            return checkpoint(self.through, x, use_reentrant=False)
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "plain":
            return layer(x)
        if self.mode == "selective":
            return checkpoint(
                layer,
                x,
                use_reentrant=False,
                context_fn=partial(
                    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
                ),
            )
        return checkpoint(layer, x, use_reentrant=self.mode == "reentrant")


def manager(home: str, folder: Path | None = None, **options: Any) -> tiermem.TierManager:
    options = {"hbm": "1MiB", "dram": "16MiB", "activation_min": 1, **options}
    return tiermem.TierManager(
        "cpu",
        nvme=folder,
        policy=tiermem.Policy("dram", "dram", "dram", "dram", activations=home),
        **options,
    )


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    seed(0)
    first = build()
    seed(0)
    return first, build()


def data(number: int = 0) -> torch.Tensor:
    seed(number + 100)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def check_gradients(plain: nn.Module, model: nn.Module) -> None:
    ours = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert same_bits(param.grad, ours[name].grad.clone()), name


def check_empty(tier: tiermem.TierManager) -> None:
    """Nothing that was saved is anywhere any more; garbage is not collected for it."""
    store = tier._runtime.activations.store
    assert store is not None
    store.reap()
    assert store.pool.used == 0 == tier.stats().activations.used
    assert not store._order and not store._held and not store._fetched
    assert store._held.nbytes == store._fetched.nbytes == 0
    assert not [row for row in tier.residency() if row.role == "activation"]
    check_table(tier)
