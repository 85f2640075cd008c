"""Training in an HBM that holds all of it: nothing is stepped ahead, on the host, or moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_hostbits import device_of_numpy, tried_shares
from support_nn import Tiers
from support_optim import Net, Twins

TIGHT, ROOMY = Tiers("tight"), Tiers("roomy", extra_hbm=16 << 20)
FUSED = {"lr": 0.01, "fused": True}


@pytest.fixture
def _host_of_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host with the bits of a device of NumPy's, whose proofs are of no other test."""
    with tried_shares(monkeypatch), device_of_numpy():
        yield


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


@pytest.mark.usefixtures("_host_of_numpy")
@pytest.mark.parametrize("tiers", [TIGHT, ROOMY], ids=lambda tiers: tiers.name)
def test_the_host_is_asked_for_nothing_where_there_are_no_copies(tiers: Tiers) -> None:
    with Twins(Net, tiers, torch.optim.AdamW, FUSED) as twins:
        where = twins.optimizer.stepped_where
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        if tiers is ROOMY:
            assert where == "all on the device: HBM has room for everything" and not units
        else:
            assert "with the device's bits" in where and units


@pytest.mark.usefixtures("_host_of_numpy")
@pytest.mark.parametrize("overlap", ["auto", False])
def test_a_share_of_the_host_goes_to_the_device_once_everything_fits(
    overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Twins(Net, TIGHT, torch.optim.AdamW, FUSED, overlap=overlap) as twins:
        for number, fits in enumerate((False, False, True, True, False, False)):
            monkeypatch.setattr("tiermem.core.residency.ResidencyTable.all_fit", fits)
            twins.backward(number)
            twins.step()
            on_host = any(unit.host is not None for unit in twins.optimizer._units)
            assert on_host == (not fits and number > 0)  # the first steps are the device's
            twins.check()
