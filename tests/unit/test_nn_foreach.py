"""Torch's optimizers choose for hidden weights the kernels that they choose for ordinary ones.

On a GPU they step by ``foreach`` what is of a class that they know, and else tensor by tensor,
which rounds differently.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support_nn import same_bits
from torch import nn
from torch.optim import adagrad

import tiermem

WIDTH, LAYERS = 32, 6
WAYS = ("_single_tensor_adagrad", "_multi_tensor_adagrad")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has torch step by ``foreach`` on the CPU, too; returns the functions that step."""
    found: list[str] = []

    def noting(way: str) -> Callable[..., None]:
        own = getattr(adagrad, way)

        def noted(*args: Any, **more: Any) -> None:
            found.append(way)
            own(*args, **more)

        return noted

    torchs = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(torchs, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    for way in WAYS:
        monkeypatch.setattr(adagrad, way, noting(way))
    return found


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@contextmanager
def wrapped(share: float) -> Iterator[tuple[tiermem.TierManager, Any, nn.Module]]:
    """Yields tiers, a model in them, and the same model as it is."""
    plain = layers()
    nbytes = sum(p.nbytes for p in plain.parameters())
    hbm = int(nbytes * share) // 4096 * 4096
    with tiermem.TierManager("cpu", hbm=hbm, dram=16 * nbytes + (1 << 20)) as tier:
        yield tier, tier.wrap(layers()), plain


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def look(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.sum().item()


def test_where_several_threads_use_a_weight(taken: list[str]) -> None:
    """It stays hidden, also while a step has it."""
    with wrapped(1.0) as (tier, model, plain):
        own = torch.optim.Adagrad(plain.parameters())
        optimizer = tier.optimizer(model, torch.optim.Adagrad)
        train(plain, own, 1)
        train(model, optimizer, 1)
        thread = threading.Thread(target=look, args=(model,))
        thread.start()
        thread.join()
        look(model)
        assert tier._runtime.groups[0].pointing.veiled
        taken.clear()
        train(model, optimizer, 2)
        assert set(taken) == {WAYS[1]}
        train(plain, own, 2)
        assert all(map(same_bits, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("share", [0.5, 4.0])
def test_a_plain_optimizer_over_a_wrapped_model(taken: list[str], share: float) -> None:
    with wrapped(share) as (_, model, plain):
        optimizers = [torch.optim.Adagrad(m.parameters()) for m in (plain, model)]
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            told = one is model and share < 1  # once
            with pytest.warns(UserWarning, match="of state on") if told else nullcontext():
                train(one, optimizer, 1)
            train(one, optimizer, 2)
        assert taken == [WAYS[1]] * 6
        assert all(map(same_bits, model.parameters(), plain.parameters()))
