"""Surogate's options: how they are read, the rules between them, and what is refused."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support_integrations import batches, decoder, resident_losses, twin
from torch import nn

from tiermem import CapacityError, ConfigError, WrapError
from tiermem.integrations import surogate
from tiermem.integrations.surogate import NorMuon, Options, explain

FILE = """
model: some/model
output_dir: ./output
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
sequence_len: 2048
learning_rate: 2e-4   # YAML reads this as text
recipe: bf16
optimizer: adamw
zero_level: 2
offload_grads: true
offload_optimizer: true
lora: false
datasets:
  - path: "${SOME_FOLDER}/data"
    type: auto
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOME_FOLDER", "/data")
    path = tmp_path / "train.yaml"
    path.write_text(FILE)
    return path


def offloading(model: nn.Module | None = None, **options: Any) -> surogate.Offloading:
    options = {"optimizer": "adamw", "recompute": False, **options}
    given = options.pop("config", None)
    return surogate.Offloading(
        decoder(3) if model is None else model, given, device="cpu", dram="16MiB", **options
    )


# -- reading ---------------------------------------------------------------


def test_a_file_as_it_is(file: Path) -> None:
    options = Options(file)
    assert options.learning_rate == 2e-4
    assert options.offload_grads and options.shard_gradients and not options.shard_weights
    assert options.scripts_own["datasets"] == [{"path": "/data/data", "type": "auto"}]
    assert options.unknown == ()


def test_keywords_go_over_the_file(file: Path) -> None:
    options = Options(file, learning_rate=1e-3, offload_grads=False)
    assert options.learning_rate == 1e-3 and not options.offload_grads


def test_a_mapping() -> None:
    assert Options({"offload_residual": True}).offload_residual


def test_none_is_the_default() -> None:
    assert Options(offload_residual=None, zero_level=None).zero_level == 1


def test_unknown_names_are_warned_about_with_the_nearest() -> None:
    with pytest.warns(UserWarning, match=r"no option 'offload_optimiser'.*offload_optimizer"):
        options = Options({"offload_optimiser": True})
    assert options.unknown == ("offload_optimiser",)
    assert not options.offload_optimizer


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("offload_residual", "perhaps", "true or false, not 'perhaps' (str)"),
        ("offload_residual", 1, "true or false, not 1 (int)"),
        ("zero_level", "two", "a whole number, not 'two' (str)"),
        ("zero_level", 2.5, "a whole number, not 2.5 (float)"),
        ("learning_rate", [], "a number, not [] (list)"),
        ("learning_rate", "inf", "a number"),
        ("master_dtype", "int8", "one of fp32"),
        ("optimizer", "sgd", "one of adamw, adamw_8bit, normuon, not 'sgd' (str)"),
        ("lmhead_chunks", 0, "at least 1"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("learning_rate", -1, "at least 0, not -1"),
        ("weight_decay", -0.1, "at least 0"),
        ("max_grad_norm", -1.0, "at least 0"),
        ("adamw_beta1", 1.0, "at least 0 and less than 1, not 1.0"),
        ("normuon_momentum", 2, "less than 1"),
        ("master_dtype", torch.int8, "one of fp32"),
        ("optimizer", ["adamw"], "one of adamw, adamw_8bit, normuon"),
    ],
)
def test_wrong_types_name_option_value_and_type(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options({name: value})
    assert name in str(caught.value) and says in str(caught.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        Options(missing)
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"broken\.yaml is no YAML"):
        Options(broken)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match=r"broken\.yaml does not hold a mapping"):
        Options(broken)
    broken.write_text("offload_grads: true")
    with pytest.raises(ConfigError, match=r"broken\.yaml: offload_grads needs"):
        Options(broken)
    broken.write_text("offload_grads: true\nlora: false\noffload_grads: false\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml: 'offload_grads' is given twice"):
        Options(broken)
    with pytest.raises(ConfigError, match="not int"):
        Options(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"3 \(int\) is no name of an option"):
        Options({3: True})  # type: ignore[dict-item]


