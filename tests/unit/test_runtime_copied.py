"""A copy up that waits for copies down alone comes where compute has used nothing since.

Every lease is watched, and every look at a block that takes none; pages of HBM remember when they
were last used, and when they were last copied home.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.core import residency
from tiermem.core.block import Extent
from tiermem.core.record import Record
from tiermem.runtime import assembly
from tiermem.runtime.acquire import Acquirer
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.transfer.copy import HostCopyEngine, host_copy

PAGE = 512


class Watch:
    """When pages of HBM were last used by compute, and last copied home.

    Attributes:
        early: How many copies up waited for copies down alone.
    """

    def __init__(self) -> None:
        self.now = self.early = 0
        self.used: dict[int, int] = {}
        self.home: dict[int, int] = {}

    def pages(self, extent: Extent) -> range:
        return range(extent.offset // PAGE, -(-extent.end // PAGE))

    def mark(self, found: dict[int, int], extent: Extent | None) -> None:
        self.now += 1
        for page in () if extent is None else self.pages(extent):
            found[page] = self.now

    def check(self, extent: Extent) -> None:
        self.early += 1
        for page in self.pages(extent):
            assert self.home[page] > self.used.get(page, 0), f"page {page} was used since"


class Done:
    """An event that has passed."""

    waiter = -1

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def engine_of(watch: Watch) -> type[HostCopyEngine]:
    class Engine(HostCopyEngine):
        def down(self, target: Any, source: Any, extent: Extent, after: Any) -> Any:
            watch.mark(watch.home, extent)
            host_copy(target, source)
            return Done()

        def up(
            self, target: Any, source: Any, extent: Extent, *rest: Any, copied: bool = False
        ) -> Any:
            if copied:
                watch.check(extent)
            return super().up(target, source, extent, *rest, copied=copied)

        def claim(self, extent: Extent) -> None:
            watch.mark(watch.used, extent)

    return Engine


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    made = Watch()
    slot: Any = Record.__dict__["leases"]

    class Watched(Record):
        __slots__ = ()

        @property
        def leases(self) -> int:  # type: ignore[override]
            return slot.__get__(self)

        @leases.setter
        def leases(self, count: int) -> None:
            if count > getattr(self, "leases", 0) and self.extent is not None:
                made.mark(made.used, self.extent)
            slot.__set__(self, count)

    at_hand, init = Acquirer.at_hand, BlockSweep.__init__

    def seen(self: Acquirer, block_id: int) -> Record | None:
        record = at_hand(self, block_id)
        if record is not None:
            made.mark(made.used, record.extent)
        return record

    def as_on_cuda(self: BlockSweep, manager: Any) -> None:
        init(self, manager)
        self._dram = True

    monkeypatch.setattr(residency, "Record", Watched)
    monkeypatch.setattr(Acquirer, "at_hand", seen)
    monkeypatch.setattr(BlockSweep, "__init__", as_on_cuda)
    monkeypatch.setattr(assembly, "HostCopyEngine", engine_of(made))
    yield made


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    def __init__(self, layers: int, width: int, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def go(watch: Watch, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, layers = draw.choice((16, 32)), draw.randrange(8, 20)
    models = [Net(layers, width, seed % 3 == 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    nbytes = sum(p.numel() * 4 for p in models[0].parameters())
    hbm = int(draw.uniform(0.3, 1.2) * nbytes) // 4096 * 4096
    with tiermem.TierManager("cpu", hbm=max(hbm, 1 << 15), dram=16 * nbytes + (1 << 20)) as tier:
        tier._manager.prefetcher.fetcher.beside = True
        tier.wrap(models[1])
        steppers = [
            torch.optim.AdamW(models[0].parameters(), lr=1e-3),
            tier.optimizer(models[1], torch.optim.AdamW, lr=1e-3),
        ]
        for _ in range(6):
            x = torch.randn(3, width)
            micro, looks, evaluates = draw.choice((1, 1, 2)), draw.random(), draw.random()
            seen = []
            for model, stepper in zip(models, steppers, strict=True):
                for _ in range(micro):
                    loss = model(x).square().mean()
                    loss.backward()
                if looks < 0.2:
                    seen.append(model.layers[0].a.weight.grad.clone())
                stepper.step()
                stepper.zero_grad()
                if evaluates < 0.3:
                    with torch.no_grad():
                        seen.append(model(x))
                seen.append(loss.detach())
            half = len(seen) // 2
            assert all(map(torch.equal, seen[:half], seen[half:]))
    for name, weight in models[0].state_dict().items():
        assert torch.equal(weight, models[1].state_dict()[name]), name


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.one_in(2)
def test_places_that_only_copies_have_used(watch: Watch, seed: int) -> None:
    go(watch, seed)
    assert watch.early > 0


def test_a_use_behind_the_copy_down_is_seen(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle itself: with a note that is not taken back, it finds a use."""
    monkeypatch.setattr(
        Record, "copied", property(lambda self: True, lambda self, value: None), raising=True
    )
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(12):
            go(watch, seed)
