"""Adapters on streamed weights against resident peft: losses, gradients, weights and files."""

from __future__ import annotations

import json
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiermem

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own
PREFIX = "base_model.model."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **options,
        )
    )


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=4, n_head=2, n_positions=64)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def qwen_moe() -> Any:
    """Its experts are stacked, and "all-linear" means none of them to peft."""
    config = transformers.Qwen2MoeConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    config._experts_implementation = "eager"  # others round differently by where bytes lie
    return transformers.Qwen2MoeForCausalLM(config)


def built(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = make().to(dtype)
    torch.manual_seed(1)  # what the adapters are drawn from
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def peft_name(name: str) -> str:
    """Returns what we call a parameter of a model with peft's adapters."""
    for part in (PREFIX, ".default", ".base_layer", ".modules_to_save"):
        name = name.replace(part, "", 1)
    return name


Seen = list[tuple[float, dict[str, Tensor]]]


def run(model: Any, optimizer: Any, steps: int = 3) -> Seen:
    """Trains, and returns each step's loss and gradients."""
    seen: Seen = []
    for step in range(steps):
        tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)  # dropout
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        grads = {
            peft_name(name): param.grad.clone()
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), grads))
    return seen


def assert_seen(found: Seen, expected: Seen) -> None:
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert torch.equal(mine[name], theirs[name]), name


def assert_weights(model: nn.Module, resident: nn.Module) -> None:
    theirs = {
        peft_name(name): tensor
        for name, tensor in resident.state_dict().items()
        if ".original_module" not in name
    }
    mine = model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def budget(model: nn.Module, share: float) -> int:
    """Returns the bytes of HBM for a share of the frozen weights, beside all of the adapters."""
    small = 24 * sum(param.numel() for param in trained(model)) + (32 << 10)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return small + int(share * sum(p.numel() * p.element_size() for p in frozen))


def moved(tier: tiermem.TierManager, link: str) -> int:
    links = tier.stats().links
    return links[link].nbytes if link in links else 0


