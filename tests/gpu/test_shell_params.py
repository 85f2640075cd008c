"""Weights that wrap other tensors: parameters of the host become ones of the device, and back."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from support_nn import same_bits, step_alike
from support_shells import LAYER, WIDTH, Assigning, Nested, Noting, Quantized, quantized
from torch import nn
from torch.nn import functional

import tiermem
from tiermem.nn.tensors.shells import insides

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
HBM = 3 * LAYER // 4096 * 4096


def on_device(model: Any) -> Any:
    """Returns a copy whose weights are on the device, made as torch makes it."""
    found = copy.deepcopy(model)
    for module in found.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                moved = param.detach().to("cuda")
                module._parameters[name] = nn.Parameter(moved, requires_grad=param.requires_grad)
    return found


@pytest.mark.parametrize(
    "kind", [Quantized, Assigning, Nested, Noting], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
def test_they_are_of_the_device_while_wrapped(kind: type[Quantized], made_on: str) -> None:
    model = quantized(kind)
    plain = on_device(model)
    if made_on == "cuda":
        model = on_device(model)
    params = list(model.parameters())
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    with tiermem.TierManager("cuda", hbm=HBM, dram="4MiB") as tier:
        tier.wrap(model)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        for _ in range(4):
            assert same_bits(model(x), plain(x))
        weight, other = model[3].wide.weight, plain[3].wide.weight
        assert same_bits(functional.linear(x, weight), functional.linear(x, other))
        with torch.no_grad():
            for each in (model, plain):
                each[3].wide.weight.copy_(each[1].wide.weight.detach())
        assert same_bits(model(x), plain(x))
        with tier.materialize(weight):
            assert weight.device.type == "cpu"
            assert all(t.device.type == "cpu" for _, t in insides(weight))
        assert weight.device.type == "cuda"
        assert same_bits(model(x), plain(x))
        state = model.state_dict()
        assert {value.device.type for value in state.values()} == {"cpu"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(t.device.type == "cpu" for p in model.parameters() for _, t in insides(p))
    assert same_bits(on_device(model)(x), plain(x))


def test_gradients_through_them() -> None:
    model = quantized(layers=8)
    plain = on_device(model)
    for each in (model, plain):
        for layer in each:
            layer.adapter.requires_grad_(True)
    with tiermem.TierManager("cuda", hbm=HBM, dram="8MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        other = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
            losses = [each(x).float().square().mean() for each in (model, plain)]
            step_alike(losses, (optimizer, other))


def test_one_that_is_referred_to_weakly() -> None:
    """torch exchanges no such tensor, so it cannot become one of the device, nor of the host."""
    model = quantized(layers=2)
    kept = weakref.ref(model[0].wide.weight)
    with tiermem.TierManager("cuda", hbm=8 * LAYER, dram="4MiB") as tier:
        with pytest.raises(tiermem.WrapError, match="weak"):
            tier.wrap(model)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        del kept
        expected = model(torch.ones(2, WIDTH, dtype=torch.bfloat16))
        tier.wrap(model)
        kept = weakref.ref(model[0].wide.weight)
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16, device="cuda"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert same_bits(model(torch.ones(2, WIDTH, dtype=torch.bfloat16)), expected)
    assert kept() is not model[0].wide.weight
