"""Full training with defaults alone: steps are made ahead in every kind of model."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import tiermem

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "mixtral", "gpt2", "layers", "lstm"])
@pytest.mark.one_in(2)
def test_every_unit_is_stepped_ahead_from_the_second_step_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_zoo import first_of
    from zoo import KINDS, Draw

    device = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = KINDS[name].build("tiny", device).train().requires_grad_(True)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    needed = tiermem.budgets_for(model, torch.optim.AdamW, device="cpu", hbm=nbytes // 2)
    hbm = max(nbytes // 2, needed.least_hbm) + 8192
    with tiermem.TierManager("cpu", hbm=hbm, dram=16 * nbytes + (8 << 20)) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-4)
        given = KINDS[name].given(model, 8, Draw(device, 8), True)
        for _ in range(4):
            first_of(model(**given)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stepped = [unit for unit in optimizer._units if unit.made is not None]
        moved = [u for u in stepped if u.group.block.name.rpartition(".")[2] != "small"]
        assert optimizer.stepped_in_backward == 3 * len(moved) > 0
        tier.close(discard=True)
