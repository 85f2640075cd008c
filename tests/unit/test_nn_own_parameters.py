"""Many parameters that a module has as its own: where HBM is less, each is brought for its use."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from support_nn import asked_for, assert_trained_alike, same_bits
from torch import nn
from torch.nn import functional

import tiermem

LAYERS, WIDTH = 12, 64
MATRIX = WIDTH * WIDTH * 4
NBYTES = LAYERS * MATRIX
POLICY: Any = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")


class Own(nn.Module):
    """As programs are written by hand: matrices and biases, w0 to w11 and b0 to b11."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(LAYERS):
            setattr(self, f"w{number}", nn.Parameter(torch.randn(WIDTH, WIDTH) / 8))
            setattr(self, f"b{number}", nn.Parameter(torch.randn(WIDTH)))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in range(LAYERS):
            w, b = getattr(self, f"w{n}"), getattr(self, f"b{n}")
            x = x + torch.tanh(functional.linear(x, w, b))
        out: torch.Tensor = self.out(x)
        return out


class Inside(nn.Module):
    """Such a module between others, one of which has a weight of it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.own = Own()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.own.w3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.own(self.first(x)))
        return out


KINDS = {"root": Own, "inside": Inside}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_forward_needs_room_for_a_few_of_them(kind: str, gradients: bool) -> None:
    model, plain = build(kind), build(kind)
    x, hbm = torch.randn(3, WIDTH), NBYTES // 2
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        tier.wrap(model.requires_grad_(gradients))
        for _ in range(4):
            with torch.no_grad():
                assert same_bits(model(x), plain(x))
        assert tier.stats().peak["hbm"] <= hbm
        before = tier.stats().links["dram->hbm"].nbytes
        with torch.no_grad():
            model(x)
        assert tier.stats().links["dram->hbm"].nbytes - before < NBYTES + 4 * MATRIX
    assert all(map(same_bits, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", ["auto", False])
def test_they_are_trained_as_resident(kind: str, overlap: Any) -> None:
    model, plain = build(kind), build(kind)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found = tiermem.budgets_for(
        model, torch.optim.AdamW, hbm=6 * MATRIX, policy=POLICY, device="cpu", overlap=overlap
    )
    assert found.hbm <= 7 * MATRIX
    with tiermem.TierManager("cpu", hbm=found.hbm, dram=found.dram, policy=POLICY) as tier:
        tier.wrap(model)
        mine = tier.optimizer(model, torch.optim.AdamW, lr=1e-2, overlap=overlap)
        assert_trained_alike(model, mine, plain, theirs, WIDTH)
        assert tier.stats().peak["hbm"] <= found.hbm


def test_where_hbm_has_room_for_them_they_are_one_block() -> None:
    with tiermem.TierManager("cpu", hbm=2 * NBYTES, dram="4MiB") as tier:
        tier.wrap(build("root"))
        assert "Own" in {row.block for row in tier.residency()}


def test_a_weight_and_a_bias_are_counted_and_more_at_once_are_refused_by_name() -> None:
    class All(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.cat([getattr(self, f"w{n}") for n in range(LAYERS)], 1)

    torch.manual_seed(0)
    model = All().eval()
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with tiermem.TierManager("cpu", hbm=NBYTES // 2, dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model)
        with pytest.raises(tiermem.CapacityError, match="does not fit in tier hbm"):
            model(x)
        assert same_bits(model.w3.t().clone(), plain.w3.t())


def test_a_budget_that_cannot_work_is_refused_with_one_that_does() -> None:
    model, plain = build("root"), build("root")
    with (
        tiermem.TierManager("cpu", hbm=4096, dram="4MiB", policy=POLICY) as tier,
        pytest.raises(tiermem.CapacityError, match="hbm= at least") as refused,
    ):
        tier.wrap(model)
    least = asked_for(refused.value)["hbm"]
    assert least <= 6 * MATRIX
    with tiermem.TierManager("cpu", hbm=least, dram="4MiB", policy=POLICY) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        assert same_bits(model(torch.ones(3, WIDTH)), plain(torch.ones(3, WIDTH)))
        for _ in range(2):
            model(torch.ones(3, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_kinds_of_torchs_own_are_used_as_a_whole() -> None:
    class Mine(nn.LSTM):
        pass

    with (
        tiermem.TierManager("cpu", hbm="200KiB", dram="8MiB") as tier,
        pytest.raises(tiermem.CapacityError, match=r"Mine has its own 32 parameters"),
    ):
        tier.wrap(Mine(64, 64, 8))
