"""Where blocks begin, and how finely a model that streams is divided."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tiermem
from tiermem.core.need import unit_limit, whole_block
from tiermem.nn.groups import partition
from tiermem.nn.groups.partition import (
    largest_block,
    parameter_bytes,
    runs,
    steps_bind,
    territories,
    training_bytes,
)

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
        (13 * GIB, GIB, GIB // 21),
        (13 * GIB, 1600 * MIB, 1600 * MIB // 21),
        (13 * GIB, 2 * GIB, 96 * MIB),
        (140 * GIB, 80 * GIB, 96 * MIB),
        (GIB, 100 * MIB, 16 * MIB),  # a small budget has to hold several blocks
        (5, 1, 1),
    ],
)
def test_how_large_a_block_may_be(model: int, hbm: int, largest: int) -> None:
    assert largest_block(model, hbm) == largest


@pytest.mark.parametrize(
    ("hbm", "largest"),
    [
        (100 * MIB, 10 * MIB),
        (320 * MIB, 32 * MIB),  # two of them with gradients and Adam's states
        (480 * MIB, 48 * MIB),
        (GIB, GIB // 10),
        (2 * GIB, 128 * MIB),
    ],
)
def test_blocks_are_stepped_as_one_where_hbm_has_room_for_two(hbm: int, largest: int) -> None:
    assert whole_block(hbm) == largest


@pytest.mark.parametrize(
    ("hbm", "rate", "binds"),
    [
        (336 * MIB, 55e9, True),
        (336 * MIB, 12e9, True),  # 64 MiB each way take it 5.6 ms
        (336 * MIB, 11e9, False),
        (160 * MIB, 55e9, False),  # blocks are as fine as they get
        (20 * GIB, 55e9, True),  # 256 MiB: 4.9 ms
        (20 * GIB, 25e9, False),
        (700 * MIB, 25e9, True),  # 133 MiB: 5.6 ms
    ],
)
def test_steps_of_fine_blocks_bind_a_slow_host(hbm: int, rate: float, binds: bool) -> None:
    assert steps_bind(hbm, rate) is binds


def test_a_trained_block_is_stepped_as_one_where_two_of_them_fit() -> None:
    """A GPT-2's feed-forward layer in float32, and HBM for half of the model."""
    hbm, sizes = 336_130_048, [4096 << 12, 4096 * 4, 4096 << 12, 1024 * 4]
    assert unit_limit(hbm, sum(sizes), sizes, few=True) == sum(sizes)
    assert unit_limit(hbm, sum(sizes), sizes, few=False) < sum(sizes)
    assert unit_limit(hbm - (1 << 20), sum(sizes), sizes, few=True) < sum(sizes)
    large = [2 * size for size in sizes]
    assert unit_limit(600 * MIB, sum(large), large, few=True) < sum(large)


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
        for homes in (5, ["0"], "0"):
            with pytest.raises(tiermem.ConfigError, match="give homes by modules' names"):
                tier.wrap(model, homes=homes)  # type: ignore[arg-type]
        with pytest.raises(tiermem.ConfigError, match="blocks=5: give 'auto'"):
            tier.wrap(model, blocks=5)  # type: ignore[arg-type]
        assert tier.residency() == []
        tier.wrap(model)


def sizes_of(model: nn.Module, largest: int) -> tuple[dict[str, nn.Module], dict[str, int]]:
    roots = territories(model, "auto", largest)
    own = {name: parameter_bytes(module) for name, module in roots.items()}
    for name in sorted(roots, key=len, reverse=True):
        for other in roots:
            if other and other != name and name.startswith(f"{other}."):
                own[other] -= own[name]
    return roots, {name: size for name, size in own.items() if size and name}