F32, BF16 = torch.float32, torch.bfloat16
Q_V = ["q_proj", "v_proj"]
CASES: dict[str, tuple[Callable[[], Any], torch.dtype, dict[str, Any]]] = {
    "llama": (llama, F32, {}),
    "llama-bf16-dropout": (llama, BF16, {"lora_dropout": 0.2, "target_modules": Q_V}),
    "gpt2-dropout": (gpt2, F32, {"lora_dropout": 0.2}),
    "gpt2-biases": (gpt2, F32, {"bias": "all", "init_lora_weights": "gaussian"}),
    "gpt2-own-biases": (gpt2, F32, {"bias": "lora_only", "lora_bias": True}),
    "t5": (t5, F32, {}),
    "mixtral-bf16": (mixtral, BF16, {"target_modules": Q_V}),
    # not of the second layer alone: peft takes the last names of what matches
    "mixtral-expression": (mixtral, F32, {"target_modules": r".*layers\.1\..*[qv]_proj"}),
    "qwen-moe-all-linear": (qwen_moe, F32, {"target_modules": "all-linear"}),
    "all-linear": (
        llama,
        F32,
        {"target_modules": "all-linear", "use_rslora": True, "init_lora_weights": False},
    ),
    "embedding": (llama, BF16, {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "expression": (
        llama,
        F32,
        {"target_modules": r".*layers\.[13]\..*_proj", "exclude_modules": ["down_proj"]},
    ),
    "patterns": (
        llama,
        F32,
        {
            "target_modules": Q_V,
            "modules_to_save": ["lm_head"],
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 5},
            "layers_to_transform": [1, 2],
        },
    ),
    # peft takes names by their ends: "norm" is also that of each layer
    "norms": (llama, F32, {"target_modules": Q_V, "modules_to_save": ["norm"]}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_losses_gradients_and_files_are_peft_s(name: str, tmp_path: Path) -> None:
    make, dtype, options = CASES[name]
    resident = peft.get_peft_model(built(make, dtype), peft.LoraConfig(r=4, **options))
    expected = run(resident, torch.optim.AdamW(trained(resident), lr=1e-2))
    model = built(make, dtype)
    before = {name for name, _ in model.named_parameters()}
    added = tiermem.add_adapters(model, peft.LoraConfig(r=4, **options))
    assert {name for name, _ in model.named_parameters()} == before | set(added)
    # a quarter would be less than the largest of three blocks takes
    hbm = budget(model, 0.75 if name == "mixtral-bf16" else 0.5)
    with tiermem.TierManager(device="cpu", hbm=hbm, dram="16MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(trained(model), torch.optim.AdamW, lr=1e-2)
        assert_seen(run(model, optimizer), expected)
        assert moved(tier, "dram->hbm") > 0
        if "modules_to_save" not in options and "bias" not in options:
            assert moved(tier, "hbm->dram") == 0
        assert_weights(model, resident)
        tiermem.save_adapters(model, tmp_path / "ours")
        _check_files(make, dtype, resident, tmp_path)
        with torch.no_grad():
            for param in trained(model):
                param.zero_()
        tiermem.load_adapters(model, tmp_path / "theirs")
        assert_weights(model, resident)


def _check_files(
    make: Callable[[], Any], dtype: torch.dtype, resident: Any, tmp_path: Path
) -> None:
    """What we saved loads into peft, and what peft saves into a plain model of ours."""
    again = peft.PeftModel.from_pretrained(built(make, dtype), tmp_path / "ours", is_trainable=True)
    mine, theirs = again.state_dict(), resident.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    resident.save_pretrained(tmp_path / "theirs")  # weights of adapted embeddings, too
    saved = [
        load_file(tmp_path / which / "adapter_model.safetensors") for which in ("ours", "theirs")
    ]
    assert saved[0].keys() == {name for name in saved[1] if "base_layer.weight" not in name}
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    plain = built(make, dtype)
    state = torch.get_rng_state()
    tiermem.load_adapters(plain, tmp_path / "theirs")
    assert torch.equal(state, torch.get_rng_state())
    assert_weights(plain, resident)


def distilbert(kind: str) -> Any:
    config = transformers.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=32, n_layers=2)
    config.n_heads = 2
    return getattr(transformers, f"DistilBertFor{kind}")(config)


@pytest.mark.parametrize(
    "task, kind, heads",
    [
        ("SEQ_CLS", "SequenceClassification", {"pre_classifier", "classifier"}),
        ("TOKEN_CLS", "TokenClassification", {"classifier"}),
        ("QUESTION_ANS", "QuestionAnswering", {"qa_outputs"}),
    ],
)
def test_heads_of_a_task_are_those_that_peft_trains(
    task: str, kind: str, heads: set[str], tmp_path: Path
) -> None:
    def make() -> Any:
        return distilbert(kind)

    resident = peft.get_peft_model(
        built(make), peft.LoraConfig(task_type=task, target_modules=["q_lin"])
    )
    resident.save_pretrained(tmp_path / "theirs")  # with heads that the model has not
    model = built(make)
    tiermem.add_adapters(model, peft.LoraConfig(task_type=task, target_modules=["q_lin"]))
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    theirs = {name for name, param in resident.named_parameters() if param.requires_grad}
    assert names == {peft_name(name) for name in theirs}
    assert {name.partition(".")[0] for name in names} == heads | {"distilbert"}
    tiermem.load_adapters(model, tmp_path / "theirs")
    assert_weights(model, resident)
    plain = built(make)
    tiermem.load_adapters(plain, tmp_path / "theirs")
    assert_weights(plain, resident)
    tiermem.save_adapters(plain, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(built(make), tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], value) for name, value in resident.state_dict().items())


def test_what_would_be_adapted_and_trained_whole_is_refused() -> None:
    model = built(lambda: distilbert("SequenceClassification"))
    options = {"task_type": "SEQ_CLS", "target_modules": "all-linear"}
    with pytest.raises(tiermem.ConfigError, match="'pre_classifier' is trained whole, too"):
        tiermem.add_adapters(model, tiermem.Lora(**options))
    assert all(param.requires_grad for param in model.parameters())
    tiermem.add_adapters(model, tiermem.Lora(**options, exclude_modules=["pre_classifier"]))
    assert model.pre_classifier.weight.requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant: bool) -> None:
    how = {"use_reentrant": reentrant}

    def made() -> Any:
        model = built(llama)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        return model.train()

    config = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=Q_V)
    resident = peft.get_peft_model(made(), config)
    expected = run(resident, torch.optim.SGD(trained(resident), lr=0.1))
    model = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        tiermem.add_adapters(model, config)
    with tiermem.TierManager(device="cpu", hbm=budget(model, 0.5), dram="16MiB") as tier:
        tier.wrap(model)
        plain = torch.optim.SGD(trained(model), lr=0.1)  # adapters are in HBM all the time
        assert_seen(run(model, plain), expected)
        assert_weights(model, resident)


