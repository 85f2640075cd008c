"""Units of a step: whole blocks where steps bind the host, finer ones where much is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_blocks import divide_as_large
from support_nn import assert_same, seed
from torch import nn

import tiermem
from tiermem.errors import CapacityError
from tiermem.nn.groups import partition

WIDTH, LAYERS = 64, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(x).relu())


@pytest.fixture(autouse=True)
def _steps_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_as_large(monkeypatch)


def made() -> tuple[nn.Module, int]:
    seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)]).bfloat16().train()
    return model, 13 * partition.parameter_bytes(model[0])


def units_of(tier: tiermem.TierManager) -> tuple[int, int]:
    """Returns how many blocks of weights there are, and how many units of gradients."""
    rows = tier.residency()
    roles = [row.role for row in rows]
    return roles.count("param"), roles.count("grad")


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for number in range(steps):
        seed(number)
        loss = model(torch.randn(4, WIDTH).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_block_is_one_unit_and_the_bits_are_torchs() -> None:
    model, hbm = made()
    plain = copy.deepcopy(model)
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    with tiermem.TierManager("cpu", hbm=hbm, dram="64MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert units_of(tier) == (LAYERS, LAYERS)
        assert_same(expected, trained(model, optimizer), "losses")
    assert_same(plain.state_dict(), model.state_dict(), "weights")


def test_what_keeps_masters_is_stepped_in_finer_units() -> None:
    model, hbm = made()
    with tiermem.TierManager("cpu", hbm=hbm, dram="64MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01, master_dtype=torch.float32)
        weights, gradients = units_of(tier)
        assert weights == LAYERS < gradients
        trained(model, optimizer)
        assert optimizer.stepped_in_backward


def test_a_refused_optimizer_leaves_blocks_to_be_stepped_as_one() -> None:
    model, hbm = made()
    with tiermem.TierManager("cpu", hbm=hbm, dram=5 * LAYERS * hbm // 13) as tier:
        tier.wrap(model)
        with pytest.raises(CapacityError):
            tier.optimizer(model, torch.optim.AdamW, lr=0.01, master_dtype=torch.float32)
        tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert units_of(tier) == (LAYERS, LAYERS)


def test_a_parameter_without_elements_is_not_cut_where_hbm_has_no_room() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model[0].nothing = nn.Parameter(torch.empty(0, 16))
    with tiermem.TierManager("cpu", hbm="8KiB", dram="1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(CapacityError, match="an optimizer step"):
            tier.optimizer([model[0].nothing, model[1].weight], torch.optim.AdamW)
