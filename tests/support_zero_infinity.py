"""A small model, batches, and the loops that a DeepSpeed script and plain torch make of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import tiermem.integrations.zero_infinity as deepspeed

TIGHT = {"device": "cpu", "hbm": "96KiB", "dram": "8MiB"}
"""Budgets in which layers travel."""

SHARES: dict[str, Any] = {
    "cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "none": {},
}


def config(**more: Any) -> dict[str, Any]:
    """A configuration of ZeRO-3 with everything on the host, and what else is given."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, **SHARES["cpu"]},
        "tiermem": TIGHT,
        **more,
    }


class Layer(nn.Module):
    """One layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3))).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same batch for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 32, generator=generator).to(dtype)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of one batch."""
    return (model(x) - x.flip(1)).float().square().mean()


@contextmanager
def started(settings: Any, model: nn.Module | None = None, **more: Any) -> Iterator[Any]:
    """Initializes an engine and gives it back in the end."""
    model = build() if model is None else model
    engine = deepspeed.initialize(model=model, config=settings, **more)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def losses_of(engine: Any, numbers: range, dtype: torch.dtype = torch.float32) -> list[float]:
    """A DeepSpeed loop over the batches of these numbers: its losses."""
    losses = []
    for number in numbers:
        loss = loss_of(engine, batch(number, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(engine: Any, count: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """The same over the first batches."""
    return losses_of(engine, range(count), dtype)


def plain(
    count: int,
    *,
    every: int = 1,
    clip: float = 1.0,
    dtype: torch.dtype = torch.float32,
    make: Any = None,
    schedule: Any = None,
) -> list[float]:
    """A resident loop: its losses. Masters are float32, and their gradients are clipped."""
    model = build().to(dtype)
    params = list(model.parameters())
    masters = params
    if dtype is not torch.float32:
        masters = [p.detach().float().requires_grad_() for p in params]
    make = make or (lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1))
    optimizer = make(masters)
    scheduler = None if schedule is None else schedule(optimizer)
    losses = []
    for number in range(count):
        loss = loss_of(model, batch(number, dtype))
        (loss / every).backward()
        losses.append(loss.item())
        if (number + 1) % every:
            continue
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad if master is param else param.grad.to(master.dtype)
        if clip:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.grad = None
                if master is not param:
                    param.copy_(master)
    return losses