class Mixture(nn.Module):
    """Layers with lists inside, a list of experts, and embeddings in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(64, 64) for _ in range(2))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(5))
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


def test_small_layers_in_a_row_share_blocks_and_experts_do_not() -> None:
    model = Mixture()
    roots, sizes = sizes_of(model, parameter_bytes(model.layers[0]))
    layer = sizes["layers.0"]
    found = runs(model, roots, sizes, 24 * 2 * layer)
    assert [found.get(f"layers.{i}") for i in range(5)] == [
        *["layers.0-1"] * 2,
        *["layers.2-3"] * 2,
        None,
    ]
    assert not any("experts" in name or "embeddings" in name for name in found)
    assert runs(model, roots, sizes, 24 * layer) == {}, "where HBM has no room for it"


def test_layers_that_are_trained_share_larger_blocks() -> None:
    """A step is so much work for the host whatever its bytes, so there are fewer."""
    model = nn.Sequential(*[nn.Linear(2048, 4096, bias=False, device="meta") for _ in range(4)])
    roots, sizes = sizes_of(model, 32 << 20)
    room = 48 * (32 << 20)
    assert runs(model, roots, sizes, room) == {}, "32 MiB hide the host's work of a fetch"
    assert runs(model, roots, sizes, room, trained=True) == {
        **dict.fromkeys("01", "0-1"),
        **dict.fromkeys("23", "2-3"),
    }
    assert runs(model, roots, sizes, 42 * (32 << 20) - 1, trained=True) == {}


def test_layers_that_all_fit_share_blocks_that_would_do_for_a_quarter_of_hbm() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 4096, bias=False, device="meta") for _ in range(4)])
    roots, sizes = sizes_of(model, 32 << 20)
    room = 4 * 21 * 3 * (32 << 20)
    assert training_bytes(model) <= room
    assert runs(model, roots, sizes, room, trained=True) == dict.fromkeys("012", "0-2")
    assert runs(model, roots, sizes, room) == {}
    more = nn.Sequential(*model, *(nn.Linear(2048, 4096, device="meta") for _ in range(80)))
    assert training_bytes(more) > room
    roots, sizes = sizes_of(more, 33 << 20)
    assert runs(more, roots, sizes, room, trained=True)["0"] == "0-1"


@pytest.mark.parametrize("seen", ["mode", "optimizer", "too late"])
def test_what_is_trained_is_seen_by_the_models_mode_or_its_optimizer(
    seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of these layers are more than share a block where they are not trained."""
    model = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(48)]).train(seen == "mode")
    size = parameter_bytes(model[0])
    monkeypatch.setattr(partition, "_RUN", size)
    monkeypatch.setattr("tiermem.nn.groups.blocks.SHARES", ())
    with tiermem.TierManager(device="cpu", hbm=44 * size, dram=400 * size) as tier:
        tier.wrap(model)
        if seen == "too late":
            model(torch.randn(2, 96))
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        model.train()
        model(torch.randn(2, 96)).square().mean().backward()
        optimizer.step()
        rows = tier.residency()
        units = [r for r in rows if r.role == "grad" and not r.block.endswith(" before")]
        blocks = [row for row in rows if row.role == "param"]
        assert len(units) == len(blocks) == (48 if seen == "too late" else 24)


def test_sequences_inside_sequences_are_in_order() -> None:
    stages = [nn.Sequential(*[nn.Linear(64, 64) for _ in range(count)]) for count in (3, 2)]
    model = nn.Sequential(stages[0], nn.GELU(), stages[1])
    linear = parameter_bytes(stages[0][0])
    roots, sizes = sizes_of(model, linear)
    assert runs(model, roots, sizes, 24 * 3 * linear) == {
        **dict.fromkeys(["0.0", "0.1", "0.2"], "0.0-2"),
        **dict.fromkeys(["2.0", "2.1"], "2.0-1"),
    }


class Parts(nn.Module):
    """A layer with parts of its own, with lists of parts that are alike and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(160, 160)
        self.second = nn.Linear(160, 160)
        self.alike = nn.ModuleList(nn.Linear(160, 160) for _ in range(2))
        self.steps = nn.ModuleList([nn.Linear(160, 160), nn.Bilinear(16, 10, 160)])


def test_parts_of_a_divided_layer_share_blocks() -> None:
    model = nn.ModuleList(Parts() for _ in range(2))
    roots, sizes = sizes_of(model, parameter_bytes(model[0].first))
    found = runs(model, roots, sizes, 24 * 2 * parameter_bytes(model[0].first))
    assert {name: block for name, block in found.items() if name.startswith("1.")} == {
        **dict.fromkeys(["1.first", "1.second"], "1.first-second"),
        **dict.fromkeys(["1.steps.0", "1.steps.1"], "1.steps.0-1"),
    }


def test_little_blocks_stay_in_hbm_and_a_pass_holds_them_once() -> None:
    model, x = stack(256, 8), torch.randn(3, 256)
    plain = copy.deepcopy(model)
    size = parameter_bytes(model)
    with tiermem.TierManager(device="cpu", hbm=size // 3, dram=4 * size) as tier:
        tier.wrap(model)
        rows = {row.block: row for row in tier.residency()}
        assert rows["Sequential.small"].home == "hbm"
        assert min(row.nbytes for name, row in rows.items() if name != "Sequential.small") > 1 << 16
        assert "_call_impl" not in model[3].norm.__dict__
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(x), plain(x))
            assert torch.equal(model[3].norm(x), plain[3].norm(x)), "called by itself"
            assert torch.equal(model[3](x), plain[3](x))
    model = copy.deepcopy(plain)
    with tiermem.TierManager(device="cpu", hbm=size // 3, dram=4 * size) as tier:
        tier.wrap(model, resident=None)
        assert not any("small" in row.block for row in tier.residency())


def test_little_blocks_stay_beside_an_embedding_of_more_than_half_of_hbm() -> None:
    layers = stack(256, 8)
    layer, largest = parameter_bytes(layers[0]), parameter_bytes(layers[0].mlp[0])
    model = nn.Sequential(nn.Embedding(3 * layer // 2048, 256), layers)
    embedding, dram = parameter_bytes(model[0]), 4 * parameter_bytes(model)
    for hbm, stay in ((embedding + layer, True), (embedding + largest // 2, False)):
        assert 2 * embedding > hbm
        with tiermem.TierManager(device="cpu", hbm=hbm, dram=dram) as tier:
            tier.wrap(model)
            assert ("Sequential.small" in {row.block for row in tier.residency()}) == stay
