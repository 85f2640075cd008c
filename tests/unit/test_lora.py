"""Adapters where neither peft nor transformers is needed: settings, targets, what is refused."""

from __future__ import annotations

import errno
import resource
import signal
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tiermem


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 8, bias=False)
        self.up = nn.Linear(8, 16)

    def forward(self, x: Any) -> Any:
        return self.up(self.v_proj(torch.tanh(self.q_proj(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def made(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"r": 0}, "r=0 is not a whole number above 0"),
        ({"r": True}, "r=True"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"bias": "some"}, "bias='some' is not one of"),
        ({"task_type": "causal_lm"}, "task_type='causal_lm' is not one of .*'CAUSAL_LM'"),
        ({"init": "pissa"}, "init='pissa' is not one of"),
        ({"rslora": 1}, "rslora=1"),
        ({"target_modules": 3}, "target_modules=3 is neither text nor names"),
        ({"target_modules": ["a", 3]}, "target_modules="),
        ({"modules_to_save": "head"}, "modules_to_save='head' is not a list"),
        ({"rank_pattern": {"a": 0}}, "rank_pattern"),
        ({"alpha_pattern": ["a"]}, "alpha_pattern"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=says):
        tiermem.Lora(**options)


def test_a_configuration_is_known_by_its_attributes() -> None:
    config = SimpleNamespace(
        r=4,
        lora_alpha=2,
        lora_dropout=0.1,
        target_modules={"v", "q"},
        use_rslora=True,
        use_dora=False,
    )
    assert tiermem.Lora.of(config) == tiermem.Lora(
        r=4, alpha=2, dropout=0.1, target_modules=["q", "v"], rslora=True
    )
    config.use_dora = True
    with pytest.raises(tiermem.ConfigError, match="use_dora=True cannot be had"):
        tiermem.Lora.of(config)
    config.use_dora, config.of_tomorrow = False, "on"
    with pytest.raises(tiermem.ConfigError, match="of_tomorrow='on' cannot be had"):
        tiermem.Lora.of(config)


@pytest.mark.parametrize("what", [None, 8, "r=8", SimpleNamespace(alpha=3)])
def test_what_is_no_configuration(what: Any) -> None:
    with pytest.raises(tiermem.ConfigError, match=r"takes a tiermem\.Lora"):
        tiermem.Lora.of(what)


def test_by_default_queries_and_values_get_adapters() -> None:
    model = made()
    names = tiermem.add_adapters(model, tiermem.Lora(r=2))
    assert {name.split(".")[2] for name in names} == {"q_proj", "v_proj"}
    assert [n for n, p in model.named_parameters() if p.requires_grad] == names


def test_what_begins_as_nothing_changes_nothing() -> None:
    tokens, plain, model = torch.arange(6), made(), made()
    tiermem.add_adapters(model, tiermem.Lora(target_modules=["embed", "q_proj"]))
    assert torch.equal(model(tokens), plain(tokens))
    assert isinstance(model.layers[0].q_proj, nn.Linear)
    assert torch.equal(deepcopy(model)(tokens), plain(tokens))


def test_parameters_may_be_on_the_meta_device_and_base_names_stay() -> None:
    with torch.device("meta"):
        model = Model().bfloat16()
    before = dict(model.named_parameters())
    names = tiermem.add_adapters(model, tiermem.Lora(r=2, target_modules="all-linear"))
    after = dict(model.named_parameters())
    assert all(after[name] is param and param.is_meta for name, param in before.items())
    added = {name: after[name] for name in names}
    assert after.keys() == before.keys() | added.keys()
    assert {(p.dtype, p.device.type) for p in added.values()} == {(torch.float32, "cpu")}


@pytest.mark.parametrize(
    "options, says",
    [
        ({"target_modules": ["nowhere"]}, "has no module of such a name"),
        ({"target_modules": ["norm"]}, "'norm' is a LayerNorm; adapters are for"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "not excluded"),
        ({"target_modules": ["embed"], "lora_bias": True}, "can have no lora_bias"),
        ({"modules_to_save": ["head"]}, "names 'head'; the model has no such module"),
    ],
)
def test_what_cannot_have_adapters(options: dict[str, Any], says: str) -> None:
    model = made()
    with pytest.raises(tiermem.ConfigError, match=says):
        tiermem.add_adapters(model, tiermem.Lora(**options))
    assert all(param.requires_grad for param in model.parameters())


def test_a_module_that_hangs_in_two_places_is_refused() -> None:
    model = made()
    model.layers[1].q_proj = model.layers[0].q_proj
    with pytest.raises(tiermem.ConfigError, match="hangs in several modules"):
        tiermem.add_adapters(model, tiermem.Lora())


def test_no_names_that_are_known() -> None:
    with pytest.raises(tiermem.ConfigError, match="none are known for Sequential; give names"):
        tiermem.add_adapters(nn.Sequential(nn.Linear(2, 2)), tiermem.Lora())


def test_adapters_come_once_and_before_wrap(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(tiermem.CheckpointError, match="Model has no adapters"):
        tiermem.save_adapters(model, tmp_path)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.WrapError, match=r"added before tier\.wrap"):
            tiermem.add_adapters(model, tiermem.Lora())
        tier.unwrap(model)
    tiermem.add_adapters(model, tiermem.Lora())
    with pytest.raises(tiermem.ConfigError, match="has an adapter already"):
        tiermem.add_adapters(model, tiermem.Lora())


def test_a_failed_save_leaves_the_former_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    tiermem.add_adapters(model, tiermem.Lora())
    tiermem.save_adapters(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    nn.init.ones_(model.layers[0].q_proj.lora_B.weight)

    def full(handle: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("tiermem.lora.files.os.fsync", full)
    with pytest.raises(tiermem.StorageError, match=f"errno 28.*adapters, path {tmp_path}"):
        tiermem.save_adapters(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_safetensors_cannot_write_is_a_storage_error(tmp_path: Path) -> None:
    """Its own errors have no number, and are of a class that is no ``OSError``."""
    model = made()
    tiermem.add_adapters(model, tiermem.Lora())

    def most(nbytes: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE)[0], signal.SIGXFSZ
    ignored = signal.signal(handler, signal.SIG_IGN)
    try:
        most(100)
        with pytest.raises(tiermem.StorageError, match=r"save them elsewhere \(errno 27") as found:
            tiermem.save_adapters(model, tmp_path / "out")
    finally:
        most(before)
        signal.signal(handler, ignored)
    assert found.value.errno == errno.EFBIG and found.value.path == str(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


# -- parameters that stay in HBM -------------------------------------------


def homes_of(model: nn.Module, **options: Any) -> dict[str, str]:
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="1MiB") as tier:
        tier.wrap(model, **options)
        return {row.block: row.home for row in tier.residency()}


def test_adapters_stay_and_frozen_blocks_do_not() -> None:
    model = made()
    tiermem.add_adapters(model, tiermem.Lora(r=1))
    homes = homes_of(model)
    assert homes.pop("Model.resident[0]") == "hbm"
    assert set(homes.values()) == {"dram"}
    assert "Model.resident[0]" not in homes_of(model, resident=None)


def test_little_that_is_trained_stays_by_itself() -> None:
    model = made().requires_grad_(False)
    model.norm.requires_grad_(True)
    assert homes_of(model)["Model.resident[0]"] == "hbm"
    assert "Model.resident[0]" not in homes_of(made())


def test_a_predicate_says_what_stays() -> None:
    model = made()
    homes = homes_of(model, resident=lambda name, param: name.startswith("norm."))
    assert homes["Model.resident[0]"] == "hbm"
    with pytest.raises(tiermem.ConfigError, match="resident='all'"):
        homes_of(model, resident="all")


class Adapted(nn.Module):
    """A frozen layer, and what is trained beside it, as another library has it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


def test_a_step_writes_no_frozen_bytes_home_where_adapters_are_too_large_to_stay() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Adapted() for _ in range(12)])
    model = deepcopy(plain)
    x = torch.randn(4, 64)
    params = [p for p in plain.parameters() if p.requires_grad]
    trained = sum(p.numel() * p.element_size() for p in params)
    resident = torch.optim.AdamW(params, lr=1e-2)
    with tiermem.TierManager(device="cpu", hbm="128KiB", dram="4MiB") as tier:
        tier.wrap(model)
        assert "Sequential.resident[0]" not in {row.block for row in tier.residency()}
        optimizer = tier.optimizer(
            [p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, lr=1e-2
        )
        for step in range(4):
            before = tier.stats().links["hbm->dram"].nbytes if step else 0
            for module, stepper in ((plain, resident), (model, optimizer)):
                module(x).square().sum().backward()
                stepper.step()
                stepper.zero_grad()
        written = tier.stats().links["hbm->dram"].nbytes - before
        assert written <= 1.1 * 4 * trained  # weights, gradients and two states
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_stays_is_in_the_least_budget() -> None:
    """With what ``budgets_for`` says, adapters train; all that is theirs is at home in HBM."""
    model = made()
    tiermem.add_adapters(model, tiermem.Lora(r=1))
    params = [param for param in model.parameters() if param.requires_grad]
    found = tiermem.budgets_for(model, torch.optim.AdamW, params, device="cpu", hbm="64KiB")
    with tiermem.TierManager(device="cpu", hbm=found.hbm, dram=found.dram) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(params, torch.optim.AdamW, lr=0.1)
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
        rows = [row for row in tier.residency() if row.role in ("grad", "optimizer")]
        assert rows and all(row.home == "hbm" for row in rows)
        assert "hbm->dram" not in tier.stats().links


def test_what_stays_leaves_room_for_what_a_call_holds_or_is_refused_before_anything_moves() -> None:
    model = made()
    tiermem.add_adapters(model, tiermem.Lora(r=16, target_modules="all-linear"))
    params = [param for param in model.parameters() if param.requires_grad]
    settings = {"device": "cpu", "policy": "dram"}
    found = tiermem.budgets_for(model, torch.optim.AdamW, params, hbm="64KiB", **settings)
    least = tiermem.budgets_for(
        model, torch.optim.AdamW, params, hbm=found.least_hbm, **settings
    ).least_hbm
    with tiermem.TierManager(hbm=least - 4096, dram=found.dram, **settings) as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.CapacityError, match=rf"give hbm= at least .*\({least} bytes"):
            tier.optimizer(params, torch.optim.AdamW)
