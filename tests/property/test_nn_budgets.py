"""The least budget that an error names works, and a page less is refused."""

from __future__ import annotations

import copy
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers, asked_for, assert_same, check_table, seed, wrap_tight
from torch import nn

import tiermem


class Block(nn.Module):
    """Layers of uneven sizes, some of them deeper inside."""

    def __init__(self, width: int, inside: int, deep: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, inside)
        self.norm = nn.LayerNorm(inside)
        inner = nn.Sequential(
            nn.Linear(inside, 2 * inside), nn.GELU(), nn.Linear(2 * inside, inside)
        )
        self.inner: nn.Module = nn.ModuleList([inner]) if deep else inner
        self.last = nn.Linear(inside, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner[0] if isinstance(self.inner, nn.ModuleList) else self.inner
        return x + self.last(inner(torch.relu(self.norm(self.first(x)))))


class Net(nn.Module):
    def __init__(self, width: int, layers: list[tuple[int, bool]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width, inside, deep) for inside, deep in layers)
        self.own = nn.Parameter(torch.randn(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.own
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.t()


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
]
BLOCKS: dict[str, Any] = {
    "auto": "auto",
    "whole": [],
    "finest": lambda name, module: not list(module.children()),
}


@settings(max_examples=examples(8, 500))
@given(
    width=st.integers(1, 70),
    layers=st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=4),
    optimizer=st.sampled_from(OPTIMIZERS),
    blocks=st.sampled_from(sorted(BLOCKS)),
)
def test_the_least_budget_works(
    width: int, layers: list[tuple[int, bool]], optimizer: Any, blocks: str
) -> None:
    def build() -> nn.Module:
        seed(5)
        return Net(width, layers)

    plain = build()
    plain_optimizer = optimizer[0](plain.parameters(), **optimizer[1])
    tier, model, stepper = wrap_tight(build, Tiers("dram"), optimizer, BLOCKS[blocks])
    with tier:
        least = tier._manager.parts.settings.hbm
        for number in range(3):
            for which, step in ((plain, plain_optimizer), (model, stepper)):
                seed(number)
                which(torch.randint(0, 50, (2, 3))).square().mean().backward()
                step.step()
                step.zero_grad()
            with torch.no_grad():
                seed(number)
                model(torch.randint(0, 50, (2, 3)))
        check_table(tier)
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    with (
        tiermem.TierManager(device="cpu", hbm=least - 4096, dram="16MiB") as smaller,
        pytest.raises(tiermem.CapacityError, match="hbm= at least"),
    ):
        stuck = smaller.wrap(build(), BLOCKS[blocks])
        smaller.optimizer(stuck, optimizer[0], **optimizer[1])


HOMES = st.sampled_from(["hbm", "dram", "nvme", "auto"])


@settings(max_examples=examples(5, 300), deadline=None)
@given(
    width=st.integers(1, 60),
    layers=st.lists(st.tuples(st.integers(1, 80), st.booleans()), min_size=1, max_size=3),
    blocks=st.sampled_from(sorted(BLOCKS)),
    homes=st.fixed_dictionaries({"params": HOMES, "grads": HOMES, "optimizer": HOMES}),
    hbm=st.sampled_from([4096, 1 << 16, 1 << 24]),
    dram=st.sampled_from([1 << 19, 1 << 24]),
    tight=st.booleans(),
)
def test_one_retry_does_and_hardly_less_would(
    width: int,
    layers: list[tuple[int, bool]],
    blocks: str,
    homes: Any,
    hbm: int,
    dram: int,
    tight: bool,
) -> None:
    """What a refused AdamW program is told works at once; an eighth less of HBM does not."""

    def run(budgets: dict[str, int]) -> nn.Module:
        seed(5)
        model = Net(width, layers)
        tier = tiermem.TierManager("cpu", nvme=gettempdir(), policy=homes, **budgets)
        try:
            tier.wrap(model, BLOCKS[blocks])
            train(model, tier.optimizer(model, torch.optim.AdamW, lr=0.01))
            tier.close()
        finally:
            tier.close(discard=True)
        return model

    def train(model: nn.Module, optimizer: Any) -> None:
        for number in range(2):
            seed(number)
            model(torch.randint(0, 50, (2, 3))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    budgets = {"hbm": hbm, "dram": dram, "nvme_bytes": 4096 if tight else 1 << 26}
    asked: dict[str, int] = {}
    try:
        model = run(budgets)
    except tiermem.CapacityError as error:
        asked = asked_for(error)
        assert asked, str(error)
        model = run({**budgets, **asked})
    seed(5)
    plain = Net(width, layers)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    less = asked.get("hbm", 0) * 7 // 8 // 4096 * 4096
    if less > hbm:
        with pytest.raises(tiermem.CapacityError):
            run({**budgets, **asked, "hbm": less})


def test_the_least_dram_works() -> None:
    def build() -> nn.Module:
        seed(5)
        return Net(16, [(32, False), (48, True)])

    tier, model, stepper = wrap_tight(build, Tiers("dram", dram=4096), OPTIMIZERS[1])
    with tier:
        plain = build()
        before = copy.deepcopy(plain.state_dict())
        assert_same(dict(before), dict(model.state_dict()), "state")
        for number in range(2):
            seed(number)
            model(torch.randint(0, 50, (2, 3))).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        check_table(tier)


def test_homes_in_hbm_that_do_not_fit_are_asked_for_together() -> None:
    """Not one block after another, a budget at a time."""
    budget, rounds = 1 << 16, 0
    while True:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        try:
            with tiermem.TierManager("cpu", hbm=budget, dram="1MiB", policy="hbm") as tier:
                tier.wrap(model)
                optimizer = tier.optimizer(model, torch.optim.AdamW)
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
            break
        except tiermem.CapacityError as error:
            least = asked_for(error)["hbm"]
        assert least > budget
        budget, rounds = least, rounds + 1
    assert rounds <= 4