def test_files_below_dram_and_a_master_in_hbm(tmp_path: Path) -> None:
    """A quarter of the weights in HBM; whatever the policy says, adapters keep all theirs there."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    big = lambda: llama(tie_word_embeddings=True).double()  # noqa: E731
    resident = peft.get_peft_model(built(big, torch.float64), config)
    expected = run(resident, torch.optim.AdamW(trained(resident), lr=1e-2))
    model = built(big, torch.float64)
    tiermem.add_adapters(model, config)
    with tiermem.TierManager(
        device="cpu",
        hbm=budget(model, 0.55),
        dram="1MiB",
        nvme=tmp_path,
        policy={"optimizer": "nvme", "grads": "dram", "params": "auto"},
    ) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(trained(model), torch.optim.AdamW, lr=1e-2)
        assert_seen(run(model, optimizer), expected)
        rows = [row for row in tier.residency() if "lora_" in row.block or "resident" in row.block]
        assert {row.role for row in rows} == {"param", "grad", "optimizer"}
        assert all(row.home == "hbm" for row in rows)


def test_at_the_turn_nothing_moves_twice() -> None:
    """The blocks that close forward open backward: per pass, what does not fit moves once."""
    model = built(lambda: llama())
    tiermem.add_adapters(model, tiermem.Lora(r=2, target_modules=Q_V))
    with tiermem.TierManager(device="cpu", hbm=budget(model, 0.6), dram="16MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(trained(model), torch.optim.AdamW, lr=1e-2)
        run(model, optimizer, steps=4)  # the order is learned
        rows = [r for r in tier.residency() if r.role == "param" and r.home == "dram"]
        frozen = sum(row.nbytes for row in rows)
        there = sum(row.nbytes for row in tier.residency() if row.home == "hbm")
        free = budget(model, 0.6) - there
        tier.reset_stats()
        run(model, optimizer, steps=1)
        largest = max(row.nbytes for row in rows)
        assert moved(tier, "hbm->dram") == 0
        # either pass brings what is missing, and one block more: its place is another's until then
        assert moved(tier, "dram->hbm") <= 2 * (frozen - free + 2 * largest)


def test_wrapping_peft_s_own_adapters_keeps_them_in_hbm() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    resident = peft.get_peft_model(built(llama), config)
    expected = run(resident, torch.optim.AdamW(trained(resident), lr=1e-2))
    model = peft.get_peft_model(built(llama), config)
    with tiermem.TierManager(device="cpu", hbm="600KiB", dram="16MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(trained(model), torch.optim.AdamW, lr=1e-2)
        assert_seen(run(model, optimizer), expected)
        assert moved(tier, "hbm->dram") == 0
        homes = {row.block: row.home for row in tier.residency()}
        assert homes["PeftModel.resident[0]"] == "hbm"


@pytest.mark.parametrize("share", [0.5, 8.0])
@pytest.mark.parametrize("make", [mixtral, qwen_moe])
@pytest.mark.one_in(2)
def test_peft_s_adapters_of_stacked_experts(make: Callable[[], Any], share: float) -> None:
    """They put a function in the place of each stacked parameter, in every call."""

    def outputs(model: Any) -> list[Tensor]:
        tokens, found = torch.arange(12)[None], []
        with torch.no_grad():
            found += [model(tokens).logits for _ in range(4)]
            with model.disable_adapter():
                found.append(model(tokens).logits)
            model.merge_adapter()
            found.append(model(tokens).logits)
            model.unmerge_adapter()
        return found

    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    resident = peft.get_peft_model(built(make), config)
    expected = run(resident, torch.optim.AdamW(trained(resident), lr=1e-2), steps=5)
    model = peft.get_peft_model(built(make), config)
    hbm = budget(model, share)
    with tiermem.TierManager(device="cpu", hbm=hbm, dram="16MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(trained(model), torch.optim.AdamW, lr=1e-2)
        assert_seen(run(model, optimizer, steps=5), expected)
        stacked = [row.nbytes for row in tier.residency() if row.block.endswith(".base_layer")]
        assert moved(tier, "hbm->dram") < 5 * sum(stacked)  # torch sets each to itself in a call
        found = outputs(model)
        assert all(torch.equal(a, b) for a, b in zip(found, outputs(resident), strict=True))
    mine, theirs = model.state_dict(), resident.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_merging_peft_s_adapters_in_the_tiers() -> None:
    """Layers are watched for writes that torch does not count only while adapters are merged."""

    def outputs(model: Any) -> list[Tensor]:
        tokens, found = torch.arange(12)[None], []
        with torch.no_grad():
            model.merge_adapter()
            found += [model(tokens).logits, model(tokens).logits]
            with model.disable_adapter():  # takes them out, in the forward
                found.append(model(tokens).logits)
            found.append(model(tokens).logits)
            model.merge_adapter()
            found.append(model(tokens).logits)
            model.unmerge_adapter()
            found.append(model(tokens).logits)
        return found

    config = peft.LoraConfig(r=4, target_modules=Q_V, init_lora_weights=False)
    expected = outputs(peft.get_peft_model(built(llama), config))
    model = peft.get_peft_model(built(llama), config)
    with tiermem.TierManager(device="cpu", hbm="400KiB", dram="16MiB") as tier:
        tier.wrap(model)
        found = outputs(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_adapters_on_weights_that_stay_in_their_files(tmp_path: Path) -> None:
    built(llama, BF16).save_pretrained(tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    config = peft.LoraConfig(r=4, lora_dropout=0.2)
    base = auto.from_pretrained(tmp_path, dtype=BF16)
    torch.manual_seed(1)
    resident = peft.get_peft_model(base, config)
    expected = run(resident, torch.optim.AdamW(trained(resident), lr=1e-2))
    with tiermem.TierManager(device="cpu", hbm="400KiB", dram="1MiB") as tier:
        torch.manual_seed(1)
        model = tiermem.load_checkpoint(auto, tmp_path, tier=tier, lora=config)
        optimizer = tier.optimizer(trained(model), torch.optim.AdamW, lr=1e-2)
        assert_seen(run(model, optimizer), expected)
        assert moved(tier, "hbm->dram") == moved(tier, "dram->nvme") == 0
        tiermem.save_adapters(model, tmp_path / "adapters")
    base = auto.from_pretrained(tmp_path, dtype=BF16)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    theirs = resident.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())


# -- what cannot be had ----------------------------------------------------


@pytest.mark.parametrize(
    "options, says",
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [(0, 2), (1, 3)]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_options_of_peft_that_cannot_be_had(options: dict[str, Any], says: str) -> None:
    model = built(llama)
    with pytest.raises(tiermem.ConfigError, match=says):
        tiermem.add_adapters(model, peft.LoraConfig(target_modules=Q_V, **options))
    assert all(param.requires_grad for param in model.parameters())
    assert not [name for name, _ in model.named_parameters() if "lora" in name]


def test_another_kind_of_adapters() -> None:
    with pytest.raises(tiermem.ConfigError, match="peft_type='IA3'"):
        tiermem.Lora.of(types.SimpleNamespace(r=8, peft_type=peft.PeftType.IA3))
    with pytest.raises(tiermem.ConfigError, match="not dict"):
        tiermem.Lora.of({})


@pytest.mark.parametrize(
    "make, targets, says",
    [
        (mixtral, "all-linear", r"adapters on \['down_proj', .*modules only for .*'q_proj'"),
        (
            mixtral,
            ["q_proj", "w1", "w2", "w3"],
            r"adapters on \['down_proj', 'gate_up_proj'\], too",
        ),
        (mixtral, ["q_proj", "w1"], "without also targeting w3"),
        (qwen_moe, ["q_proj", "w1"], r"target_modules=\['w1'\]: .*no module has such a name"),
    ],
)
def test_experts_that_are_one_parameter_are_refused(
    make: Callable[[], Any], targets: Any, says: str
) -> None:
    """Where peft would adapt them, or the names are theirs."""
    model = built(make)
    with pytest.raises(tiermem.ConfigError, match=says) as error:
        tiermem.add_adapters(model, tiermem.Lora(target_modules=targets))
    assert "are stacked in parameters such as 'model.layers.0.mlp.experts." in str(error.value)
    assert all(param.requires_grad for param in model.parameters())


def test_all_linear_layers_beside_stacked_experts_without_peft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiermem.lora.experts.find_spec", lambda name: None)
    with pytest.raises(tiermem.ConfigError, match="peft, whose rules these are, is not installed"):
        tiermem.add_adapters(built(qwen_moe), tiermem.Lora(target_modules="all-linear"))
    assert tiermem.add_adapters(built(qwen_moe), tiermem.Lora(target_modules=Q_V))


def test_a_tied_module_cannot_be_saved_whole() -> None:
    model = built(lambda: llama(tie_word_embeddings=True))
    with pytest.raises(tiermem.ConfigError, match="'lm_head', whose weight is tied"):
        tiermem.add_adapters(model, tiermem.Lora(modules_to_save=["lm_head"]))


def saved(tmp_path: Path) -> dict[str, Tensor]:
    model = built(llama)
    tiermem.add_adapters(model, tiermem.Lora(r=2, target_modules=["q_proj"]))
    tiermem.save_adapters(model, tmp_path)
    return load_file(tmp_path / "adapter_model.safetensors")


FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


def _lacking(found: dict[str, Tensor], path: Path) -> None:
    del found[FIRST]
    save_file(found, path / "adapter_model.safetensors")


def _another(found: dict[str, Tensor], path: Path) -> None:
    save_file({**found, "more": torch.zeros(1)}, path / "adapter_model.safetensors")


def _shaped(found: dict[str, Tensor], path: Path) -> None:
    save_file({**found, FIRST: torch.zeros(3, 64)}, path / "adapter_model.safetensors")


def _cut(found: dict[str, Tensor], path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _no_file(found: dict[str, Tensor], path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()


def _no_settings(found: dict[str, Tensor], path: Path) -> None:
    (path / "adapter_config.json").unlink()


def _no_json(found: dict[str, Tensor], path: Path) -> None:
    (path / "adapter_config.json").write_text("{", encoding="utf-8")


def _twice(found: dict[str, Tensor], path: Path) -> None:
    (path / "adapter_config.json").write_text('{"r": 2, "r": 2}', encoding="utf-8")


def _elsewhere(found: dict[str, Tensor], path: Path) -> None:
    file = path / "adapter_config.json"
    options = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**options, "target_modules": ["nowhere"]}), encoding="utf-8")


@pytest.mark.parametrize(
    "spoil, says",
    [
        (_lacking, rf"lacks 1 tensors of the model's: \['{FIRST}'\]"),
        (_another, "no place for: .*'more'"),
        (_shaped, rf"'{FIRST}' has the shape \[3, 64\]; the model's has \[2, 64\]"),
        (_cut, "adapter_model.safetensors cannot be read as safetensors"),
        (_no_file, "adapter_model.safetensors is not there"),
        (_no_settings, "adapter_config.json cannot be read"),
        (_no_json, "no configuration of adapters"),
        (_twice, "a name is there twice"),
        (_elsewhere, "does not fit the model"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, spoil: Any, says: str) -> None:
    spoil(saved(tmp_path), tmp_path)
    model = built(llama)
    with pytest.raises(tiermem.CheckpointError, match=says):
        tiermem.load_adapters(model, tmp_path)
    assert all(param.requires_grad for param in model.parameters())
    assert not [name for name, _ in model.named_parameters() if "lora" in name]


def test_adapters_of_another_rank_are_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    model = built(llama)
    tiermem.add_adapters(model, tiermem.Lora(r=4, target_modules=["q_proj"]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(tiermem.CheckpointError, match="rank 2 and scaling 8"):
        tiermem.load_adapters(model, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
