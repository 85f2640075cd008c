"""Training in an HBM that holds all of it: nothing is stepped ahead, on the host, or moved."""

from __future__ import annotations

import pytest
import torch
from support_hostbits import device_of_numpy
from support_nn import Tiers
from support_optim import Net, Twins

TIGHT, ROOMY = Tiers("tight"), Tiers("roomy", extra_hbm=16 << 20)
FUSED = {"lr": 0.01, "fused": True}


@pytest.mark.parametrize("tiers", [TIGHT, ROOMY], ids=lambda tiers: tiers.name)
def test_steps_are_made_ahead_only_where_copies_can_be_hidden(tiers: Tiers) -> None:
    with Twins(Net, tiers) as twins:
        for number in range(4):
            twins.backward(number)
            twins.step()
        twins.check()
        moved = twins.tier.stats().links
        if tiers is ROOMY:
            assert "hbm->dram" not in moved
            assert not twins.optimizer.stepped_in_backward
        else:
            assert moved["hbm->dram"].nbytes and twins.optimizer.stepped_in_backward


@pytest.mark.parametrize("tiers", [TIGHT, ROOMY], ids=lambda tiers: tiers.name)
def test_the_host_is_asked_for_nothing_where_there_are_no_copies(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.optim.host.sides._LEAST", 0)
    with device_of_numpy(), Twins(Net, tiers, torch.optim.AdamW, FUSED) as twins:
        where = twins.optimizer.stepped_where
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        if tiers is ROOMY:
            assert where == "all on the device: HBM has room for everything" and not units
        else:
            assert "with the device's bits" in where and units


def test_a_share_of_the_host_goes_to_the_device_once_everything_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiermem.optim.host.sides._LEAST", 0)
    with device_of_numpy(), Twins(Net, TIGHT, torch.optim.AdamW, FUSED) as twins:
        for number, fits in enumerate((False, False, True, True, False, False)):
            monkeypatch.setattr("tiermem.core.residency.ResidencyTable.all_fit", fits)
            twins.backward(number)
            twins.step()
            on_host = any(unit.host is not None for unit in twins.optimizer._units)
            assert on_host == (not fits and number > 0)  # the first steps are the device's
            twins.check()
