"""A disk that fails under saved tensors: what is not written stays, what is not read says so."""

from __future__ import annotations

import errno
import gc
from pathlib import Path

import pytest
import torch
from support_nn import check_table, same_bits, seed
from torch import nn

import tiermem
from tiermem.io.engine import IoOp, IoRequest
from tiermem.testing.io import Fault, ScriptedEngine

ROWS, WIDTH = 32, 32


def net() -> nn.Module:
    seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[IoOp]:
    """Operations that fail from now on."""
    found: set[IoOp] = set()

    def fault(request: IoRequest, tries: int) -> Fault | None:
        return Fault(errno.EIO) if request.op in found else None

    monkeypatch.setattr(
        "tiermem.runtime.memory.opening.choose_engine",
        lambda *_: (lambda: ScriptedEngine(fault=fault), "scripted", "a test"),
    )
    return found


def manager(folder: Path, ahead: int | str) -> tiermem.TierManager:
    return tiermem.TierManager(
        "cpu", hbm="1MiB", dram="4MiB", nvme=folder, activation_min=1, activation_ahead=ahead,
        policy=tiermem.Policy("dram", "dram", "dram", "dram", "nvme"),
    )  # fmt: skip


def step(model: nn.Module) -> None:
    seed(1)
    model(torch.randn(ROWS, WIDTH)).square().sum().backward()


@pytest.mark.parametrize("ahead", [0, "auto"])
def test_what_cannot_be_written_stays_in_hbm(
    failing: set[IoOp], tmp_path: Path, ahead: int | str
) -> None:
    plain, model = net(), net()
    with manager(tmp_path, ahead) as tier:
        tier.wrap(model)
        failing.add(IoOp.WRITE)
        step(model)
        step(plain)
        ours = dict(model.named_parameters())
        for name, param in plain.named_parameters():
            assert same_bits(param.grad, ours[name].grad.clone()), name
        stats = tier.stats()
        assert stats.errors > 0 and stats.activations.kept > 0 and stats.activations.used == 0
        check_table(tier)


@pytest.mark.parametrize("ahead", [0, "auto"])
def test_what_cannot_be_read_is_an_error_and_the_next_step_goes_well(
    failing: set[IoOp], tmp_path: Path, ahead: int | str
) -> None:
    plain, model = net(), net()
    with manager(tmp_path, ahead) as tier:
        tier.wrap(model)
        seed(1)
        loss = model(torch.randn(ROWS, WIDTH)).square().sum()
        failing.add(IoOp.READ)
        with pytest.raises(tiermem.StorageError, match="activation of "):
            loss.backward()
        del loss
        gc.collect()  # the error held what was under way
        assert tier.stats().activations.used == 0
        failing.clear()
        model.zero_grad()
        step(model)
        step(plain)
        ours = dict(model.named_parameters())
        for name, param in plain.named_parameters():
            assert same_bits(param.grad, ours[name].grad.clone()), name
        assert tier.stats().activations.used == 0
        check_table(tier)
