"""Half precision with a loss scale: gradients unscaled by hand, clipped, then stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import Tiers, assert_same
from support_optim import Net, Twins, loss_of

SETTINGS = {"lr": 0.01, "foreach": False}


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_unscaled_clipped_and_stepped(tmp_path: Path, where: str, overlap: bool, home: str) -> None:
    """One of the steps is left out, as a gradient is infinite; the scale grows and shrinks."""
    tiers = Tiers("one", nvme=str(tmp_path), policy=home)
    options: dict[str, Any] = {"where": where, "overlap": overlap, "master_dtype": None}
    with Twins(lambda: Net(torch.float32), tiers, torch.optim.AdamW, SETTINGS, **options) as twins:
        pairs = [
            (model, optimizer, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
            for model, optimizer in (
                (twins.plain, twins.by_hand.optimizer),
                (twins.model, twins.optimizer),
            )
        ]
        norms: list[torch.Tensor] = []
        scales: list[float] = []
        for step in range(6):
            for model, optimizer, scaler in pairs:
                for number in (2 * step, 2 * step + 1):
                    with torch.autocast("cpu", dtype=torch.float16):
                        loss = loss_of(model, number)
                    if step == 3:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if model is twins.plain:
                    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
                else:
                    assert_same(norms[-1], twins.optimizer.clip_grad_norm_(0.05), "norm")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(pairs[1][2].get_scale())
            assert pairs[0][2].get_scale() == scales[-1]
            if step in (2, 3):
                twins.check()
        assert min(scales) < max(scales) and not norms[3].isfinite()
        twins.check()
