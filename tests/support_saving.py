"""A run that draws from every generator, saved under one setup and gone on with under another."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_ahead import DROPS
from support_nn import assert_same, leaves, seed
from support_optim import Twins
from torch import nn

import tiermem
from tiermem.nn.tensors.lazy import is_gone
from tiermem.optim.units.parted import PartedUnit
from tiermem.saving import later

WIDTH, TOKENS = 24, 150


class Layer(nn.Module):
    """Buffers of both kinds, a dropout, and a norm that stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float32)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        y = self.norm(x.float() - self.mean).to(x.dtype)
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(y))), 0.1)


class Net(nn.Module):
    """An embedding that the head shares, layers, and a part that a step may not use."""

    def __init__(self, dtype: torch.dtype = torch.float32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        for layer in self.layers:
            layer.up.to(dtype)
            layer.down.to(dtype)
        self.extra = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.extra(x) if use_extra else x)


def backward(model: nn.Module) -> float:
    """One backward over data drawn from all three generators."""
    ids = torch.randint(0, TOKENS, (2, 6))
    scale = random.random() + np.random.random()
    logits = model(ids[:, :-1], random.random() < 0.7).float() * scale
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item()


@dataclass
class Setup:
    """How a run is set up; two runs may differ in what does not change any bit."""

    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    blocks: Any = "auto"
    hbm: int = 96 << 10
    policy: Any = None
    nvme: str | None = None
    dram: int = 4 << 20


class Run:
    """A model in the tiers with its optimizer and a schedule."""

    def __init__(self, setup: Setup, number: int = 0) -> None:
        seed(number)
        self.tier = tiermem.TierManager(
            device="cpu", hbm=setup.hbm, dram=setup.dram, nvme=setup.nvme, policy=setup.policy
        )
        try:
            self.model = self.tier.wrap(Net(setup.dtype), setup.blocks)
            self.optimizer = self.tier.optimizer(
                groups(self.model, setup.settings), setup.cls, **setup.settings, **setup.options
            )
        except BaseException:
            self.tier.close(discard=True)
            raise
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close(discard=True)

    def step(self) -> float:
        """One step from clean gradients, with the schedule."""
        self.optimizer.zero_grad()
        return self.end(backward(self.model))

    def end(self, loss: float) -> float:
        """The step of gradients that are there."""
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def save(self, path: Path, **options: Any) -> Any:
        """Saves the run."""
        extra = {"scheduler": self.scheduler.state_dict()}
        return self.tier.save(path, extra, **options)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint."""
        self.scheduler.load_state_dict(self.tier.load(path)["scheduler"])

    @property
    def in_parts(self) -> bool:
        """Whether any parameter is stepped in parts."""
        units = self.optimizer.contents("a test").units
        return any(isinstance(unit, PartedUnit) for unit in units)

    def state(self) -> list[tuple[str, Any]]:
        """Everything there is, tensors copied."""
        params = self.model.named_parameters()
        gradients = {n: p.grad for n, p in params if p.grad is not None and not is_gone(p.grad)}
        buffers = dict(self.model.named_buffers())
        whole = [self.model.state_dict(), self.optimizer.state_dict(), gradients, buffers]
        return [
            (path, v.detach().clone() if isinstance(v, torch.Tensor) else v)
            for path, v in leaves(whole)
        ]


def groups(model: nn.Module, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Matrices and vectors apart; the former with a rate of their own."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": settings["lr"] / 2},
        {"params": [p for p in params if p.dim() <= 1]},
    ]


@contextmanager
def nothing_is_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While a save begins and goes on: nothing is written before the end, or copied unasked."""
    begins, save_one = threading.Event(), later.SaveHandle._save

    def slow(self: later.SaveHandle, entry: Any) -> None:
        begins.wait()
        save_one(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(later.SaveHandle, "_make_room", lambda self: None)
        patch.setattr(later.SaveHandle, "_copy_ahead", lambda self: None)
        patch.setattr(later.SaveHandle, "_save", slow)
        try:
            yield
        finally:
            begins.set()


def scribble(tier: tiermem.TierManager) -> None:
    """Overwrites all DRAM that is nobody's."""
    homes = tier._manager.parts.homes
    for gap in homes.dram.gaps():
        homes.arena.bytes_of(gap).fill_(0xEE)


def save_during(
    make: Callable[[], Twins], path: Path, do: Callable[[Twins], Any], patch: pytest.MonkeyPatch
) -> None:
    """Saves a pair's state while something is done to it; compares what is loaded.

    Args:
        make: Makes the pair, and another one that loads.
        path: Of the checkpoint.
        do: What is done between the call and the end of the save.
        patch: Holds the threads of the save back meanwhile.
    """
    with make() as pair:
        expected = deepcopy([dict(pair.plain.state_dict()), pair.by_hand.state_dict()])
        with nothing_is_copied_ahead(patch):
            handle = pair.tier.save(path, wait=False)
            do(pair)
            scribble(pair.tier)
        handle.result()
    with make() as other:
        other.tier.load(path)
        assert_same(expected[0], dict(other.model.state_dict()), "weights")
        assert_same(expected[1], other.optimizer.state_dict(), "optimizer")


def _steps(pair: Twins) -> None:
    for number in range(3):
        pair.backward(number)
        pair.step()


def _dropped(drop: Callable[[Twins], Any]) -> Callable[[Twins], None]:
    def do(pair: Twins) -> None:
        pair.backward(7)
        pair.step()
        pair.backward(8)
        drop(pair)
        scribble(pair.tier)
        pair.step()

    return do


def _closed(pair: Twins) -> None:
    pair.backward(7)
    pair.step()
    pair.backward(8)
    pair.optimizer.close()


def _left(pair: Twins) -> None:
    pair.backward(7)
    pair.step()
    pair.backward(8)
    pair.tier.unwrap(pair.model)
    pair.optimizer._timing.ahead.provisional._shadows.forget_removed()


def _room_for_a_home(pair: Twins) -> None:
    pair.backward(7)
    pair.step()
    assert pair.tier._manager.parts.homes._reclaim()


DURING: dict[str, Callable[[Twins], Any]] = {
    "steps": _steps,
    "the optimizer is closed": _closed,
    "shadows are given up": _room_for_a_home,
    "the model leaves": lambda pair: pair.tier.unwrap(pair.model),
    "the model leaves after a step": _left,
    **{name: _dropped(drop) for name, drop in DROPS.items()},
}
