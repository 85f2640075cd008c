"""Where blocks begin, and how finely a model that streams is divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiermem
from tiermem.nn.groups.partition import largest_block, parameter_bytes, territories

MIB = 1 << 20
GIB = 1 << 30


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.ModuleDict({n: nn.Linear(width, width) for n in "qkvo"})
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for part in self.attention.values():
            y = part(y)
        return x + self.mlp(y)


def stack(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(width) for _ in range(layers)])


@pytest.mark.parametrize(
    ("model", "hbm", "largest"),
    [
        (GIB, 2 * GIB, GIB // 2),  # all of it stays: no need to divide
        (GIB, GIB, GIB // 4),
        (13 * GIB, GIB, 32 * MIB),
        (13 * GIB, 2 * GIB, 64 * MIB),
        (140 * GIB, 80 * GIB, 96 * MIB),
        (GIB, 100 * MIB, 25 * MIB),  # a small budget has to hold several blocks
        (5, 1, 1),
    ],
)
def test_how_large_a_block_may_be(model: int, hbm: int, largest: int) -> None:
    assert largest_block(model, hbm) == largest


def test_layers_are_whole_where_they_are_small_enough() -> None:
    model = stack(16, 3)
    layer = parameter_bytes(model[0])
    assert set(territories(model, "auto", layer)) == {"", "0", "1", "2"}


def test_layers_are_divided_at_the_modules_they_call() -> None:
    model = stack(128, 2)
    linear = 4 * 128 * 129
    found = set(territories(model, "auto", linear))
    expected = {f"{i}.attention.{n}" for i in range(2) for n in "qkvo"}
    expected |= {f"{i}.mlp.{j}" for i in range(2) for j in (0, 2)}
    assert found >= expected
    assert not any("norm" in name for name in found)


def test_a_model_that_streams_moves_in_finer_pieces_and_computes_the_same() -> None:
    model, x = stack(128, 4), torch.randn(3, 128)
    expected = model(x)
    size = parameter_bytes(model)
    with tiermem.TierManager(device="cpu", hbm=size // 3, dram=4 * size) as tier:
        tier.wrap(model)
        assert max(row.nbytes for row in tier.residency()) <= size // 12 + 4096
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)


def homes_by_block(tier: tiermem.TierManager) -> dict[str, str]:
    return {row.block.partition(".")[2]: row.home for row in tier.residency()}


def test_homes_of_single_modules_go_before_the_policy() -> None:
    model, x = stack(16, 3), torch.randn(3, 16)
    expected = model(x)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", policy="hbm") as tier:
        tier.wrap(model, homes={"0": "dram", "1": "dram", "1.mlp": "hbm"})
        homes = homes_by_block(tier)
        assert (homes["0"], homes["1"], homes["1.mlp"], homes["2"]) == (
            "dram",
            "dram",
            "hbm",
            "hbm",
        )
        assert torch.equal(model(x), expected)


def test_homes_that_cannot_be_are_refused_and_nothing_is_wrapped() -> None:
    model = stack(16, 2)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.ConfigError, match=r"no modules named \['7'\]"):
            tier.wrap(model, homes={"7": "dram"})
        with pytest.raises(tiermem.ConfigError, match="'0' has the home 'moon'"):
            tier.wrap(model, homes={"0": "moon"})  # type: ignore[dict-item]
        assert tier.residency() == []
        tier.wrap(model)