# -- rules -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options, missing",
    [
        ({"offload_grads": True}, "offload_grads needs shard_gradients: true"),
        ({"persistent_quants": True}, "persistent_quants needs shard_weights: true"),
        (
            {"persistent_quants": True, "zero_level": 2},
            "persistent_quants needs shard_weights: true",
        ),
        ({"offload_quants": True}, "offload_quants needs persistent_quants: true"),
        (
            {"offload_quants": True, "zero_level": 3},
            "offload_quants needs persistent_quants: true",
        ),
        ({"cpu_training": True, "zero_level": 2}, "exclude each other"),
        ({"cpu_training": True, "qlora_bnb": True}, "exclude each other"),
        ({"zero_level": 4}, "zero_level is 1, 2 or 3"),
        ({"qlora_fp8": True, "qlora_fp4": True}, "qlora_fp8 and qlora_fp4 exclude each other"),
    ],
)
def test_rules_name_what_is_missing(options: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        Options(options)


@pytest.mark.parametrize(
    "options",
    [{"shard_gradients": True}, {"zero_level": 2}, {"zero_level": 3}, {"cpu_training": True}],
)
def test_what_lets_gradients_leave(options: dict[str, Any]) -> None:
    assert Options(offload_grads=True, **options).offload_grads


def test_zero_levels() -> None:
    flags = [
        (o.shard_gradients, o.shard_weights) for o in (Options(zero_level=n) for n in (1, 2, 3))
    ]
    assert flags == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("how", [{"zero_level": 3}, {"shard_weights": True}])
def test_quantized_copies_are_refused(how: dict[str, Any]) -> None:
    for more in ({}, {"offload_quants": True}):
        with pytest.raises(ConfigError, match=r"quantized copies.*several GPUs"):
            Options(persistent_quants=True, **more, **how)


@pytest.mark.parametrize("which", ["qlora_fp8", "qlora_fp4", "qlora_bnb"])
@pytest.mark.parametrize("name", ["offload_master", "persistent_quants", "offload_quants"])
def test_qlora_warns(which: str, name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect under QLoRA .{which}"):
        options = Options({which: True, name: True})
    assert options.values[name] is False


def test_several_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gpus: 4 asks for 4 GPUs.*one GPU"):
        Options(gpus=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="gpus: 0 asks for 2 GPUs"):
        Options(gpus=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Options(gpus=0).gpus == 0


# -- what options do -------------------------------------------------------


def test_without_effect() -> None:
    names = (
        "use_zero_copy",
        "use_write_combined",
        "use_all_to_all_reduce",
        "memcpy_all_gather",
        "memcpy_send_recv",
    )
    with offloading() as plain, offloading(**dict.fromkeys(names, True), attn_bwd_chunks=2) as run:
        assert run.policy == plain.policy
        assert run.tier.stats().budget == plain.tier.stats().budget
        rows = {row.option: row.setting for row in run.explain()}
        assert all(rows[name].startswith("no effect") for name in (*names, "attn_bwd_chunks"))


def test_explain_has_every_option_that_was_written(file: Path) -> None:
    with pytest.warns(UserWarning, match="no option 'oflload_grads'"):
        rows = {row.option: row for row in explain(file, oflload_grads=True)}
    assert set(rows) == {*Options(file).given, "oflload_grads"}
    assert rows["offload_optimizer"].setting == '`Policy(optimizer="dram")`'
    assert "script's own" in rows["datasets"].note
    assert "ignored" in rows["oflload_grads"].note


def test_what_others_leave_without_effect_is_said() -> None:
    rows = {row.option: row for row in explain(cpu_training=True, lora=False, normuon_beta2=0.5)}
    assert rows["normuon_beta2"].setting == "no effect"
    assert rows["normuon_beta2"].note == "optimizer is not normuon"
    (row,) = (r for r in explain(cpu_training=True, optimizer="normuon") if r.option == "optimizer")
    assert row.note == "with cpu_training the host steps fp32 AdamW"


def test_what_is_off_is_not_said_to_be_on() -> None:
    names = ("offload_optimizer", "offload_residual", "persistent_quants", "recompute")
    rows = {row.option: row for row in explain(**dict.fromkeys(names, False), zero_level=1)}
    assert {(rows[name].setting, rows[name].note) for name in names} == {("no effect", "it is off")}
    (row,) = explain(shard_weights=False)
    assert row.setting == "no effect on one GPU"


def test_residuals_of_a_model_without_layers_leave() -> None:
    """There are no first layers to count then: what any module saves leaves."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Bilinear(64, 64, 8))[0:2]
    with offloading(model, offload_residual=True) as run:
        run.model(torch.randn(64, 64)).square().mean().backward()
        assert run.tier.stats().activations.offloaded > 0


def test_keys_of_another_mapping_are_merged(tmp_path: Path) -> None:
    """YAML's merge key; what is written beside it counts over it, and is not given twice."""
    path = tmp_path / "train.yaml"
    path.write_text("distributed: &base {zero_level: 3, gpus: 1}\n<<: *base\nzero_level: 2\n")
    options = Options(path)
    assert options.zero_level == 2 and options.gpus == 1
    path.write_text("<<: {zero_level: 3}\nzero_level: 2\nzero_level: 1\n")
    with pytest.raises(ConfigError, match="'zero_level' is given twice"):
        Options(path)


def test_a_number_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate must be a number"):
        Options(learning_rate=10**400)


def test_layers_recompute_until_the_end_alone() -> None:
    """After it the model is an ordinary one, which can be saved whole and trained again."""
    model = decoder(3)
    kinds = [type(module) for module in model.modules()]
    for end in ("with", "close"):
        run = offloading(model, recompute=True)
        assert [type(module) for module in model.modules()] != kinds
        if end == "with":
            with run:
                pass
        else:
            run.close()
        assert [type(module) for module in model.modules()] == kinds
        torch.save(model, io.BytesIO())
    model.is_gradient_checkpointing = True  # as those of transformers say: it is the program's own
    with offloading(model, recompute=True):
        assert [type(module) for module in model.modules()] == kinds


def test_a_model_that_cannot_be_wrapped_is_as_it_was() -> None:
    """Recomputation is undone where a budget is too small, or the model wrapped already."""
    model = decoder(3)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(CapacityError):
        offloading(model, recompute=True, hbm=4096)
    assert [type(module) for module in model.modules()] == kinds
    with offloading(model) as run, pytest.raises(WrapError):
        offloading(run.model, recompute=True)
    assert [type(module) for module in model.modules()] == kinds


def test_optimizer_settings() -> None:
    model = decoder(3)
    settings = {"learning_rate": 3e-3, "weight_decay": 0.1, "adamw_beta1": 0.8, "adamw_beta2": 0.9}
    with offloading(twin(model), **settings, adamw_epsilon=1e-6, max_grad_norm=0.01) as run:
        optimizer = run.optimizer()
        losses = []
        for tokens in batches(3):
            loss = run.model(tokens)
            loss.backward()
            norm = run.step(optimizer)
            losses.append(loss.item())
        assert norm is not None and float(norm) > 0.01
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9), eps=1e-6)
    assert losses == resident_losses(model, reference, 3, max_norm=0.01)


def test_clipping_is_turned_off_by_zero() -> None:
    with offloading(max_grad_norm=0) as run:
        optimizer = run.optimizer()
        run.model(next(batches(1))).backward()
        assert run.step(optimizer) is None


def test_gradient_dtype() -> None:
    with offloading(decoder(3).bfloat16(), gradient_dtype="fp32") as run:
        run.optimizer()
        run.model(next(batches(1))).backward()
        assert {p.grad.dtype for p in run.model.parameters()} == {torch.float32}


def test_masters_narrower_than_weights_are_refused() -> None:
    model = decoder(3)
    with pytest.raises(ConfigError, match=r"master_dtype: torch.bfloat16 is narrower than 'embed"):
        offloading(model, master_dtype="bf16", recompute=True)
    model(next(batches(1))).backward()  # nothing was moved


def test_loss_in_chunks() -> None:
    model = decoder(3)
    with offloading(twin(model), lmhead_chunks=4) as run:
        tokens = next(batches(1))
        loss = run.loss(run.model.hidden(tokens), run.model.head, tokens.roll(-1))
        loss.backward()
        assert loss.item() == pytest.approx(model(tokens).item(), rel=1e-6)


def test_optimizers() -> None:
    pytest.importorskip("torchao")
    with offloading(optimizer="adamw_8bit") as run:
        optimizer = run.optimizer()
        before = run.model.head.weight.detach().clone()
        run.model(next(batches(1))).backward()
        run.step(optimizer)
        assert not torch.equal(before, run.model.head.weight)


def test_an_optimizer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(3)
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit .*needs torchao: pip install torchao"):
        offloading(model, optimizer="adamw_8bit")
    model(next(batches(1))).backward()  # the model is as it was


def test_normuon_is_the_resident_one() -> None:
    model = decoder(3)
    settings = {"normuon_momentum": 0.9, "normuon_beta2": 0.8, "weight_decay": 0.1}
    with offloading(
        twin(model), optimizer="normuon", offload_optimizer=True, max_grad_norm=0, **settings
    ) as run:
        optimizer = run.optimizer()
        losses = []
        for tokens in batches(3):
            loss = run.model(tokens)
            loss.backward()
            run.step(optimizer)
            losses.append(loss.item())
    tables = [model.embed.weight]
    layers = [p for n, p in model.named_parameters() if p.ndim == 2 and n != "embed.weight"]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": tables, "orthogonal": False},
        {"params": layers},
        {"params": norms, "orthogonal": False, "weight_decay": 0.0},
    ]
    reference = NorMuon(groups, momentum=0.9, beta2=0.8, weight_decay=0.1)
    assert losses == resident_losses(model, reference, 3, max_norm=None)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_orthogonalized_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(shape, generator=generator)
    values = torch.linalg.svdvals(surogate.normuon.orthogonalized(matrix))
    assert values.min() > 0.3 and values.max() < 1.3


# -- bad input -------------------------------------------------------------


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    with offloading() as run, pytest.raises(WrapError):
        offloading(run.model)


def test_a_model_without_layers_cannot_recompute() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="layer by layer"):
        offloading(model, recompute=True)
    model(torch.ones(1, 4)).sum().backward()


def test_recomputing_keeps_the_names() -> None:
    model = decoder(3)
    names = list(model.state_dict())
    with offloading(model, recompute=True) as run:
        assert list(run.model.state_dict()) == names
        assert [name for name, _ in run.model.named_parameters()] == names


def test_the_budget_can_be_given() -> None:
    with surogate.Offloading(
        decoder(3), device="cpu", hbm="8MiB", dram="16MiB", optimizer="adamw"
    ) as run:
        assert run.tier.stats().budget["hbm"] == 8 << 20


def test_nothing_is_warned_about_a_file_that_is_right(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options(file)
