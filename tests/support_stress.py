"""Steps in random order, budgets, depths and homes, on a tiered model and its resident twin.

What differs is counted on the device, so that the host does not wait for a step before it
submits the next. On CUDA, copies and compute are late now and then, on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import asked
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiermem

WIDTH = 128 if torch.cuda.is_available() else 32  # a CPU takes three times as long for 128
_EPISODE = 100


class Layer(nn.Module):
    """Blocks of different sizes, so that free memory comes in pieces."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers, and a parameter of its own that is held all the while they come and go."""

    def __init__(self, inner: list[int]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, WIDTH))
        self.layers = nn.ModuleList(Layer(size) for size in inner)

    def forward(self, x: torch.Tensor, order: list[int], recompute: bool = False) -> torch.Tensor:
        x = x * self.scale[0]
        for index in order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x * self.scale[1]


class Broken(Exception):
    """Raised in the middle of a forward, on purpose."""


@dataclass(frozen=True)
class Episode:
    """What stays the same for some steps.

    Attributes:
        seed: Of the model, the inputs and the order of steps.
        inner: Sizes of the layers.
        room: HBM budget, in multiples of the largest layer; the least that works if more.
        depth: Prefetch depth.
        homes: Of weights, gradients, masters and optimizer state.
        late: Share of copies that are delayed.
    """

    seed: int
    inner: tuple[int, ...]
    room: float
    depth: int | str
    homes: tuple[str, str, str, str]
    late: float


def episode(seed: int) -> Episode:
    """Draws an episode."""
    draw = random.Random(seed)
    inner = tuple(draw.choice((64, 128, 256, 512)) for _ in range(draw.randrange(4, 10)))
    kinds = ("dram", "dram", "dram", "nvme") if draw.random() < 0.5 else ("dram",)
    return Episode(
        seed,
        inner,
        draw.choice((0.0, 0.0, draw.uniform(2, 6), draw.uniform(6, 14))),
        draw.choice((0, 1, 2, 5, "auto", "auto")),
        tuple(draw.choice(kinds) for _ in range(4)),  # type: ignore[arg-type]
        draw.choice((0.0, 0.2, 0.6)),
    )


class Late:
    """Makes copies and compute late, now and then.

    Args:
        seed: Of when.
        share: Of the copies.
        device: Nothing is late on the CPU.
    """

    def __init__(self, seed: int, share: float, device: str) -> None:
        self._draw = random.Random(seed)
        self._share = share
        self._on = device != "cpu"

    def sleep(self, share: float) -> None:
        """Keeps the current stream busy, up to 0.2 ms."""
        if self._on and self._draw.random() < share:
            torch.cuda._sleep(self._draw.randrange(20_000, 350_000))

    def copies(self, engine: Any) -> None:
        """Delays an engine's copies from now on."""
        if not self._on or not self._share:
            return
        up, down = engine.up_stream, engine.down_stream
        files = torch.cuda.ExternalStream(engine._files, up.device)
        pack = torch.cuda.ExternalStream(engine._pack, up.device)
        ways = {"up": up, "copy_up": files, "down": down, "copy_down": down}
        for name, stream in (ways | {"up_home": up, "down_home": pack}).items():
            setattr(engine, name, self._late(getattr(engine, name), stream))

    def _late(self, inner: Callable[..., Any], stream: torch.cuda.Stream) -> Callable[..., Any]:
        def late(*arguments: Any, **named: Any) -> Any:
            with torch.cuda.stream(stream):
                self.sleep(self._share)
            return inner(*arguments, **named)

        return late

    def layers(self, model: Model) -> None:
        """Delays the compute of some layers."""
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: self.sleep(self._share / 4))


