"""What a manager does while a CUDA graph is captured, with the capture feigned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiermem


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def capture(tier: tiermem.TierManager, on: bool) -> None:
    """Makes the copy engine say that the current stream is captured, or not."""
    tier._manager.parts.copy.capturing = lambda: on  # type: ignore[method-assign]


def test_weights_that_stay_are_used_and_nothing_else_happens() -> None:
    x = torch.rand(2, 64)
    expected = layers()(x)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB", policy={"params": "hbm"}) as tier:
        model = tier.wrap(layers())
        with torch.no_grad():
            model(x)
            before = tier._manager.parts.planner.cursor
            capture(tier, True)
            assert torch.equal(model(x), expected)
            assert torch.equal(model[2](x), layers()[2](x))
            capture(tier, False)
            assert tier._manager.parts.planner.cursor == before
            assert torch.equal(model(x), expected)
        assert all(row.leases == 0 for row in tier.residency())


class Normed(nn.Sequential):
    """Layers of 64 KiB, with a buffer that nobody acquires before it is used."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(128, 128, bias=False) for _ in range(3)])
        self.register_buffer("scale", torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_what_was_captured_stays_where_it_is() -> None:
    """A graph knows addresses: nothing of it is slid to make one gap of two."""
    with tiermem.TierManager("cpu", hbm="512KiB", dram="4MiB", policy={"params": "hbm"}) as tier:
        first, second = tier.wrap(nn.Linear(192, 192, bias=False)), tier.wrap(Normed())
        table, x = tier._manager.parts.table, torch.rand(1, 128)
        with torch.no_grad():
            capture(tier, True)
            second(x)
            capture(tier, False)
        places = {r.block.name: r.extent for r in table if "Normed" in r.block.name}
        assert len(places) == 4 and "Normed#1.small_buffers" in places
        assert all(record.still for record in table)
        tier.unwrap(first)
        gaps = [gap.nbytes for gap in table.hbm.gaps()]
        wide = nn.Linear(256, sum(gaps) // 1024 // 4 * 4, bias=False)
        assert len(gaps) == 2 and max(gaps) < wide.weight.nbytes <= sum(gaps)
        with pytest.raises(tiermem.CapacityError, match="in pieces"):
            tier.wrap(wide)
        assert places == {r.block.name: r.extent for r in table if "Normed" in r.block.name}


def test_weights_that_may_move_are_refused() -> None:
    x = torch.rand(2, 64)
    expected = layers()(x)
    with tiermem.TierManager("cpu", hbm="52KiB", dram="1MiB") as tier, torch.no_grad():
        model = tier.wrap(layers())
        model(x)
        moved = tier.stats().links
        capture(tier, True)
        with pytest.raises(tiermem.ConfigError, match=r"block 'Sequential\.\d' .*CUDA graph"):
            model(x)
        assert tier.stats().links == moved
        capture(tier, False)
        assert torch.equal(model(x), expected)


def test_weights_that_no_call_has_brought_are_refused() -> None:
    x = torch.rand(2, 64)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier, torch.no_grad():
        model = tier.wrap(layers())
        capture(tier, True)
        with pytest.raises(tiermem.ConfigError, match="Call the model once before"):
            model(x)
        capture(tier, False)
        assert torch.equal(model(x), layers()(x))


def test_weights_that_all_fit_stay_where_a_graph_has_seen_them() -> None:
    x = torch.rand(2, 64)
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier, torch.no_grad():
        model = tier.wrap(layers())
        other = tier.wrap(nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)]))
        table = tier._manager.parts.table
        model(x)
        capture(tier, True)
        with pytest.raises(tiermem.ConfigError):
            model(x)  # not all fit
        capture(tier, False)
        tier.unwrap(other)
        for _ in range(4):  # with interceptors, and without
            assert torch.equal(model(x), layers()(x))
        capture(tier, True)
        assert torch.equal(model(x), layers()(x))
        capture(tier, False)
        places = {r.block.name: r.extent for r in table}
        assert None not in places.values()
        other = tier.wrap(nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)]))
        for _ in range(3):  # it streams beside what the graph has
            other(x)
            assert torch.equal(model(x), layers()(x))
            assert places.items() <= {r.block.name: r.extent for r in table}.items()
        model[0].weight.mul_(2)  # where a replay reads it
        wanted = layers()
        wanted[0].weight.mul_(2)
        assert torch.equal(model(x), wanted(x))
        assert places.items() <= {r.block.name: r.extent for r in table}.items()
        tier.unwrap(model)
        assert torch.equal(model(x), wanted(x))
