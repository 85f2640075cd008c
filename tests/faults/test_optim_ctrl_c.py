"""The steps of an optimizer under Ctrl-C, at every line: going on gives what it would have."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_nn import Tiers, check_table
from support_optim import Layer, Twins
from torch import nn

import tiermem

STRIDE = int(os.environ.get("TIERMEM_CTRL_C_STRIDE", "23"))
"""Every so many lines; 1 tries all of them."""


class Small(nn.Module):
    """A tied embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
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
}


def number_of(line: int) -> int:
    return 1 + line * STRIDE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_cut_short_is_gone_on_with(kind: str, clips: bool) -> None:
    """``step()`` once more, and all is as if nothing had happened; so with the next forward."""
    tiers, options = KINDS[kind]
    line, met = 0, set()
    with Twins(Small, tiers, settings={"lr": 0.01, "foreach": False}, **options) as pair:
        pair.backward(0)
        pair.step()
        places = ["step", "backward"] if "overlap" in options else ["step"]
        while places:
            where = ""
            if places[0] == "backward":  # what is owed is paid in the forward before
                where = cut_short(lambda: pair.model(ids()), number_of(line), ["optim/"])
            pair.backward(line)
            if clips:
                pair.clip_norm(0.5)
            pair.by_hand.step()
            if places[0] == "step":
                where = cut_short(pair.optimizer.step, number_of(line), ["optim/"])
                if where:
                    pair.optimizer.step()
            else:
                pair.optimizer.step()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            if line % 8 == 0 or not where or STRIDE == 1:
                try:
                    pair.check()
                except AssertionError as error:
                    raise AssertionError(f"after Ctrl-C at {where}") from error
            if not where:
                places.pop(0)
                line = -1
            met.add(where)
            line += 1
    assert len(met) > 1000 // STRIDE // 4


def ids() -> torch.Tensor:
    return torch.arange(6).view(1, 6)
