"""Late state under Ctrl-C, at every line: going on gives what it would have."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short, first_times
from support_late_state import WIDTH, Pair, pair_of
from support_nn import assert_same

from tiermem.optim import ahead

STRIDE = int(os.environ.get("TIERMEM_CTRL_C_STRIDE", "32"))
"""Every so many lines are tried as they are come by first; with 1 all of them, all times."""
OFTEN = 25
"""Every so many times the stride lines are tried, too, whichever time it is."""
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


Cut = Callable[[Callable[[], Any]], str]
"""Makes a call and cuts it short; returns where, or nothing."""


def backward(loop: Loop, cut: Cut) -> str:
    loss, optimizer = loop.forward(), loop.pair.optimizer
    where = cut(loss.backward)
    if where:
        optimizer.zero_grad()
        loop.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    return where


def step(loop: Loop, cut: Cut) -> str:
    optimizer = loop.pair.optimizer
    loop.forward().backward()
    where = cut(optimizer.step)
    if where:
        optimizer.step()
    optimizer.zero_grad()
    return where


def clear(loop: Loop, cut: Cut) -> str:
    optimizer = loop.pair.optimizer
    loop.forward().backward()
    optimizer.step()
    where = cut(optimizer.zero_grad)
    optimizer.zero_grad()
    return where


def look(loop: Loop, cut: Cut) -> str:
    optimizer = loop.pair.optimizer
    loop.forward().backward()
    optimizer.step()
    optimizer.zero_grad()
    where = cut(optimizer.finish)
    if where and loop.pair.number % 2:
        optimizer.finish()
    return where


CUT: dict[str, Callable[[Loop, Cut], str]] = {
    "backward": backward,
    "step": step,
    "zero_grad": clear,
    "a look": look,
}


def numbers_of(what: str, loop: Loop, first: int) -> list[int]:
    """Returns numbers of lines to be cut short at, from one on, and one beyond the end.

    Lines are come by a dozen times, once for each layer. Two rounds are looked at: every other
    one leaves the state of a unit. Variants begin at different lines: together they try more.
    """
    found = list[int]()

    def look(call: Callable[[], Any]) -> str:
        found.extend(first_times(call, LINES))
        return ""

    for _ in range(2):
        CUT[what](loop, look)
        loop.end()
        loop.pair.step(2)
    end = max(found)
    if STRIDE == 1:
        return [*range(1, end + 1)]
    return sorted({*sorted(set(found))[first::STRIDE], *range(1, end // 2, OFTEN * STRIDE), end})


@pytest.mark.parametrize("what", sorted(CUT))
@pytest.mark.parametrize("settings", [{"lr": 0.01}, {"lr": 0.01, "fused": True}], ids=str)
@pytest.mark.one_in(2)
def test_a_round_cut_short_is_gone_on_with(
    what: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_IN_VAIN", 1 << 30)  # a round in vain now and then is no reason
    with pair_of(torch.optim.AdamW, settings) as pair:
        loop = Loop(pair)
        pair.step(4)
        numbers = numbers_of(what, loop, STRIDE // 2 * ("fused" in settings))
        for number in numbers:
            pair.step(2)
            assert pair.late
            where = CUT[what](loop, partial(cut_short, number=number, files=LINES))
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
        assert numbers[-1] > 100 and not where
        pair.check()
