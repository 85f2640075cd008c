"""Forked children beside a GPU: nothing of it works there, and nothing may crash."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support_process import child
from torch import nn

import tiermem


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)) for _ in "abc"])


@pytest.mark.parametrize("nvme", [False, True])
def test_a_child_may_touch_and_forget_what_is_wrapped(tmp_path: Path, nvme: bool) -> None:
    folder = tmp_path if nvme else None
    gc.collect()
    gc.freeze()
    things: dict[str, Any] = {"tier": tiermem.TierManager("cuda", "4MiB", "32MiB", folder)}
    things["model"] = things["tier"].wrap(model_of())
    things["optimizer"] = things["tier"].optimizer(things["model"], torch.optim.AdamW)
    x = torch.randn(8, 256, device="cuda")

    def train() -> None:
        things["model"](x).square().mean().backward()
        things["optimizer"].step()
        things["optimizer"].zero_grad()

    train()
    things["loss"] = things["model"](x).sum()
    for first in list(things):

        def inside(first: str = first) -> None:
            for param in things["model"].parameters():
                with pytest.raises(tiermem.ClosedError, match="forked child"):
                    param.sum()
            with pytest.raises(tiermem.ClosedError, match="forked child"):
                things["model"].state_dict()
            del things[first]
            gc.collect()
            things.clear()
            gc.collect()

        assert child(inside) == 0, first
    del things["loss"]
    train()
    things["tier"].close()
    gc.unfreeze()
