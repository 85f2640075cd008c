"""The tables of Surogate's offloading page, row by row, from ``stats()`` and ``residency()``.

The page counts device buffers, host buffers and transfers in a step. A block is a layer here, or
what lies around the layers; "on the device" is what a manager's HBM budget has to hold.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support_integrations import BATCH, TOKENS, WIDTH, batches, decoder, resident_losses, twin
from torch import nn

from tiermem import Stats
from tiermem.integrations import surogate

LAYERS = 8
STEPS = 3
RESIDUAL = BATCH * TOKENS * WIDTH * 4


class Run:
    """What a few steps with some options did.

    Attributes:
        losses: Of every step.
        homes: Bytes by role and home.
        last: Statistics of the last step alone.
        hbm: The budget of device memory.
        peak: Most bytes that were in HBM.
        blocks: How many blocks of each role there are.
    """

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        model = decoder(LAYERS) if model is None else model
        options = {"optimizer": "adamw", **options}
        self.losses = []
        with surogate.Offloading(model, device="cpu", dram="16MiB", **options) as run:
            optimizer = run.optimizer()
            for tokens in batches(STEPS):
                run.tier.reset_stats()
                loss = run.model(tokens)
                loss.backward()
                run.step(optimizer)
                self.losses.append(loss.item())
            self.last: Stats = run.tier.stats()
            rows = run.tier.residency()
        self.homes: Counter[tuple[str, str]] = Counter()
        self.blocks: Counter[str] = Counter()
        self.largest: dict[str, int] = {}
        for row in rows:
            self.homes[row.role, row.home] += row.nbytes
            self.blocks[row.role] += 1
            self.largest[row.role] = max(self.largest.get(row.role, 0), row.nbytes)
        self.hbm, self.peak = self.last.budget["hbm"], self.last.peak["hbm"]

    def moved(self, link: str) -> int:
        """Returns the bytes of the last step over a link."""
        return self.last.links[link].nbytes if link in self.last.links else 0


@pytest.fixture(scope="module")
def plain() -> list[float]:
    model = decoder(LAYERS)
    settings = {"lr": 2e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    return resident_losses(model, torch.optim.AdamW(groups, **settings), STEPS)


@pytest.fixture(scope="module")
def off() -> Run:
    return Run()


def parameters() -> int:
    return sum(p.numel() for p in decoder(LAYERS).parameters())


def little(nbytes: int) -> int:
    """Returns the most bytes that stay in HBM all the same: norms and biases, a 64th (ADR 43)."""
    return nbytes // 64


def test_nothing_is_offloaded_by_default(off: Run, plain: list[float]) -> None:
    assert off.losses == plain
    assert {home for _, home in off.homes} == {"hbm"}
    assert off.last.links == {}
    assert off.last.activations.offloaded == 0


def test_residuals(off: Run, plain: list[float]) -> None:
    on = Run(offload_residual=True)
    assert on.losses == plain
    seen = on.last.activations
    assert seen.offloaded == LAYERS  # L page-locked buffers, one each
    assert seen.offloaded_bytes == LAYERS * RESIDUAL
    assert seen.peak >= LAYERS * RESIDUAL
    assert on.moved("hbm->dram") == LAYERS * RESIDUAL  # L down
    came = seen.fetched_ahead + seen.fetched_late
    assert came + seen.reused == LAYERS  # and L up, but for the last ones, which are there still
    assert seen.reused <= 2  # the two device buffers
    assert on.moved("dram->hbm") == came * RESIDUAL
    assert off.last.activations.peak == 0  # off: nothing on the host, no transfers


def test_saved_tensors(plain: list[float]) -> None:
    on = Run(offload_saved_tensors=True, recompute=False)
    assert on.losses == plain
    assert on.last.activations.offloaded > LAYERS


def test_optimizer_state(off: Run, plain: list[float]) -> None:
    on = Run(offload_optimizer=True)
    assert on.losses == plain
    state = 8 * parameters()  # m and v
    assert off.homes["optimizer", "hbm"] >= state
    assert off.homes["optimizer", "dram"] == 0
    assert on.homes["optimizer", "hbm"] <= little(state)
    assert on.homes["optimizer", "dram"] >= state - little(state)
    # the device holds a few layers' state, whatever the number of layers
    assert off.hbm - on.hbm >= state * (LAYERS - 5) // LAYERS
    assert on.moved("hbm->dram") >= state * (LAYERS - 5) // LAYERS


def test_device_buffers_do_not_grow_with_the_layers() -> None:
    def streamed(layers: int) -> int:
        run = Run(decoder(layers), cpu_training=True)
        return run.hbm

    assert streamed(6) == streamed(12)


def test_masters(off: Run) -> None:
    model = decoder(LAYERS).bfloat16()
    settings = {"recompute": False, "master_dtype": "fp32"}
    on = Run(twin(model), offload_master=True, **settings)
    without = Run(twin(model), **settings)
    assert on.losses == without.losses
    masters = 4 * parameters()
    assert without.homes["master", "hbm"] >= masters
    assert without.homes["master", "dram"] == 0
    assert on.homes["master", "hbm"] <= little(masters)
    assert on.homes["master", "dram"] >= masters - little(masters)
    assert without.hbm - on.hbm >= masters * (LAYERS - 5) // LAYERS
    # work weights stay; blocks are of whole pages, and as large as the budget lets them be
    there = without.homes["param", "hbm"]
    assert on.homes["param", "hbm"] == pytest.approx(there, abs=LAYERS * 4096)


def test_weights_without_masters_are_their_own(plain: list[float]) -> None:
    on = Run(offload_master=True)
    assert on.losses == plain
    weights = 4 * parameters()
    assert on.homes["param", "dram"] >= weights - little(weights)
    assert on.homes["param", "hbm"] <= little(weights)


def test_gradients(off: Run, plain: list[float]) -> None:
    on = Run(zero_level=2, offload_grads=True)
    assert on.losses == plain
    gradients = 4 * parameters()
    assert off.homes["grad", "hbm"] >= gradients
    assert on.homes["grad", "hbm"] <= little(gradients)
    assert on.homes["grad", "dram"] >= gradients - little(gradients)
    assert off.hbm - on.hbm >= gradients * (LAYERS - 5) // LAYERS


def test_cpu_training(plain: list[float]) -> None:
    on = Run(cpu_training=True)
    assert on.losses == pytest.approx(plain, rel=1e-5)  # the host rounds differently
    for (role, home), nbytes in on.homes.items():
        assert home == "dram" or nbytes <= little(on.homes[role, "dram"]), role
    state = 8 * parameters()
    assert on.homes["optimizer", "dram"] >= state - little(state)
    assert on.moved("dram->hbm") >= 4 * parameters() * (LAYERS - 5) // LAYERS


def test_cpu_training_with_adapters() -> None:
    model = decoder(LAYERS)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.norm.requires_grad_(True)
    on = Run(model, cpu_training=True, recompute=False)
    assert on.homes["param", "dram"] > 0  # weights stream
    assert on.homes["grad", "hbm"] > 0
    assert on.homes["grad", "dram"] == 0
    assert on.homes["optimizer", "dram"] == 0
