"""Megatron's offloading fields: each measured, each rule, both ways."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_integrations import BATCH, TOKENS, WIDTH, batches, decoder, resident_losses, twin
from torch import nn

from tiermem import ConfigError, Stats, WrapError
from tiermem.integrations import megatron_bridge
from tiermem.integrations.megatron_bridge import Fields, Offloading, explain

LAYERS = 6
STEPS = 3
WHOLE = "8MiB"
NOTHING = pytest.mark.filterwarnings("ignore:.* is 0. nothing is offloaded by it")


def offloading(model: nn.Module | None = None, **fields: Any) -> Offloading:
    settings = {"device": "cpu", "hbm": WHOLE, "dram": "16MiB", **fields}
    return Offloading(decoder(LAYERS) if model is None else model, **settings)


def train(run: Offloading) -> tuple[list[float], Stats]:
    """Trains; returns the losses, and what the last step did."""
    optimizer = run.tier.optimizer(run.model, torch.optim.AdamW, lr=1e-3)
    losses = []
    for tokens in batches(STEPS):
        run.tier.reset_stats()
        loss = run.model(tokens)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, run.tier.stats()


def homes(run: Offloading) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for row in run.tier.residency():
        found[row.role, row.home] += row.nbytes
    return found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    model = decoder(LAYERS)
    return resident_losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3), STEPS)


def layer_bytes() -> int:
    return sum(p.numel() * 4 for p in decoder(LAYERS).layers[0].parameters())


# -- layer by layer --------------------------------------------------------


def test_nothing_leaves_by_default(plain: list[float]) -> None:
    with offloading() as run:
        losses, stats = train(run)
        assert losses == plain
        assert stats.links == {} and stats.activations.offloaded == 0
        assert {home for _, home in homes(run)} == {"hbm"}


def test_the_number_alone_enables_nothing() -> None:
    with pytest.warns(UserWarning, match="cpu_offloading is not set: nothing is offloaded"):
        run = offloading(cpu_offloading_num_layers=3, cpu_offloading_weights=True)
    with run:
        assert {home for _, home in homes(run)} == {"hbm"}
        assert run.policy.activations == "hbm"


@NOTHING
@pytest.mark.parametrize("layers", [0, 1, 3, LAYERS - 1])
def test_weights_of_the_first_layers(layers: int, plain: list[float]) -> None:
    fields = {"cpu_offloading_num_layers": layers, "cpu_offloading_weights": True}
    with offloading(cpu_offloading=True, cpu_offloading_activations=False, **fields) as run:
        rows = [row for row in run.tier.residency() if row.role == "param"]
        away = sorted(row.block for row in rows if row.home == "dram")
        assert away == [f"Decoder.layers.{n}" for n in range(layers)]
        losses, stats = train(run)
        assert losses == plain
        assert stats.activations.offloaded == 0


def test_weights_alone_really_free_the_device() -> None:
    """In Megatron they do nothing alone. Here a device without room for all of them is enough."""
    fields = {"cpu_offloading_num_layers": LAYERS - 1, "cpu_offloading_weights": True}
    model = decoder(LAYERS)
    hbm = 4 * layer_bytes()
    with torch.no_grad():
        expected = twin(model)(next(batches(1)))
    with offloading(
        model.requires_grad_(False),
        cpu_offloading=True,
        cpu_offloading_activations=False,
        hbm=hbm,
        **fields,
    ) as run:
        for _ in range(2):
            run.tier.reset_stats()
            assert torch.equal(run.model(next(batches(1))), expected)
        stats = run.tier.stats()
        assert stats.peak["hbm"] <= hbm < LAYERS * layer_bytes()
        assert stats.links["dram->hbm"].nbytes >= 2 * layer_bytes()  # they come


@NOTHING
def test_activations_of_the_first_layers(plain: list[float]) -> None:
    counts = []
    for layers in (0, 2, 4):
        fields = {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
        with offloading(**fields) as run:
            losses, stats = train(run)
            assert losses == plain
            counts.append(stats.activations.offloaded_bytes)
            assert {home for role, home in homes(run) if role == "param"} == {"hbm"}
    assert counts[0] == 0 < counts[1]
    one = counts[1] // 2
    assert one >= 3 * BATCH * TOKENS * WIDTH * 4  # a layer saves its input and more
    assert abs(counts[2] - 2 * counts[1]) <= one // 2  # as much for each layer


def test_both_at_once(plain: list[float]) -> None:
    fields = {"cpu_offloading_num_layers": 3, "cpu_offloading_weights": True}
    with offloading(cpu_offloading=True, **fields) as run:
        losses, stats = train(run)
        assert losses == plain
        assert stats.activations.offloaded > 0
        assert homes(run)["param", "dram"] >= 3 * layer_bytes()


# -- rules -----------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"cpu_offloading_num_layers": LAYERS}, f"less than the model's {LAYERS} layers"),
        ({"cpu_offloading_num_layers": -1}, "at least 0"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size: 2"),
        ({"recompute_granularity": "full"}, "recompute_granularity: 'full'"),
        ({"cpu_offloading_activations": False}, "nothing would leave"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
            "exclude each other",
        ),
    ],
)
def test_rules(fields: dict[str, Any], says: str) -> None:
    model = decoder(LAYERS)
    with pytest.raises(ConfigError) as caught:
        offloading(model, cpu_offloading=True, **fields)
    assert says in str(caught.value)
    model(next(batches(1))).backward()  # it is as it was


@pytest.mark.parametrize(
    "fields", [{"pipeline_model_parallel_size": 2}, {"recompute_granularity": "full"}]
)
def test_rules_are_those_of_offloading_alone(fields: dict[str, Any]) -> None:
    Fields(**fields)


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"fine_grained_activation_offloading": True}, "needs offload_modules"),
        ({"offload_modules": "core_attn"}, "must be a list of names"),
        ({"offload_modules": ["core_atn"]}, "did you mean core_attn?"),
        ({"activation_offload_fraction": 1.5}, "between 0 and 1, not 1.5"),
        ({"optimizer_offload_fraction": -0.5}, "between 0 and 1"),
        ({"min_offloaded_tensor_size": -1}, "must not be negative"),
        ({"cpu_offloading": "maybe"}, "true or false, not 'maybe' (str)"),
        ({"cpu_ofloading": True}, "did you mean cpu_offloading?"),
        ({"pipeline_model_parallel_size": 0}, "at least 1, not 0"),
        ({"activation_offload_fraction": "half"}, "a number, not 'half' (str)"),
    ],
)
def test_bad_values(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fields(**fields)
    assert says in str(caught.value)


# -- fine-grained ----------------------------------------------------------

FINE = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "moe_act"]}


def saved(**fields: Any) -> tuple[list[float], Stats]:
    with offloading(**{**FINE, **fields}) as run:
        return train(run)


def test_fine_grained(plain: list[float]) -> None:
    losses, stats = saved(min_offloaded_tensor_size=BATCH * TOKENS * WIDTH)
    assert losses == plain
    assert stats.activations.offloaded > 0


def test_fine_grained_sizes_are_elements(plain: list[float]) -> None:
    largest = BATCH * TOKENS * 4 * WIDTH  # of the matrix between, in elements
    _, some = saved(min_offloaded_tensor_size=largest)
    losses, none = saved(min_offloaded_tensor_size=largest + 1)
    assert losses == plain
    assert some.activations.offloaded > 0 == none.activations.offloaded
    _, default = saved()
    assert default.activations.offloaded == 0  # 1,048,576 elements


@NOTHING
def test_fine_grained_fraction() -> None:
    size = {"min_offloaded_tensor_size": BATCH * TOKENS * WIDTH}
    _, whole = saved(**size)
    _, half = saved(**size, activation_offload_fraction=0.5)
    _, none = saved(**size, activation_offload_fraction=0)
    assert 0 == none.activations.offloaded < half.activations.offloaded
    assert half.activations.offloaded < whole.activations.offloaded


# -- the optimizer ---------------------------------------------------------


def test_optimizer_state(plain: list[float]) -> None:
    with offloading(optimizer_cpu_offload=True) as run:
        losses, _ = train(run)
        assert losses == plain
        found = homes(run)
        # norms and biases stay (ADR 43)
        assert found["optimizer", "hbm"] <= found["optimizer", "dram"] // 64
        assert found["optimizer", "dram"] > 0
        assert found["param", "dram"] == 0


@NOTHING
@pytest.mark.parametrize(
    "fraction, home", [(None, "dram"), (1.0, "dram"), (0.5, "dram"), (0, "hbm")]
)
def test_fraction_of_the_state(fraction: float | None, home: str) -> None:
    fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    with offloading(**fields) as run:
        assert run.policy.optimizer == run.policy.master == home


# -- reading and reports ---------------------------------------------------


def test_an_object_with_fields() -> None:
    provider = SimpleNamespace(
        hidden_size=4096, num_layers=6, cpu_offloading=True, cpu_offloading_num_layers=2
    )
    fields = Fields(provider, cpu_offloading_weights=True)
    assert fields.cpu_offloading_num_layers == 2 and fields.cpu_offloading_weights
    assert fields.cpu_offloading_activations


@NOTHING
def test_a_mapping() -> None:
    assert Fields({"cpu_offloading": True, "hidden_size": 8}).given == {"cpu_offloading"}


@pytest.mark.parametrize("config", ["bridge.yaml", 3, [1], ("cpu_offloading",)])
def test_what_is_no_configuration_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=type(config).__name__):
        Fields(config)


def test_names_that_are_nearly_a_fields_are_warned_about() -> None:
    """A provider has many other fields; a misspelt one of these would do nothing in silence."""
    with pytest.warns(UserWarning, match=r"'cpu_offloding' is no field .* cpu_offloading"):
        Fields({"cpu_offloding": True, "hidden_size": 8, "num_layers": 4})


@pytest.mark.parametrize(
    "fields, name, why",
    [
        ({"optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction", "is not set"),
        ({"offload_modules": ["core_attn"]}, "offload_modules", "is not set"),
        ({"cpu_offloading_weights": True}, "cpu_offloading_weights", "cpu_offloading is not set"),
        ({"cpu_offloading": True}, "cpu_offloading", "cpu_offloading_num_layers is 0"),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0},
            "optimizer_cpu_offload",
            "optimizer_offload_fraction is 0",
        ),
        ({"optimizer_cpu_offload": False}, "optimizer_cpu_offload", "it is off"),
        ({"cpu_offloading_activations": False}, "cpu_offloading_activations", "not set"),
    ],
)
@NOTHING
def test_fields_that_others_leave_without_effect(
    fields: dict[str, Any], name: str, why: str
) -> None:
    (row,) = (row for row in explain(**fields) if row.option == name)
    assert row.setting == "no effect"
    assert why in row.note


@pytest.mark.parametrize(
    "fields",
    [
        {"cpu_offloading": True},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0},
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn"],
            "activation_offload_fraction": 0,
        },
    ],
)
def test_a_switch_for_nothing_is_warned_about(fields: dict[str, Any]) -> None:
    """Recipes have some of these at 0, and whoever sets the switch alone would not notice."""
    with pytest.warns(UserWarning, match="is 0: nothing is offloaded by it"):
        Fields(**fields)


def test_a_share_of_no_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Conv1d(1, 1, 1))
    fields = {"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm"]}
    with pytest.raises(ConfigError, match=r"fraction: 0\.5 is a share of the lay"):
        offloading(model, **fields, activation_offload_fraction=0.5)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_the_configuration_of_a_whole_run(kind: Any) -> None:
    """A recipe's container has the fields in its parts; nothing of it may be overlooked."""
    model = kind(cpu_offloading=True, cpu_offloading_num_layers=2, cpu_offloading_weights=True)
    whole = kind(model=model, optimizer=kind(optimizer_cpu_offload=True), train=kind(seed=1))
    with offloading(config=whole) as run:
        assert list(run.homes.values()) == ["dram", "dram"]
        assert run.policy.optimizer == "dram"
    with pytest.warns(UserWarning, match="'cpu_offload' is no field"):
        Fields(kind(model=kind(cpu_offload=True)))


def test_names_of_a_command_line_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="'--cpu-offloading-num-layers' is no field"):
        Fields({"--cpu-offloading-num-layers": 2})


def test_without_effect() -> None:
    names = (
        "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_torch_optimizer_for_cpu_offload",
        "pin_cpu_grads",
        "pin_cpu_params",
    )
    rows = {row.option: row for row in explain(**dict.fromkeys(names, True))}
    assert {rows[name].setting for name in names} == {"no effect"}
    with offloading(**dict.fromkeys(names, True)) as run, offloading() as other:
        assert run.policy == other.policy and run.homes == other.homes
        assert {row.option for row in run.explain()} == set(names)


def test_nothing_is_warned_about_what_is_right() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fields(cpu_offloading=True, cpu_offloading_num_layers=3)


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    with offloading() as run, pytest.raises(WrapError):
        offloading(run.model)


def test_public_names() -> None:
    assert megatron_bridge.Offloading is Offloading
