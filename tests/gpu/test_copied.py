"""Copies up that wait for the copy down of what was there, and not for compute since.

Training in little HBM, with compute that is late: a copy that came too early would be seen in the
weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiermem
from tiermem.core.copied import CopiedRuns

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
WIDTH, LAYERS, STEPS = 1024, 24, 8


class Late(torch.autograd.Function):
    """Keeps the compute stream busy for a while, forward and backward; returns its input."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradient, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(Late.apply(x, 5_000_000))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)]).cuda().bfloat16()


def train(model: nn.Module, optimizer) -> list[torch.Tensor]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def tiered(share: float, debug: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = build()
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    hbm = int(share * nbytes) // 4096 * 4096
    with tiermem.TierManager("cuda", hbm=hbm, dram=12 * nbytes) as tier:
        tier._manager.parts.transfers.poisons = debug
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        losses = train(model, optimizer)
    return losses, model.state_dict()


@pytest.mark.parametrize("poisons", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_bits_are_those_of_the_resident_model(
    share: float, poisons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = []
    was = CopiedRuns.was

    def asked(runs: CopiedRuns, start: int) -> bool:
        early.append(was(runs, start))
        return early[-1]

    monkeypatch.setattr(CopiedRuns, "was", asked)
    losses, weights = tiered(share, poisons)
    assert sum(early) > 150, "hardly any copy came without a wait for compute"
    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    assert all(map(torch.equal, losses, expected))
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight.cpu(), weights[name].cpu()), name
