"""Steps of Adam by one kernel on a CUDA device: torch's bits, and torch's counts of writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.optim.rules import adamstep
from tiermem.optim.rules.plainstep import run

pytestmark = pytest.mark.gpu

SHAPES = [(1024, 1031), (7,), (513, 1000), (1,), (8192,), (8193,), *([(64,)] * 70)]


def params(dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns many of odd sizes, the last of which begins between words."""
    source = torch.Generator("cuda").manual_seed(3)
    found = [
        torch.randn(s, generator=source, device="cuda").to(dtype) for s in (*SHAPES, (100001,))
    ]
    return [nn.Parameter(value) for value in (*found[:-1], found[-1][1:])]


def compare(mine: Any, theirs: Any) -> None:
    for one, other in zip(mine.state.items(), theirs.state.items(), strict=True):
        pairs = [(one[0], other[0]), *((one[1][key], other[1][key]) for key in sorted(other[1]))]
        for a, b in pairs:
            kind = torch.int16 if a.dtype is torch.bfloat16 else torch.int32
            assert torch.equal(a.detach().view(kind), b.detach().view(kind))
            assert a._version == b._version


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95)])
def test_bits_and_writes_are_torchs(
    cls: Any, dtype: torch.dtype, decay: float, maximize: bool, betas: tuple[float, float]
) -> None:
    made = [
        cls(params(dtype), lr=1e-3, weight_decay=decay, maximize=maximize, betas=betas)
        for _ in range(2)
    ]
    mine, theirs = made
    source = torch.Generator("cuda").manual_seed(4)
    for number in range(4):
        for p, q in zip(*(o.param_groups[0]["params"] for o in made), strict=True):
            grad = torch.randn(p.shape, generator=source, device="cuda") * 10.0 ** (number - 3)
            p.grad, q.grad = grad.to(dtype), grad.to(dtype)
        own = type(mine).step.__wrapped__
        assert adamstep.step_at_once(mine, own) is (number > 0)  # state is torch's to make
        if not number:
            run(mine)
        own(theirs)
        compare(mine, theirs)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.3, 8.0])
def test_training_equals_resident(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that stream, and blocks that stay; the kernel makes all steps but the first."""
    made = []
    step = adamstep.step_at_once

    def noted(*args: Any) -> bool:
        made.append(step(*args))
        return made[-1]

    monkeypatch.setattr("tiermem.optim.rules.plainstep.step_at_once", noted)
    seen = []
    for tiered in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).to("cuda", dtype)
        hbm = int(share * 4 * sum(p.nbytes for p in model.parameters())) // 4096 * 4096
        with tiermem.TierManager("cuda", hbm=hbm, dram="1GiB") as tier:
            if tiered:
                model = tier.wrap(model)
                optimizer: Any = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses = []
            for number in range(6):
                torch.manual_seed(number)
                loss = (
                    model(torch.randn(8, 1024, device="cuda", dtype=dtype)).float().square().mean()
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            seen.append((losses, [p.detach().cpu() for p in model.parameters()]))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))
    assert made.count(True) >= 5, "the kernel has made steps"
