"""Arguments of other kinds than the signatures say: refused by name, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiermem


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize("device", [10**400, 2**63, -(10**400)])
def test_a_number_that_no_device_has(device: Any) -> None:
    with pytest.raises(tiermem.ConfigError, match="device="):
        tiermem.TierManager(device, hbm="1MiB", dram="4MiB")


@pytest.mark.parametrize(
    "blocks", [torch.tensor(5), [["0"]], [{}], (x for x in [["0"]]), [None, "other"], 3]
)
def test_blocks_that_are_no_names(blocks: Any) -> None:
    model = build()
    weights = list(model.parameters())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
        with pytest.raises(tiermem.ConfigError, match="blocks"):
            tier.wrap(model, blocks=blocks)
        assert not tier.residency()
        assert all(map(torch.equal, weights, build().parameters()))


DEVICES = ["", "x", "meta", torch.device("meta"), "cuda:999", 3, 10**400, 1.5, [], object()]


@pytest.mark.parametrize("device", DEVICES)
def test_devices_to_which_no_tensor_can_be_given(device: Any) -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
        model = tier.wrap(build())
        rows = len(tier.residency())
        acts: list[Callable[[], Any]] = [
            lambda: tier.unwrap(model, device),
            lambda: tier.materialize(model, device).__enter__(),
        ]
        for act in acts:
            with pytest.raises(tiermem.ConfigError, match="device=") as caught:
                act()
            assert "\n" not in str(caught.value)
        assert len(tier.residency()) == rows
        assert torch.equal(model(torch.ones(2, 8)), build()(torch.ones(2, 8)))


@pytest.mark.parametrize("target", [None, 1, 1.5, object(), torch.float32])
def test_what_has_no_parameters_to_give(target: Any) -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
        tier.wrap(build())
        says = "materialize takes a module, a parameter or several, not "
        with pytest.raises(tiermem.ConfigError, match=says), tier.materialize(target):
            pass
