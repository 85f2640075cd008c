"""On a CUDA device: adapters on streamed weights give the bits of the same adapters, resident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.v_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.v_proj(torch.tanh(self.q_proj(self.norm(x))))


def build(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [Layer(512) for _ in range(8)]
    model = nn.Sequential(nn.Embedding(256, 512), *layers).to(device, dtype)
    tiermem.add_adapters(model, tiermem.Lora(r=8, dropout=0.1))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        tokens = torch.randint(0, 256, (4, 64), device="cuda")
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_adapters(dtype: torch.dtype, home: str, tmp_path: Path) -> None:
    resident = build("cuda", dtype)
    own = [param for param in resident.parameters() if param.requires_grad]
    expected = train(resident, torch.optim.AdamW(own, lr=1e-2))
    model = build("cpu", dtype)
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    budgets = {"hbm": frozen // 2 + (8 << 20), "dram": "256MiB", "nvme": tmp_path}
    with tiermem.TierManager(**budgets, policy={"params": home}) as tier:
        tier.wrap(model)
        own = [param for param in model.parameters() if param.requires_grad]
        optimizer = tier.optimizer(own, torch.optim.AdamW, lr=1e-2)
        assert train(model, optimizer) == expected
        links = tier.stats().links
        assert not any(name in links for name in ("hbm->dram", "hbm->nvme"))
        mine = model.state_dict()
        for name, tensor in resident.state_dict().items():
            assert torch.equal(mine[name], tensor.cpu()), name
