"""A model that leaves the tiers under Ctrl-C: weights, gradients and what others have of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from support_ctrl_c import cut_short
from support_nn import same_bits
from torch import nn

import tiermem

STRIDE = int(os.environ.get("TIERMEM_CTRL_C_STRIDE", "61"))
"""Every so many lines are tried; with 1 all of them."""
FILES = [
    "nn/wrap/giveback.py",
    "nn/groups/group.py",
    "nn/groups/pointing.py",
    "nn/groups/gradhomes.py",
    "nn/groups/grads.py",
    "nn/tensors/lazy.py",
    "nn/wrap/wrapped.py",
    "tier.py",
]

LEAVE: dict[str, Callable[[tiermem.TierManager, nn.Module], object]] = {
    "unwrap": lambda tier, model: tier.unwrap(model),
    "close": lambda tier, _model: tier.close(),
}


class Net(nn.Module):
    """Three blocks, a buffer that stays in HBM, a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    model.eval()
    return model


@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.one_in(2)
def test_leaving_cut_short_loses_no_gradient(how: str) -> None:
    """Called again, it goes on: all is as the resident model has it, stand-ins included."""
    plain = net()
    batch = torch.linspace(-1, 1, 24).view(4, 6)
    plain(batch).square().sum().backward()
    number, where = 1, "-"
    while where:
        with tiermem.TierManager("cpu", hbm="64KiB", dram="2MiB") as tier:
            model = tier.wrap(net())
            model(batch).square().sum().backward()
            held = {name: p.grad for name, p in model.named_parameters() if number % 2}
            where = cut_short(lambda: LEAVE[how](tier, model), number, FILES)  # noqa: B023
            with suppress(tiermem.WrapError):  # it has left after all
                LEAVE[how](tier, model)
            for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
                at = f"{name}, after Ctrl-C at {where}, line {number}"
                assert type(b) is nn.Parameter and same_bits(a.detach(), b.detach()), at
                for gradient in (b.grad, held.get(name, b.grad)):
                    assert (a.grad is None) == (gradient is None), at
                    assert a.grad is None or same_bits(a.grad, gradient.clone()), at
            assert all(map(torch.equal, plain.buffers(), model.buffers())), where
            if how == "unwrap":
                tier.unwrap(tier.wrap(model))
        number += STRIDE
    assert number > 100
