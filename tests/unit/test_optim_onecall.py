"""Steps that write everything by one call of torch's keep no copies of what they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import tiermem
from tiermem.optim.units.undo import Undo


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of blocks that were copied, in case a step is taken back."""
    found: list[int] = []
    keep = Undo.keep

    def noted(self: Undo, tensors: Sequence[torch.Tensor]) -> None:
        found.append(sum(t.nbytes for t in tensors))
        keep(self, tensors)

    monkeypatch.setattr(Undo, "keep", noted)
    return found


def steps(cls: Any, settings: dict[str, Any], count: int, factor: bool = False) -> nn.Module:
    """A model that stays in HBM after some steps, so that nothing of it is at home."""
    torch.manual_seed(0)
    with tiermem.TierManager("cpu", hbm="4MiB", dram="4MiB") as tier:
        model = tier.wrap(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).bfloat16())
        optimizer = tier.optimizer(model, cls, master_dtype=torch.float32, **settings)
        for number in range(count):
            x = torch.randn(3, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
            model(x).float().square().sum().backward()
            if factor:
                optimizer.grad_factor = torch.tensor(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return tier.unwrap(model)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("factor", [False, True])
def test_a_fused_step_copies_nothing_from_the_second_on(
    cls: Any, factor: bool, copied: list[int]
) -> None:
    steps(cls, {"lr": 0.1, "fused": True}, 1, factor)
    first = len(copied)
    del copied[:]
    steps(cls, {"lr": 0.1, "fused": True}, 4, factor)
    assert len(copied) == first


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
        (torch.optim.RMSprop, {"lr": 0.1}),
    ],
)
def test_other_steps_copy_what_they_write(
    cls: Any, settings: dict[str, Any], copied: list[int]
) -> None:
    steps(cls, settings, 1)
    first = len(copied)
    steps(cls, settings, 4)
    assert len(copied) > 2 * first


def test_a_hook_after_the_step_may_fail_so_it_copies(copied: list[int]) -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        steps(torch.optim.AdamW, {"lr": 0.1, "fused": True}, 4)
    finally:
        handle.remove()
    assert len(copied) > 2
