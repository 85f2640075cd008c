"""On a CUDA device: masters, steps in the next forward, and steps on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_nn import assert_same
from support_optim import ByHand, one_group
from torch import nn

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

HOMES = {
    "dram": {"params": "dram", "grads": "dram", "master": "dram", "optimizer": "dram"},
    "nvme": {"params": "dram", "grads": "dram", "master": "nvme", "optimizer": "nvme"},
}


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)
    ]
    return nn.Sequential(*layers).to(torch.bfloat16)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(64, 512, generator=generator).to("cuda", torch.bfloat16)
    return (model(x) - x).float().square().mean()


def run(
    tmp_path: Path, homes: str, steps: int, clip: bool, settings: dict, **options: object
) -> tuple[dict, dict, list[float], list[float]]:
    plain = build().cuda()
    by_hand = ByHand(one_group(plain), torch.optim.AdamW, settings, torch.float32, torch.float32)
    tier = tiermem.TierManager(
        device="cuda", hbm="128MiB", dram="1GiB", nvme=tmp_path, policy=HOMES[homes]
    )
    with tier:
        model = tier.wrap(build(), blocks=[str(i) for i in range(8)])
        optimizer = tier.optimizer(
            model,
            torch.optim.AdamW,
            master_dtype=torch.float32,
            grad_dtype=torch.float32,
            **settings,
            **options,
        )
        losses: tuple[list[float], list[float]] = ([], [])
        for step in range(steps):
            for part in range(2):
                for which, found in zip((plain, model), losses, strict=True):
                    loss = loss_of(which, 2 * step + part)
                    loss.backward()
                    found.append(loss.item())
                by_hand.after_backward()
            if clip:
                stand_ins = [torch.empty_like(g, requires_grad=True) for g in by_hand.gradients()]
                for stand_in, gradient in zip(stand_ins, by_hand.gradients(), strict=True):
                    stand_in.grad = gradient
                total = nn.utils.clip_grad_norm_(stand_ins, 0.1)
                norm = optimizer.clip_grad_norm_(0.1)
                if "where" in options:  # the host rounds otherwise, and so the weights differ
                    torch.testing.assert_close(norm, total, rtol=1e-2, atol=0.0)
                else:
                    assert_same(total, norm, "norm")
            by_hand.step()
            optimizer.step()
            by_hand.zero_grad()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
        theirs = {name: value.cpu() for name, value in plain.state_dict().items()}
    expected = by_hand.state_dict()
    assert expected["state"].keys() == state["state"].keys()
    if "where" not in options:
        assert_same(theirs, weights, "weights")
        masters = {n: m.cpu() for n, m in expected["master"].items()}
        assert_same(masters, state["master"], "masters")
        for number, values in expected["state"].items():
            for key, value in values.items():
                assert_same(value.cpu(), state["state"][number][key].cpu(), key)
    return theirs, weights, *losses


@pytest.mark.parametrize("homes", sorted(HOMES))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_the_same_bits(tmp_path: Path, homes: str, overlap: bool, fused: bool, clip: bool) -> None:
    settings = {"lr": 1e-3, "fused": fused}
    _, _, plain, tiered = run(tmp_path, homes, 12, clip, settings, overlap=overlap)
    assert plain == tiered


@pytest.mark.parametrize("where", ["host", "both"])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_on_the_host_round_close_by(tmp_path: Path, where: str, overlap: bool) -> None:
    theirs, weights, plain, tiered = run(
        tmp_path, "dram", 12, True, {"lr": 1e-3}, overlap=overlap, where=where
    )
    for one, other in zip(plain, tiered, strict=True):
        assert abs(one - other) < 0.02 * abs(one)
    for name, value in theirs.items():
        torch.testing.assert_close(weights[name], value, rtol=5e-2, atol=5e-3)
