"""A model that is wrapped anew as it gets an optimizer, under Ctrl-C: nothing of it is lost."""

from __future__ import annotations

import os

import pytest
import torch
from support_blocks import divide_as_large
from support_ctrl_c import cut_short, first_times
from support_nn import same_bits
from torch import nn

import tiermem
from tiermem.nn.groups import partition

STRIDE = int(os.environ.get("TIERMEM_CTRL_C_STRIDE", "31"))
"""Every so many lines are tried; with 1 all of them."""
FILES = [
    "nn/wrap/anew.py",
    "nn/wrap/giveback.py",
    "nn/wrap/intercepted.py",
    "nn/wrap/originals.py",
    "nn/wrap/wrapped.py",
    "tier.py",
]


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.BatchNorm1d(16)).eval()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 64).view(4, 16)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.one_in(2)
def test_it_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is in the tiers, as it was or wrapped anew, and is trained to the same bits."""
    divide_as_large(monkeypatch)
    plain = net()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    hbm = 16 * partition.parameter_bytes(plain[0]) // 4096 * 4096
    numbers: list[int] = []
    for _ in range(2):  # what is remembered in a process is remembered then
        with tiermem.TierManager("cpu", hbm=hbm, dram="2MiB") as tier:
            model = tier.wrap(net())
            make = lambda: tier.optimizer(model, torch.optim.AdamW, lr=0.01)  # noqa: E731, B023
            numbers = first_times(make, FILES)
    anew, where = 0, "-"
    for number in [*numbers[:-1:STRIDE], numbers[-1]]:
        with tiermem.TierManager("cpu", hbm=hbm, dram="2MiB") as tier:
            model = tier.wrap(net())
            wrapped = tier._wrapped[id(model)]
            make = lambda: tier.optimizer(model, torch.optim.AdamW, lr=0.01)  # noqa: E731, B023
            where = cut_short(make, number, FILES)
            at = f"after Ctrl-C at {where}, line {number}"
            assert id(model) in tier._wrapped and not tier._wrapped[id(model)].given_back, at
            anew += tier._wrapped[id(model)] is not wrapped
            for a, b in zip(net().parameters(), model.parameters(), strict=True):
                assert same_bits(a.detach(), b.detach().clone()), at
            if where:
                assert same_bits(expected, train(model, make())), at
    assert len(numbers) > 100 and anew > 1 and not where
