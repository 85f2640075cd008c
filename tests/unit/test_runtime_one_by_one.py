"""Layers that a program calls one by one are passes of their own, and a loop all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiermem

WIDTH = 64


def moved_by_loops(layers: int, share: float, loops: int, size: int = 1) -> list[float]:
    """Calls layers one after another.

    Args:
        layers: How many.
        share: Of the weights' bytes, as HBM.
        loops: How often.
        size: Matrices in each layer.

    Returns:
        What came up in each loop, as a part of the weights.
    """
    torch.manual_seed(0)
    parts = [[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(size)] for _ in range(layers)]
    model = nn.Sequential(*[nn.Sequential(*part) for part in parts]).eval()
    nbytes = sum(param.nbytes for param in model.parameters())
    x, found = torch.randn(2, WIDTH), []
    with (
        torch.no_grad(),
        tiermem.TierManager("cpu", hbm=int(share * nbytes) // 4096 * 4096, dram="16MiB") as tier,
    ):
        tier.wrap(model)
        counters = tier._manager.parts.counters
        for _ in range(loops):
            before = counters.bytes_by_link().get("dram->hbm", 0)
            for layer in model:
                x = layer(x)
            found.append((counters.bytes_by_link()["dram->hbm"] - before) / nbytes)
    return found


def test_what_does_not_fit_comes_up_and_no_more() -> None:
    for moved in moved_by_loops(16, 0.5, 8, size=3)[3:]:
        assert moved < 0.75  # with room to stream through


@pytest.mark.parametrize("layers", [16, 150])
def test_where_all_fit_nothing_moves(layers: int) -> None:
    """However many: more than are foreseen at one time."""
    assert moved_by_loops(layers, 1.5, 6)[3:] == [0.0] * 3
