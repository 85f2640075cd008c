"""Lists of parameters that are larger than blocks shall be: each is brought as it is looked up."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from support_nn import asked_for, assert_trained_alike, same_bits
from torch import nn

import tiermem

LAYERS, WIDTH = 12, 64
NBYTES = LAYERS * WIDTH * WIDTH * 4
TIGHT = 1 << 16


class Listed(nn.Module):
    """All of its weights are in a list, or in a dictionary, of one module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(LAYERS)]
        named = {f"w{number}": weight for number, weight in enumerate(weights)}
        self.kind = kind
        self.weights: Any = nn.ParameterDict(named) if kind == "dict" else nn.ParameterList(weights)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = [f"w{n}" if self.kind == "dict" else n for n in range(LAYERS)]
        if self.kind == "iterated":
            for weight in self.weights:
                x = x + torch.tanh(x @ weight)
        else:
            for name in names:
                x = x + torch.tanh(x @ self.weights[name])
        return self.out(x)


KINDS = ["list", "dict", "iterated"]
POLICY: Any = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_forward_needs_room_for_a_few_of_them(kind: str, gradients: bool) -> None:
    torch.manual_seed(0)
    model = Listed(kind)
    plain = deepcopy(model)
    x = torch.randn(3, WIDTH)
    hbm = NBYTES // 2
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        tier.wrap(model.requires_grad_(gradients))
        assert len({row.block for row in tier.residency()}) > 4
        for _ in range(4):
            with torch.no_grad():
                assert same_bits(model(x), plain(x))
        assert tier.stats().peak["hbm"] <= hbm
        state = plain.state_dict()
        assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
    assert all(map(same_bits, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", ["auto", False])
def test_they_are_trained_as_resident(kind: str, overlap: Any) -> None:
    torch.manual_seed(0)
    model = Listed(kind)
    plain = deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found = tiermem.budgets_for(
        model, torch.optim.AdamW, hbm=TIGHT, policy=POLICY, device="cpu", overlap=overlap
    )
    with tiermem.TierManager("cpu", hbm=found.hbm, dram=found.dram, policy=POLICY) as tier:
        tier.wrap(model)
        mine = tier.optimizer(model, torch.optim.AdamW, lr=1e-2, overlap=overlap)
        assert_trained_alike(model, mine, plain, theirs, WIDTH)
        assert tier.stats().peak["hbm"] <= found.hbm <= TIGHT


def test_a_budget_that_cannot_work_is_refused_with_one_that_does() -> None:
    """One of them at a time is counted, not all."""
    model = Listed("list")
    with (
        tiermem.TierManager("cpu", hbm=5 * 4096, dram="4MiB", policy=POLICY) as tier,
        pytest.raises(tiermem.CapacityError, match="hbm= at least") as refused,
    ):
        tier.wrap(model)
        tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
    least = asked_for(refused.value)["hbm"]
    assert least <= TIGHT
    with tiermem.TierManager("cpu", hbm=least, dram="4MiB", policy=POLICY) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for _ in range(2):
            model(torch.ones(3, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_largest_of_them_has_room_beside_what_the_call_around_them_holds() -> None:
    class Around(Listed):
        def __init__(self) -> None:
            super().__init__("list")
            self.own = nn.Parameter(torch.zeros(4 * WIDTH * WIDTH))
            self.out = nn.Identity()  # type: ignore[assignment]

    with tiermem.TierManager("cpu", hbm=NBYTES // 2, dram="4MiB") as tier:
        tier.wrap(Around())
        blocks = {record.block.name: record.block.nbytes for record in tier._manager.parts.table}
        parts = [nbytes for name, nbytes in blocks.items() if "weights[" in name]
        assert tier._runtime.program.worst_chain == blocks["Around"] + max(parts)


def test_a_list_that_is_small_stays_a_part_of_its_modules_block() -> None:
    model = Listed("list")
    with tiermem.TierManager("cpu", hbm=64 * NBYTES, dram="4MiB") as tier:
        tier.wrap(model)
        assert not any("weights" in row.block for row in tier.residency())
