"""Finding a victim does not look at every block in HBM."""

from __future__ import annotations

import torch
from torch import nn

import tiermem
from tiermem.core.allocator import Allocator


def test_a_streaming_loop_never_searches_all_of_hbm(monkeypatch) -> None:
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(24)])
    x = torch.rand(4, 32)
    searches = []
    whole = Allocator.cheapest_window

    def counted(self, *args):
        searches.append(args[0])
        return whole(self, *args)

    with tiermem.TierManager(device="cpu", hbm=8 * 8192, dram="8MiB") as tier, torch.no_grad():
        tier.wrap(net)
        for _ in range(3):
            net(x)
        monkeypatch.setattr(Allocator, "cheapest_window", counted)
        tier.reset_stats()
        for _ in range(3):
            net(x)
        assert tier.stats().evictions > 20
    assert not searches
