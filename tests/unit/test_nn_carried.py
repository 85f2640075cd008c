"""Tensors that parameters and modules carry along over a parameter's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_nn import same_bits
from torch import nn

import tiermem

WIDTH, LAYERS = 32, 6
BYTES = WIDTH * WIDTH


class Coded(nn.Module):
    """A layer of 8-bit codes as libraries have them: the weight is given its codes in each call."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight.codes = self.weight.data  # type: ignore[attr-defined]
        self.state: Any = SimpleNamespace(codes=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state.codes is None:
            self.state.codes, self.weight.codes = self.weight.codes, None  # type: ignore[attr-defined]
        y = x @ self.state.codes.float() / 256
        self.weight.data = self.state.codes
        return y


class Twice(nn.Module):
    """A layer that uses its weight by a second tensor over the same memory as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.same = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) + (x @ self.same)


def stack(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(LAYERS)])


def manager(hbm: int) -> tiermem.TierManager:
    return tiermem.TierManager("cpu", hbm=hbm, dram="1MiB")


@pytest.mark.parametrize("called", [False, True], ids=["new", "called before"])
def test_codes_come_and_go_with_their_weight(called: bool) -> None:
    """They would keep a second copy in HBM, from which each call wrote the weight home."""
    x = torch.randn(4, WIDTH)
    plain, model = stack(Coded), stack(Coded)
    expected = plain(x)
    if called:
        model(x)
    owner = model[0].state if called else model[0].weight
    before = owner.codes.untyped_storage()._weak_ref()
    with manager(hbm=4 * 4096) as tier:
        tier.wrap(model)
        gc.collect()
        assert torch.UntypedStorage._expired(before), "what was there before is in memory still"
        for _ in range(3):
            assert same_bits(model(x), expected)
        links = tier.stats().links
        assert links["dram->hbm"].nbytes > LAYERS * BYTES
        assert "hbm->dram" not in links or not links["hbm->dram"].nbytes
        assert same_bits(model[0].state.codes, plain[0].weight)
        copied = deepcopy(model)
        assert same_bits(copied(x), expected)
    assert same_bits(model(x), expected)
    assert model[0].state.codes.data_ptr() == model[0].weight.data_ptr()
    torch.UntypedStorage._free_weak_ref(before)


def trained(model: Any, make: Callable[[Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = make(model)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_second_tensor_over_a_weight_sees_what_steps_write() -> None:
    plain, model = stack(Twice), stack(Twice)
    expected = trained(plain, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    with manager(hbm=16 * 4096) as tier:
        tier.wrap(model)
        found = trained(model, lambda m: tier.optimizer(m, torch.optim.AdamW, lr=1e-2))
        assert all(map(same_bits, found, expected))
        assert same_bits(model[2].same, plain[2].weight)
    assert all(same_bits(a.same, b.same) for a, b in zip(model, plain, strict=True))
    assert model[2].same.data_ptr() == model[2].weight.data_ptr()


def assign_weight(layer: Any) -> None:
    layer.weight.data = torch.ones(WIDTH, WIDTH)


def assign_second(layer: Any) -> None:
    layer.same.data = torch.ones(WIDTH, WIDTH)


def write_second(layer: Any) -> None:
    layer.same.mul_(2)


def assign_each_other(layer: Any) -> None:
    layer.weight.data = layer.same
    layer.same.add_(1)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a call"])
@pytest.mark.parametrize("change", [assign_weight, assign_second, write_second, assign_each_other])
def test_assigning_and_writing_either(change: Callable[[Any], None], inside: bool) -> None:
    def run(model: Any) -> list[torch.Tensor]:
        found = [model(x)]
        if inside:
            hook = model[1].register_forward_pre_hook(lambda layer, _: change(layer))
            found.append(model(x))
            hook.remove()
        else:
            change(model[1])
        found += [model(x), model[1].weight.detach().clone(), model[1].same.clone()]
        with torch.no_grad():
            model[1].weight.mul_(3)
        return [*found, model[1].weight.detach().clone(), model[1].same.clone()]

    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        expected = run(stack(Twice))
        model = stack(Twice)
        with manager(hbm=12 * 4096) as tier:
            tier.wrap(model)
            assert all(map(same_bits, run(model), expected))
        assert same_bits(model[1].same, expected[-1])
        assert same_bits(model[1].weight, expected[-2])
