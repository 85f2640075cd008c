"""On a CUDA device: state that steps ahead leave as it was, with streams that are late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_nn import assert_same
from support_stress import Late
from torch import nn

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH, LAYERS = 512, 10


def layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)


def loss_of(model: nn.Module, number: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to("cuda", dtype)).float().square().mean()


@pytest.mark.parametrize("late", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "capturable": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
        (torch.optim.NAdam, {"lr": 1e-3}),
    ],
)
def test_the_same_bits(cls: Any, settings: Any, dtype: torch.dtype, late: float) -> None:
    plain = layers(dtype).cuda()
    own = cls(plain.parameters(), **settings)
    nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    with tiermem.TierManager(device="cuda", hbm=nbytes * 2 // 3, dram=16 * nbytes) as tier:
        model = tier.wrap(layers(dtype))
        optimizer = tier.optimizer(model, cls, **settings)
        Late(1, late, "cuda").copies(tier._manager.parts.copy)
        ahead = optimizer._timing.ahead
        ahead._left.choose_anew = lambda *_: None  # by measured times: the share is the test's
        for number in range(16):
            ahead.late.share = (1.0, 0.5)[number % 8 > 5]
            losses = []
            for which, stepper in ((plain, own), (model, optimizer)):
                loss = loss_of(which, number, dtype)
                loss.backward()
                stepper.step()
                stepper.zero_grad()
                losses.append(loss.detach())
            assert_same(*losses, f"loss {number}")
            if number == 11:
                theirs = optimizer.state_dict()["state"]
                for key, values in own.state_dict()["state"].items():
                    for name, value in values.items():
                        assert_same(value.cpu(), theirs[key][name].cpu(), name)
        assert ahead.provisional.left > 2 * LAYERS
        for name, value in plain.state_dict().items():
            assert_same(value.cpu(), model.state_dict()[name].cpu(), name)
