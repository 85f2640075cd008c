"""tier.save and tier.load on CUDA: from HBM, from DRAM, and while steps are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

pytestmark = pytest.mark.gpu

SETTINGS: list[dict[str, Any]] = [
    {},
    {"fused": True},
    {"capturable": True, "lr": torch.tensor(1e-2)},
    {"overlap": "forward"},
    {"overlap": "backward"},
]


def begin(settings: dict[str, Any], number: int, **budgets: Any) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(number)
    layers = [m for _ in range(6) for m in (nn.Linear(256, 256), nn.Dropout(0.1))]
    tier = tiermem.TierManager(**{"hbm": "4MiB", "dram": "64MiB", **budgets})
    model = tier.wrap(nn.Sequential(*layers).bfloat16())
    options = {"lr": 1e-2, "master_dtype": torch.float32, **settings}
    if isinstance(options["lr"], torch.Tensor):
        options["lr"] = options["lr"].cuda()
    return tier, model, tier.optimizer(model, torch.optim.AdamW, **options)


def step(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on(tmp_path: Path, settings: dict[str, Any], wait: bool) -> None:
    tier, *run = begin(settings, 0)
    with tier:
        for _ in range(3):
            step(*run)
        run[1].zero_grad()
        handle = tier.save(tmp_path / "run", wait=wait)
        expected = [step(*run) for _ in range(4)]
        if handle is not None:
            handle.result()
    for budgets in ({}, {"hbm": "64MiB"}, {"hbm": "16MiB", "policy": {"params": "hbm"}}):
        tier, *run = begin(settings, 1, **budgets)
        with tier:
            tier.load(tmp_path / "run")
            assert [step(*run) for _ in range(4)] == expected, budgets
