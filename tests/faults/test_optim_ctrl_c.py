"""An optimizer under Ctrl-C, at every line of its code: going on gives what it would have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_ctrl_c import Stop, cut_short
from support_nn import Tiers, same_bits
from support_optim import Layer, Twins, loss_of
from torch import nn

from tiermem.optim.units.parted import PartedUnit

STRIDE = int(os.environ.get("TIERMEM_CTRL_C_STRIDE", "97"))
"""Every so many lines are tried; with 1 all of them."""
OPTIM = ["optim/"]


class Small(nn.Module):
    """A tied embedding and two layers."""

    def __init__(self, rows: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.layers = nn.ModuleList([Layer(8, 8), Layer(8, 12)])
        self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embed.weight)


KINDS: dict[str, tuple[Tiers, dict[str, Any]]] = {
    "streaming": (Tiers("tight"), {}),
    "staying": (Tiers("roomy", extra_hbm=1 << 20), {}),
    "home in hbm": (Tiers("hbm", policy="hbm", extra_hbm=1 << 16), {}),
    "without masters": (Tiers("tight"), {"master_dtype": None}),
    "forward": (Tiers("roomy", extra_hbm=1 << 16), {"overlap": "forward"}),
    "host": (Tiers("tight"), {"where": "host"}),
    "host and forward": (Tiers("tight"), {"where": "host", "overlap": "forward"}),
    "in runs": (Tiers("tight"), {}),
    "in runs, without masters": (Tiers("tight"), {"master_dtype": None}),
    "in runs, forward": (Tiers("tight"), {"overlap": "forward"}),
    "one call": (Tiers("roomy", extra_hbm=1 << 20), {}),
    "one call, streaming": (Tiers("tight"), {}),
    "one call, without masters": (Tiers("roomy", extra_hbm=1 << 20), {"master_dtype": None}),
    "one call, forward": (Tiers("roomy", extra_hbm=1 << 16), {"overlap": "forward"}),
}


def twins(kind: str) -> Twins:
    tiers, options = KINDS[kind]
    kernel = "fused" if kind.startswith("one call") else "foreach"
    rows = 1024 if kind.startswith("in runs") else 20
    settings = {"lr": 0.01, kernel: kernel == "fused"}
    found = Twins(lambda: Small(rows), tiers, settings=settings, **options)
    units = [unit for unit in found.optimizer._units if isinstance(unit, PartedUnit)]
    assert (rows > 20) == any(unit.entries[0].unit.runs for unit in units)
    return found


def every_line(call: Callable[[int], str], check: Callable[[], None]) -> None:
    """Cuts a call short before one line after the other, until no line is left."""
    number, where = 1, "-"
    while where:
        where = call(number)
        if (number // STRIDE) % 8 == 0 or not where or STRIDE == 1:
            try:
                check()
            except AssertionError as error:
                raise AssertionError(f"after Ctrl-C at {where}, line {number}") from error
        number += STRIDE
    assert number > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_a_step_cut_short_is_gone_on_with(kind: str) -> None:
    """``step()`` once more, and all is as if nothing had happened."""
    with twins(kind) as pair:
        pair.backward(0)
        pair.step()

        def step(number: int) -> str:
            pair.backward(number)
            if number % 2:
                pair.clip_norm(0.5)
            pair.by_hand.step()
            where = cut_short(pair.optimizer.step, number, OPTIM)
            if where:
                pair.optimizer.step()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            return where

        every_line(step, pair.check)


@pytest.mark.parametrize("kind", ["forward", "host and forward", "in runs, forward"])
def test_a_forward_cut_short_that_pays_for_steps(kind: str) -> None:
    """The next forward pays for what is left."""
    with twins(kind) as pair:
        pair.backward(0)
        pair.step()

        def forward(number: int) -> str:
            ids = torch.arange(6).view(1, 6)
            where = cut_short(lambda: pair.model(ids), number, OPTIM)
            pair.backward(number)
            pair.step()
            return where

        every_line(forward, pair.check)


def test_a_step_on_the_host_cut_short_as_its_thread_has_it(monkeypatch: Any) -> None:
    """The thread makes it, and nobody was told what to wait for: it is not made twice."""
    with twins("host") as pair:
        pool = pair.optimizer._host.steps._pool
        submit = pool.submit
        for number in range(3):
            pair.backward(number)
            pair.by_hand.step()

            def cut(*args: Any) -> Any:
                found = submit(*args)
                found.result()
                monkeypatch.setattr(pool, "submit", submit)
                raise Stop

            monkeypatch.setattr(pool, "submit", cut)
            with pytest.raises(Stop):
                pair.optimizer.step()
            pair.optimizer.step()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            pair.check()


@pytest.mark.parametrize("kind", ["streaming", "in runs"])
def test_a_backward_cut_short_is_made_again(kind: str) -> None:
    """After the gradients are cleared; what it had taken in is forgotten."""
    with twins(kind) as pair:

        def backward(number: int) -> str:
            loss = loss_of(pair.model, number)
            where = cut_short(loss.backward, number, ["nn/groups/grad", "nn/groups/newgrads"])
            pair.optimizer.zero_grad()
            pair.backward(number)
            pair.step()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            return where

        every_line(backward, pair.check)


@pytest.mark.parametrize("kind", ["streaming", "staying", "in runs"])
def test_clipping_cut_short_has_clipped_all_or_nothing(kind: str) -> None:
    with twins(kind) as pair:

        def clip(number: int) -> str:
            pair.backward(number)
            before = [gradient.clone() for gradient in pair.by_hand.gradients()]
            where = cut_short(lambda: pair.optimizer.clip_grad_norm_(0.01), number, OPTIM)
            found = [p.grad.clone() for p in pair.model.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(pair.by_hand.params, 0.01)
            done = [same_bits(g, w) for g, w in zip(found, pair.by_hand.gradients(), strict=True)]
            left = [same_bits(g, w) for g, w in zip(found, before, strict=True)]
            assert all(done) or all(left), where
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            return where

        every_line(clip, pair.check)
