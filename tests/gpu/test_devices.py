"""Two CUDA devices in one process, each with its manager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiermem

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WIDTH = 512
DEVICES = ("cuda:0", "cuda:1")


def build(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers).to(device)


def step(model: nn.Module, stepper: torch.optim.Optimizer, device: str, seed: int) -> torch.Tensor:
    made = torch.Generator(device).manual_seed(seed)
    x = torch.randn(16, WIDTH, device=device, generator=made)
    stepper.zero_grad()
    loss = F.mse_loss(model(x), x)
    loss.backward()
    stepper.step()
    return loss.detach()


@pytest.mark.parametrize("current", DEVICES)
def test_training_on_both_in_turn_equals_resident(current: str) -> None:
    settings = {"lr": 1e-2, "momentum": 0.9}
    expected = {}
    for device in DEVICES:
        plain = build(device)
        stepper = torch.optim.SGD(plain.parameters(), **settings)
        losses = [step(plain, stepper, device, seed) for seed in range(6)]
        expected[device] = (losses, plain.state_dict())
    with (
        torch.cuda.device(current),  # a manager's work does not depend on it
        tiermem.TierManager(DEVICES[0], hbm="8MiB", dram="64MiB") as first,
        tiermem.TierManager(DEVICES[1], hbm="9MiB", dram="64MiB") as second,
    ):
        pairs = []
        for tier, device in zip((first, second), DEVICES, strict=True):
            model = tier.wrap(build(device))
            pairs.append((model, tier.optimizer(model, torch.optim.SGD, **settings), device))
        for seed in range(6):
            for model, stepper, device in pairs:
                loss = step(model, stepper, device, seed)
                assert torch.equal(loss, expected[device][0][seed])
        for model, _, device in pairs:
            state = model.state_dict()
            for name, value in expected[device][1].items():
                assert torch.equal(value.cpu(), state[name].cpu()), (device, name)
        assert first.stats().evictions and second.stats().evictions
        assert torch.cuda.current_device() == torch.device(current).index


def test_a_tensor_goes_from_one_device_to_the_other() -> None:
    """A pipeline: the first half of the layers on one device, the second on the other."""
    made = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, WIDTH, generator=made) for _ in range(6)]
    with (
        torch.no_grad(),
        tiermem.TierManager(DEVICES[0], hbm="4MiB", dram="64MiB") as first,
        tiermem.TierManager(DEVICES[1], hbm="4MiB", dram="64MiB") as second,
    ):
        expected = [build(DEVICES[1])(build(DEVICES[0])(x.cuda(0)).to(DEVICES[1])) for x in inputs]
        a, b = first.wrap(build(DEVICES[0])), second.wrap(build(DEVICES[1]))
        outputs = [b(a(x.cuda(0)).to(DEVICES[1])) for x in inputs]
        for output, value in zip(outputs, expected, strict=True):
            assert torch.equal(output, value)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_up_packed_on_a_device_that_is_not_the_current_one(device: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)])
    plain, x = plain.to(device, torch.bfloat16).eval(), torch.randn(4, 2048, dtype=torch.bfloat16)
    model = copy.deepcopy(plain)
    with (
        torch.no_grad(),
        torch.cuda.device(DEVICES[1 - DEVICES.index(device)]),
        tiermem.TierManager(device, hbm="96MiB", dram="512MiB") as tier,
    ):
        tier.wrap(model)
        for _ in range(4):
            assert torch.equal(model(x.to(device)), plain(x.to(device)))
        assert tier.stats().packed_in_dram > 0
