"""Late state under Ctrl-C, at every line: going on gives what it would have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_late_state import WIDTH, Pair, pair_of
from support_nn import assert_same

from tiermem.optim import ahead

STRIDE = int(os.environ.get("TIERMEM_CTRL_C_STRIDE", "61"))
"""Every so many lines are tried; with 1 all of them."""
LINES = ["optim/", "nn/groups/grads", "transfers/deferred", "core/residency"]


class Loop:
    """The parts of a round of both loops."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.x = torch.ones(1, WIDTH)

    def forward(self) -> torch.Tensor:
        pair = self.pair
        pair.number += 1
        self.x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(pair.number))
        pair.plain(self.x).square().mean().backward()
        return self.loss()

    def loss(self) -> torch.Tensor:
        return self.pair.model(self.x).square().mean()  # type: ignore[no-any-return]

    def end(self) -> None:
        self.pair.own.step()
        self.pair.own.zero_grad()


def backward(loop: Loop, number: int) -> str:
    loss, optimizer = loop.forward(), loop.pair.optimizer
    where = cut_short(loss.backward, number, LINES)
    if where:
        optimizer.zero_grad()
        loop.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    return where


def step(loop: Loop, number: int) -> str:
    optimizer = loop.pair.optimizer
    loop.forward().backward()
    where = cut_short(optimizer.step, number, LINES)
    if where:
        optimizer.step()
    optimizer.zero_grad()
    return where


def clear(loop: Loop, number: int) -> str:
    optimizer = loop.pair.optimizer
    loop.forward().backward()
    optimizer.step()
    where = cut_short(optimizer.zero_grad, number, LINES)
    optimizer.zero_grad()
    return where


def look(loop: Loop, number: int) -> str:
    optimizer = loop.pair.optimizer
    loop.forward().backward()
    optimizer.step()
    optimizer.zero_grad()
    where = cut_short(optimizer.finish, number, LINES)
    if where and number % 2:
        optimizer.finish()
    return where


CUT: dict[str, Callable[[Loop, int], str]] = {
    "backward": backward,
    "step": step,
    "zero_grad": clear,
    "a look": look,
}


@pytest.mark.parametrize("what", sorted(CUT))
@pytest.mark.parametrize("settings", [{"lr": 0.01}, {"lr": 0.01, "fused": True}], ids=str)
@pytest.mark.one_in(2)
def test_a_round_cut_short_is_gone_on_with(
    what: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_IN_VAIN", 1 << 30)  # a round in vain now and then is no reason
    with pair_of(torch.optim.AdamW, settings) as pair:
        loop, number, where = Loop(pair), 1, "-"
        pair.step(4)
        while where:
            pair.step(2)
            assert pair.late
            where = CUT[what](loop, number)
            loop.end()
            try:
                for mine, theirs in zip(
                    pair.plain.parameters(), pair.model.parameters(), strict=True
                ):
                    assert_same(mine.detach(), theirs * 1, "weight")
                if number % 3 == 0 or not where:
                    pair.check()
            except AssertionError as error:
                raise AssertionError(f"after Ctrl-C at {where}, line {number}") from error
            number += STRIDE
        assert number > 100
        pair.check()
