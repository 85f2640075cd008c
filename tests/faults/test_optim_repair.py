"""A step that could not be taken back, and an exception that makes everything be repaired."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_nn import Tiers, check_table
from support_optim import FailsMidway, Layer, Twins
from torch import nn

from tiermem.core import parts
from tiermem.errors import StorageError
from tiermem.optim import intake
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.undo import Undo


class Small(nn.Module):
    """A tied embedding that is most of it, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(150, 8)
        self.layers = nn.ModuleList([Layer(8, 8), Layer(8, 12)])

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embed.weight)[..., :20]


PLACES = {
    "streaming": Tiers("tight"),
    "staying": Tiers("roomy", extra_hbm=1 << 20),
    "home in hbm": Tiers("hbm", policy="hbm", extra_hbm=1 << 16),
}


@pytest.fixture
def _broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ``Undo.take_back`` fail as a disk does, until the first item is set to False."""
    real = Undo.take_back
    broken = [True]

    def take_back(undo: Undo) -> None:
        if broken[0]:
            raise StorageError("read failed", block="b", tier="nvme", path="/", errno=5)
        real(undo)

    monkeypatch.setattr(Undo, "take_back", take_back)
    yield broken
    FailsMidway.lit = False


@pytest.mark.parametrize("place", [*PLACES, "in parts"])
def test_a_step_that_waits_to_be_taken_back_survives_a_repair(
    place: str, _broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its blocks until the disk is well again, whatever comes in between."""
    if place == "in parts":
        place = "streaming"
        monkeypatch.setattr(parts, "_ALIGNED", 16)
        monkeypatch.setattr(parts, "_LEAST", 0)
        monkeypatch.setattr(parts, "_MOST", 0.05)
        monkeypatch.setattr(intake, "ELEMENTWISE", (FailsMidway,))
    settings = {"lr": 0.1, "momentum": 0.9}
    with Twins(Small, PLACES[place], FailsMidway, settings, master_dtype=None) as pair:
        stepped = [type(unit) for unit in pair.optimizer._units]
        assert (PartedUnit in stepped) == (FailsMidway in intake.ELEMENTWISE)
        pair.backward(0)
        pair.step()
        pair.backward(1)
        pair.by_hand.step()
        FailsMidway.lit = True
        with pytest.raises(StorageError):
            pair.optimizer.step()
        with torch.no_grad():
            assert cut_short(lambda: pair.model(torch.arange(4).view(1, 4)), 20, ["nn/"])
        check = pair.tier._manager.parts.table.check
        for look in (
            pair.optimizer.step,
            pair.model.state_dict,
            lambda: pair.model(torch.arange(4).view(1, 4)),
            lambda: pair.model.embed.weight.sum(),
            lambda: pair.tier.unwrap(pair.model),
        ):
            with torch.no_grad(), pytest.raises(StorageError):
                look()
            check()
        _broken[0] = False
        pair.optimizer.step()
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()
        check_table(pair.tier)
        pair.backward(2)
        pair.step()
        pair.check()
