"""One parameter that is most of HBM, or more with its gradient and state: the bits of plain torch.

Budgets are drawn from what has to do to plenty; plain torch is the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import assert_same, check_table, seed
from torch import nn
from torch.nn import functional

import tiermem

WIDTH = 32
PAGE = 4096


class Tied(nn.Module):
    """An embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :3].abs().mul(1000).long() % 2048
        return functional.linear(self.inner(self.embed(ids)), self.embed.weight)


class Looked(Tied):
    """An embedding that is only looked up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embed(x[:, :3].abs().mul(1000).long() % 2048))


class Wide(nn.Module):
    """A large matrix with a bias in the same block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.inner(x))


class ByHand(nn.Module):
    """A parameter of the root, used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048, WIDTH) * 0.1)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.inner(x), self.weight)


class Convolved(nn.Module):
    """A large kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.t()[None])


class Stacked(nn.Module):
    """Two parameters of ``[experts, ...]`` in one block, by batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, WIDTH, 128) * 0.1)
        self.down = nn.Parameter(torch.randn(8, 128, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(torch.bmm(x.expand(8, -1, -1), self.up))
        return torch.bmm(inner, self.down).sum(0)


MODELS: list[Callable[[], nn.Module]] = [Tied, Looked, Wide, ByHand, Convolved, Stacked]
SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


class Pair:
    """A model resident, and the same one in the tiers, with default settings."""

    def __init__(
        self, make: Callable[[], nn.Module], case: Any, dtype: torch.dtype, hbm: int, masters: bool
    ) -> None:
        seed(3)
        self.plain = make().to(dtype)
        cls, options = case
        options = {"lr": 0.01, **options}
        self.params = list(self.plain.parameters())
        self.masters = [p.detach().float().requires_grad_() if masters else p for p in self.params]
        self.by_hand = cls(self.masters, **options)
        self.tier = tiermem.TierManager(device="cpu", hbm=hbm, dram="16MiB")
        try:
            self.model = self.tier.wrap(copy.deepcopy(self.plain))
            more = {"master_dtype": torch.float32} if masters else {}
            self.optimizer: Any = self.tier.optimizer(self.model, cls, **options, **more)
        except BaseException:
            self.tier.close(discard=True)
            raise

    def backward(self, number: int) -> None:
        for model in (self.plain, self.model):
            loss_of(model, number).backward()

    def step(self) -> None:
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()
        self.by_hand.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def check(self) -> None:
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        mine = self.optimizer.state_dict()["state"]
        theirs = self.by_hand.state_dict()["state"]
        assert_same(theirs, {key: mine[key] for key in theirs}, "state")
        for param, twin in zip(self.params, self.model.parameters(), strict=True):
            assert (param.grad is None) == (twin.grad is None)
            if param.grad is not None and twin.grad is not None:
                assert_same(param.grad, twin.grad.clone(), "gradient")
        stats = self.tier.stats()
        assert stats.peak["hbm"] <= stats.budget["hbm"]
        check_table(self.tier)


@contextmanager
def pair(
    make: Callable[[], nn.Module], case: Any, dtype: torch.dtype, hbm: int, masters: bool
) -> Iterator[Pair]:
    found = Pair(make, case, dtype, hbm, masters)
    try:
        yield found
    finally:
        found.tier.close(discard=True)


def sizes_of(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of all weights, and of the largest parameter."""
    sizes = [p.numel() * dtype.itemsize for p in make().parameters()]
    return sum(sizes), max(sizes)


@settings(max_examples=examples(12, 400))
@given(
    make=st.sampled_from(MODELS),
    case=st.sampled_from(SETTINGS),
    kind=st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]),
    share=st.floats(0, 1),
)
def test_weights_and_gradient_fit_and_the_state_does_not(
    make: Any, case: Any, kind: tuple[torch.dtype, bool], share: float
) -> None:
    dtype, masters = kind
    weights, largest = sizes_of(make, dtype)
    hbm = weights + largest + (12 + round(share * 400)) * PAGE
    with pair(make, case, dtype, hbm, masters) as twins:
        for number in range(2):
            twins.backward(number)
            twins.step()
            twins.zero_grad()
        twins.check()