class Twins:
    """A tiered model and its resident twin, doing the same things.

    Attributes:
        wrong: Elements that differed so far, on the device.
    """

    def __init__(self, case: Episode, device: str, plain: Model, tiered: Model, steppers) -> None:
        self.case = case
        self.device = device
        self.models = (plain, tiered)
        self.steppers = steppers
        self.draw = random.Random(case.seed)
        self.made = torch.Generator(device).manual_seed(case.seed)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.actions: list[tuple[float, Callable[[], None]]] = [
            (0.45, self.look),
            (0.60, self.wander),
            (0.85, self.train),
            (0.92, self.break_off),
            (0.96, self.write),
            (1.00, self.write_within),
        ]

    def step(self) -> None:
        """Does one thing at random."""
        chance = self.draw.random()
        next(action for bound, action in self.actions if chance < bound)()

    def input(self) -> torch.Tensor:
        return torch.randn(8, WIDTH, device=self.device, generator=self.made)

    def order(self) -> list[int]:
        return list(range(len(self.case.inner)))

    def compare(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.wrong += (first != second).sum()  # NaN, which is the poison, differs from all

    def forwards(self, order: list[int]) -> None:
        x = self.input()
        with torch.no_grad():
            self.compare(*(model(x, order) for model in self.models))

    def look(self) -> None:
        self.forwards(self.order())

    def wander(self) -> None:
        """Layers in any order, some twice, some not at all."""
        self.forwards([self.draw.choice(self.order()) for _ in self.order()])

    def train(self) -> None:
        """One or two forwards, a backward, and mostly a step."""
        inputs = [self.input() for _ in range(self.draw.choice((1, 1, 2)))]
        order = self.order() if self.draw.random() < 0.8 else self.order()[::2]
        recompute, keep = self.draw.random() < 0.4, self.draw.random() < 0.2
        seen = self.draw.choice(order)
        losses, grads = [], []
        for model, stepper in zip(self.models, self.steppers, strict=True):
            stepper.zero_grad()
            loss = sum(model(x, order, recompute).square().mean() for x in inputs)
            loss.backward()
            losses.append(loss.detach())
            grads.append(model.layers[seen].up.weight.grad.clone())
            if not keep:
                stepper.step()
        self.compare(*losses)
        self.compare(*grads)

    def break_off(self) -> None:
        """An error in the middle of a forward that would be trained on."""

        def fail(*_: object) -> None:
            raise Broken

        where = self.draw.choice(self.order())
        x = self.input()
        for model in self.models:
            handle = model.layers[where].register_forward_pre_hook(fail)
            with pytest.raises(Broken):
                model(x, self.order())
            handle.remove()

    def write(self) -> None:
        """A parameter is written outside every pass."""
        where = self.draw.choice(self.order())
        with torch.no_grad():
            for model in self.models:
                model.layers[where].down.weight.mul_(1.0078125)

    def write_within(self) -> None:
        """A layer writes a weight of its own while it runs."""

        def grow(layer: Any, *_: object) -> None:
            with torch.no_grad():
                layer.norm.bias.add_(0.0078125)

        where = self.draw.choice(self.order())
        handles = [model.layers[where].register_forward_hook(grow) for model in self.models]
        self.look()
        for handle in handles:
            handle.remove()


@contextmanager
def twins(case: Episode, device: str, folder: Path) -> Iterator[tuple[Twins, Any]]:
    """Makes both models; the budget is the episode's, or the least that works."""

    def build() -> Model:
        torch.manual_seed(case.seed)
        return Model(list(case.inner)).to(device)

    plain = build()
    settings = {"lr": 1e-3, "momentum": 0.9}
    largest = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in plain.layers)
    hbm = max(4096, int(case.room * largest))
    while True:
        tier = tiermem.TierManager(
            device,
            hbm=hbm,
            dram="48MiB",
            nvme=folder if "nvme" in case.homes else None,
            policy=tiermem.Policy(*case.homes),
            prefetch_depth=case.depth,
        )
        with tier:
            tiered = build()
            try:
                tier.wrap(tiered)
                stepper = tier.optimizer(tiered, torch.optim.SGD, **settings)
            except tiermem.CapacityError as error:
                which, least = asked(error)
                assert which == "hbm" and least > hbm, error
                hbm = least
                continue
            late = Late(case.seed, case.late, device)
            late.copies(tier._manager.parts.copy)
            late.layers(tiered)
            steppers = (torch.optim.SGD(plain.parameters(), **settings), stepper)
            yield Twins(case, device, plain, tiered, steppers), tier
            return


def run(device: str, steps: int, seed: int, folder: Path) -> dict[str, int]:
    """Runs so many steps; returns what happened."""
    seen = {"steps": 0, "evictions": 0, "relocations": 0, "write_backs": 0, "prefetches": 0}
    while seen["steps"] < steps:
        case = episode(seed + seen["steps"])
        with twins(case, device, folder) as (pair, tier):
            for _ in range(min(_EPISODE, steps - seen["steps"])):
                pair.step()
                seen["steps"] += 1
            assert pair.wrong.item() == 0, f"{case}: {pair.wrong.item()} elements differ"
            theirs = pair.models[1].state_dict()
            for name, value in pair.models[0].state_dict().items():
                assert torch.equal(value.cpu(), theirs[name].cpu()), f"{case}: {name}"
            tier._manager.flush()
            tier._manager.parts.table.check()
            stats = tier.stats()
            for name in seen:
                seen[name] += getattr(stats, name, 0)
    return seen
