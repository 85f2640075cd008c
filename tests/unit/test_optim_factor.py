"""A factor for gradients after their cast, norms in another dtype, and the host's share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.optim.host.share import choose_share


def build() -> nn.Sequential:
    """Bfloat16 layers of several sizes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))).bfloat16()


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """The loss of a batch."""
    generator = torch.Generator().manual_seed(number)
    return model(torch.randn(3, 48, generator=generator).bfloat16()).float().square().sum()


def by_hand(count: int, clip: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masters whose gradients are clipped: the norms and the weights in the end."""
    model = build()
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    norms = []
    for number in range(count):
        loss_of(model, number).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        norms.append(nn.utils.clip_grad_norm_(masters, clip))
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return norms, params


@pytest.mark.parametrize("overlap", [False, "forward", "auto"])
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_the_gradients_of_masters_is_bit_for_bit(overlap: Any, fused: bool) -> None:
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        settings = {"master_dtype": torch.float32, "overlap": overlap}
        if fused:
            settings["fused"] = True
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2, **settings)
        norms = []
        for number in range(4):
            loss_of(model, number).backward()
            norms.append(optimizer.grad_norm(dtype=torch.float32))
            optimizer.grad_factor = torch.clamp(0.5 / (norms[-1] + 1e-6), max=1.0)
            optimizer.step()
            assert optimizer.grad_factor is None  # for one step
            optimizer.zero_grad()
        expected, weights = by_hand(4, 0.5)
        if not fused:  # torch's fused kernel rounds otherwise
            assert norms == expected
        with tier.materialize(model):
            for mine, theirs in zip(model.parameters(), weights, strict=True):
                close = torch.equal if not fused else torch.allclose
                assert close(mine, theirs)
        assert norms[0].dtype is torch.float32
        assert norms[0] > 0.5


def test_a_factor_of_one_confirms_steps_made_inside_backward() -> None:
    for limit, in_vain in ((1e9, []), (20.0, [1])):
        norms, weights = by_hand(8, limit)
        assert [number for number in range(8) if norms[number] > limit] == in_vain
        with tiermem.TierManager("cpu", hbm="64KiB", dram="4MiB") as tier:
            model = tier.wrap(build())
            optimizer = tier.optimizer(
                model, torch.optim.AdamW, lr=1e-2, master_dtype=torch.float32
            )
            for number in range(8):
                loss_of(model, number).backward()
                norm = optimizer.grad_norm(dtype=torch.float32)
                optimizer.grad_factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
                optimizer.step()
                optimizer.zero_grad()
            first = 1  # has no steps ahead
            assert optimizer.stepped_in_backward == 4 * (8 - first - len(in_vain))
            with tier.materialize(model):
                assert all(map(torch.equal, model.parameters(), weights))


def test_the_host_applies_the_factor_too() -> None:
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        optimizer = tier.optimizer(
            model, torch.optim.SGD, lr=1.0, master_dtype=torch.float32, where="host"
        )
        with tier.materialize(model):
            before = [p.clone().float() for p in model.parameters()]
        loss_of(model, 0).backward()
        gradients = [p.grad.clone().float() for p in model.parameters()]
        optimizer.grad_factor = torch.tensor(0.25)
        optimizer.step()
        assert all(
            torch.equal(p.grad.float(), g)
            for p, g in zip(model.parameters(), gradients, strict=True)
        )
        optimizer.zero_grad()
        with tier.materialize(model):
            for param, old, gradient in zip(model.parameters(), before, gradients, strict=True):
                assert torch.equal(param, (old - gradient * 0.25).bfloat16())


def test_gradients_stay_and_zero_grad_forgets_the_factor() -> None:
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=1.0)
        loss_of(model, 0).backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.grad_norm()
        assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
        optimizer.grad_factor = torch.tensor(0.0)
        optimizer.zero_grad()
        assert optimizer.grad_factor is None


@pytest.mark.parametrize("factor", [0.5, torch.tensor([1.0]), torch.tensor([0.5, 2.0])])
def test_a_factor_that_is_no_number_in_a_tensor_is_refused_before_the_step(factor: Any) -> None:
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=1.0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(3):  # also where steps are made inside backward
            loss_of(model, 0).backward()
            optimizer.grad_factor = factor
            with pytest.raises(
                tiermem.StepError, match=r"grad_factor=.*must be None or a 0-d tensor"
            ):
                optimizer.step()
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
            optimizer.grad_factor = torch.tensor(0.0)
            optimizer.step()  # nothing is left of the one before
            optimizer.zero_grad()


def test_gradients_that_a_program_put_there_stay_too() -> None:
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=1.0)
        with tier.materialize(model):
            before = [p.clone() for p in model.parameters()]
        given = [torch.ones(p.shape, dtype=p.dtype) for p in model.parameters()]
        for param, gradient in zip(model.parameters(), given, strict=True):
            param.grad = gradient
        optimizer.grad_factor = torch.tensor(0.5)
        optimizer.step()
        assert all(map(torch.equal, given, map(torch.ones_like, given)))
        assert all(p.grad is g for p, g in zip(model.parameters(), given, strict=True))
        with tier.materialize(model):
            assert all(map(torch.equal, model.parameters(), [b - 0.5 for b in before]))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_hosts_share(share: float) -> None:
    chosen = choose_share([10] * 8, share)
    assert sum(chosen) == 8 * share
    if share == 0.5:  # evenly
        assert chosen in ([True, False] * 4, [False, True] * 4)
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        optimizer = tier.optimizer(
            model, torch.optim.AdamW, lr=1e-2, where="both", host_share=share
        )
        assert optimizer.speeds is None  # nothing had to be measured
        host = [unit for unit in optimizer._units if unit.host is not None]
        assert len(host) == len(optimizer._units) * share
        loss_of(model, 0).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("where", "share"), [("device", 0.5), ("both", 1.5), ("host", 1.0), ("both", "half")]
)
def test_a_share_without_both_sides_is_refused(where: Any, share: Any) -> None:
    with tiermem.TierManager("cpu", hbm="128KiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        with pytest.raises(tiermem.ConfigError, match="a share from 0 to 1"):
            tier.optimizer(model, torch.optim.AdamW, where=where, host_share=share)
