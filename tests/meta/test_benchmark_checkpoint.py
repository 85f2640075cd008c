"""What the benchmark of checkpoints counts, and that counting does not slow what it times."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from bench_checkpoint import Bench  # noqa: E402


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(argparse.Namespace(device="cpu", folder=tmp_path))


class Watched(tiermem.TierManager):
    """Counts how often its counters were set to zero."""

    resets = 0

    def reset_stats(self) -> None:
        self.resets += 1
        super().reset_stats()


def test_only_calls_that_do_not_count_are_measured(bench, capsys) -> None:
    """A reset makes the next pass of every kind be measured, which takes time."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    nbytes = sum(p.numel() * p.element_size() for p in layers.parameters())
    with Watched("cpu", hbm=nbytes // 2, dram="4MiB") as tier, torch.no_grad():
        model = tier.wrap(layers)

        def call() -> torch.Tensor:
            return model(torch.ones(1, 64))

        moved = [bench._timed(tier, "a forward", call)[1] for _ in range(4)]
        assert tier.resets == 0
        total = tier.stats().links["dram->hbm"].nbytes
        assert sum(each["dram->hbm"] for each in moved) == total
        assert all(0 < each["dram->hbm"] < total for each in moved)
        bench._losses(tier, "a forward", call)
        assert tier.resets == 1 and tier.stats().measured_seconds > 0
    assert "a forward: lost s: " in capsys.readouterr().out
