"""Models loaded straight from folders of transformers, beside ``from_pretrained``."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from errno import EIO
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiermem
from tiermem.nn.wrap.intercepted import InterceptedModules
from tiermem.testing.io import Fault, ScriptedEngine

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft beside transformers

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {**SMALL, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "tied, bfloat16": lambda: transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=True, dtype=torch.bfloat16
    ),
    "experts, stacked and joined": lambda: transformers.Qwen2MoeConfig(
        **EXPERTS, num_experts=3, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "experts, stacked": lambda: transformers.MixtralConfig(**EXPERTS, num_local_experts=3),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
}


def save(folder: Path, config: Any, **options: Any) -> Any:
    """Saves a random model; returns what ``from_pretrained`` makes of it, nothing aligned."""
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # others round differently by where bytes lie
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for param in model.parameters():
        param.data = param.data.clone()
    return model


def nbytes(model: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in model.parameters())


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(7)[None]
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def check_equal(model: nn.Module, plain: nn.Module) -> None:
    own, other = model.state_dict(), plain.state_dict()
    assert list(own) == list(other)
    for name, value in other.items():
        assert own[name].dtype is value.dtype and torch.equal(own[name], value), name
    trained = [{n: p.requires_grad for n, p in m.named_parameters()} for m in (model, plain)]
    assert trained[0] == trained[1]
    pairs = zip(model.named_buffers(), plain.named_buffers(), strict=True)
    for (name, buffer), (also, value) in pairs:
        assert name == also and buffer.dtype is value.dtype and torch.equal(buffer, value), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_from_pretrained_makes(kind: str, tmp_path: Path) -> None:
    plain = save(tmp_path, CONFIGS[kind](), max_shard_size="30KB")
    expected = logits(plain)
    for home in ("auto", "dram", "hbm"):
        hbm = max(nbytes(plain) * 3 // 5, 96 << 10) if home != "hbm" else 2 * nbytes(plain)
        policy = tiermem.Policy(params=home)
        with tiermem.TierManager("cpu", hbm=hbm, dram="16MiB", policy=policy) as tier:
            model: Any = tiermem.load_checkpoint(
                transformers.AutoModelForCausalLM, tmp_path, tier=tier
            )
            assert type(model) is type(plain) and not model.training
            for _ in range(3):
                assert torch.equal(logits(model), expected)
            links = tier.stats().links
            if home == "auto":  # nothing was copied but what was read
                assert "hbm->dram" not in links and "dram->nvme" not in links
            check_equal(model, plain)
        check_equal(model, plain)
        assert torch.equal(logits(model), expected)


def test_parameters_that_the_class_freezes(tmp_path: Path, monkeypatch: Any) -> None:
    """What ``__init__`` freezes is trained once it is read, not what ``_init_weights`` does."""
    modeling = import_module("transformers.models.llama.modeling_llama")
    make, fill = modeling.LlamaMLP.__init__, modeling.LlamaPreTrainedModel._init_weights

    def make_and_freeze(self: Any, config: Any) -> None:
        make(self, config)
        self.up_proj.requires_grad_(False)
        self.down_proj.requires_grad_(False)

    def fill_and_freeze(self: Any, module: nn.Module) -> None:
        fill(self, module)
        if isinstance(module, modeling.LlamaMLP):
            module.down_proj.requires_grad_(False)
        if isinstance(module, modeling.LlamaRMSNorm):
            module.weight.requires_grad_(False)

    monkeypatch.setattr(modeling.LlamaMLP, "__init__", make_and_freeze)
    monkeypatch.setattr(modeling.LlamaPreTrainedModel, "_init_weights", fill_and_freeze)
    plain = save(tmp_path, transformers.LlamaConfig(**SMALL))
    frozen = {name.split(".")[-2] for name, p in plain.named_parameters() if not p.requires_grad}
    assert frozen == {"down_proj", "input_layernorm", "post_attention_layernorm", "norm"}
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        check_equal(model, plain)


def test_no_random_numbers_for_parameters_without_memory(tmp_path: Path, monkeypatch: Any) -> None:
    """On the meta device they are as much work as the rest of the model."""
    plain = save(tmp_path, CONFIGS["tied, bfloat16"]())
    drawn: list[torch.Size] = []
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, _counted(getattr(torch.Tensor, name), drawn))
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        assert not drawn
        assert not any("_is_hf_initialized" in vars(param) for param in model.parameters())
        transformers.AutoModelForCausalLM.from_config(plain.config)
        assert len(drawn) > 5  # what is counted would have been


def _counted(draw: Callable[..., torch.Tensor], drawn: list[torch.Size]) -> Any:
    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(self.shape)
        return draw(self, *args, **kwargs)

    return counted


def test_reads_begin_before_the_modules_are_intercepted(tmp_path: Path, monkeypatch: Any) -> None:
    """The rest of what wrapping takes is done meanwhile; cut short there, nothing is left."""
    plain = save(tmp_path, CONFIGS["llama"]())
    begun: list[int] = []
    install = InterceptedModules.install

    def fails_once(self: InterceptedModules) -> None:
        begun.append(tier.stats().prefetches)
        if len(begun) == 1:
            raise ZeroDivisionError
        install(self)

    monkeypatch.setattr(InterceptedModules, "install", fails_once)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(ZeroDivisionError):
            tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        assert not tier.residency()
        model: Any = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        assert begun == [begun[0], 2 * begun[0]] and begun[0] > 2
        assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("kind", ["both", "the head alone", "two values", "old buffers"])
def test_what_from_pretrained_makes_of_files_that_differ(kind: str, tmp_path: Path) -> None:
    """Weights that are tied and there twice, once, or with other values; names it passes over."""
    from safetensors.torch import load_file, save_file

    save(tmp_path, CONFIGS["tied, bfloat16"]())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"]
    changes: dict[str, torch.Tensor] = {
        "both": {"lm_head.weight": table.clone()},
        "the head alone": {"lm_head.weight": table.clone()},
        "two values": {"lm_head.weight": torch.randn_like(table)},
        "old buffers": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    }[kind]
    if kind == "the head alone":
        del tensors["model.embed_tokens.weight"]
    save_file({**tensors, **changes}, path, metadata={"format": "pt"})
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    apart = kind == "two values"
    said = pytest.warns(UserWarning, match=r"ties 'lm_head\.weight'") if apart else nullcontext()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with said:
            model: Any = tiermem.load_checkpoint(
                transformers.AutoModelForCausalLM, tmp_path, tier=tier
            )
        assert torch.equal(logits(model), logits(plain))
        check_equal(model, plain)
    assert (model.lm_head.weight is not model.model.embed_tokens.weight) == apart
    assert (plain.lm_head.weight is not plain.model.embed_tokens.weight) == apart


def test_a_module_that_ties_what_differs_is_refused(tmp_path: Path) -> None:
    toy(tmp_path / "toy.safetensors")

    def tied() -> nn.Module:
        model = Toy()
        model.second.bias = nn.Parameter(torch.zeros(8))
        model.third = nn.Linear(16, 8)
        model.third.bias = model.second.bias
        return model

    from safetensors.torch import save_file

    plain = tied()
    values = {k: v.clone() for k, v in plain.state_dict().items()} | {"third.bias": torch.ones(8)}
    save_file(values, tmp_path / "toy.safetensors")
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=r"'second\.bias' are one"):
            tiermem.load_checkpoint(tied, tmp_path / "toy.safetensors", tier=tier)
        assert not tier.residency()


POSITIONS: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("kind", ["experts, stacked", "clip"])
def test_what_is_saved_has_the_names_that_it_was_read_by(
    kind: str, original: bool, tmp_path: Path
) -> None:
    """Whether these are transformers' own names or those of earlier releases."""
    cls: Any = transformers.AutoModelForCausalLM
    if kind == "clip":
        cls = transformers.CLIPVisionModel
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.CLIPVisionConfig(
            **small, num_attention_heads=4, image_size=16, patch_size=8
        )
    else:
        config = CONFIGS[kind]()
    made = cls.from_config(config) if kind != "clip" else cls(config)
    first, theirs, ours = tmp_path / "first", tmp_path / "theirs", tmp_path / "ours"
    if kind == "clip" and original:
        first.mkdir()
        config.save_pretrained(first)
        state = {f"vision_model.{name}": value for name, value in made.state_dict().items()}
        save_file(state, first / "model.safetensors", metadata={"format": "pt"})
    else:
        made.save_pretrained(first, save_original_format=original)
    cls.from_pretrained(first).save_pretrained(theirs)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model: Any = tiermem.load_checkpoint(cls, first, tier=tier)
        model.save_pretrained(ours)
    read, named, written = (load_file(f / "model.safetensors") for f in (first, theirs, ours))
    assert written.keys() == named.keys() == read.keys()
    assert all(torch.equal(written[name], value) for name, value in named.items())


@pytest.mark.parametrize("kind", ["MarianMTModel", "PegasusForConditionalGeneration"])
def test_tables_of_positions_that_the_class_computes(kind: str, tmp_path: Path) -> None:
    """Marian's are in no checkpoint; those that are there are trained by ``from_pretrained``."""
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    cls(cls.config_class(**POSITIONS, decoder_start_token_id=1)).save_pretrained(tmp_path)
    plain = cls.from_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model: Any = tiermem.load_checkpoint(cls, tmp_path, tier=tier)
        check_equal(model, plain)
        with torch.no_grad():
            found, expected = (
                each(input_ids=ids, decoder_input_ids=ids).logits for each in (model, plain)
            )
        assert torch.equal(found, expected)
    check_equal(model, plain)
    assert not any("_is_hf_initialized" in vars(param) for param in model.parameters())


def test_what_a_class_keeps_in_float32(tmp_path: Path) -> None:
    cls = transformers.T5ForConditionalGeneration
    small = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    cls(transformers.T5Config(**small, num_layers=2)).save_pretrained(tmp_path)
    plain = cls.from_pretrained(tmp_path, dtype=torch.float16)
    assert len({param.dtype for param in plain.parameters()}) == 2
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tiermem.load_checkpoint(cls, tmp_path, tier=tier, dtype=torch.float16)
        check_equal(model, plain)
    check_equal(model, plain)


def test_buffers_that_a_class_keeps_in_float32(tmp_path: Path) -> None:
    """Their values say which experts are chosen."""
    config = transformers.DeepseekV3Config(
        **EXPERTS, moe_intermediate_size=24, n_routed_experts=8, n_group=2, topk_group=2,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    for buffer in (b for name, b in made.named_buffers() if "correction" in name):
        buffer.normal_()
    made.save_pretrained(tmp_path)
    cls: Any = transformers.AutoModelForCausalLM
    plain = cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.float32 in {buffer.dtype for buffer in plain.state_dict().values()}
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tiermem.load_checkpoint(cls, tmp_path, tier=tier, dtype=torch.bfloat16)
        check_equal(model, plain)
    check_equal(model, plain)


DIFFUSERS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {
        "sample_size": 8,
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": 8,
        "caption_projection_dim": 8,
        "pooled_projection_dim": 8,
    },
    "PriorTransformer": {"embedding_dim": 8, "num_embeddings": 7, "additional_embeddings": 4},
}
UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_class_of_diffusers(dtype: torch.dtype | None, tmp_path: Path) -> None:
    diffusers: Any = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    diffusers.UNet2DModel(**UNET).save_pretrained(tmp_path)
    plain = diffusers.UNet2DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    sample = torch.randn(2, 3, 8, 8, dtype=dtype or torch.float32)
    with tiermem.TierManager("cpu", hbm="4MiB", dram="16MiB") as tier, torch.no_grad():
        model: Any = tiermem.load_checkpoint(
            diffusers.UNet2DModel, tmp_path, tier=tier, dtype=dtype
        )
        assert type(model) is diffusers.UNet2DModel and not model.training
        assert dict(model.config) == {**plain.config, "_name_or_path": str(tmp_path)}
        check_equal(model, plain)
        for _ in range(2):
            assert torch.equal(model(sample, 3).sample, plain(sample, 3).sample)


@pytest.mark.parametrize("kind", ["SD3Transformer2DModel", "PriorTransformer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_buffers_of_a_class_of_diffusers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those that its files have, and others that it makes, are of the dtype that is asked for."""
    cls: Any = getattr(pytest.importorskip("diffusers"), kind)
    made = cls(num_attention_heads=2, attention_head_dim=4, num_layers=2, **DIFFUSERS[kind])
    made.save_pretrained(tmp_path)
    plain = cls.from_pretrained(tmp_path, torch_dtype=dtype)
    assert {buffer.dtype for buffer in plain.buffers()} == {dtype}
    with tiermem.TierManager("cpu", hbm="4MiB", dram="16MiB") as tier:
        model = tiermem.load_checkpoint(cls, tmp_path, tier=tier, dtype=dtype)
        assert torch.get_default_dtype() is torch.float32
        check_equal(model, plain)
    check_equal(model, plain)


def test_a_class_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    class Own(Toy):
        from_pretrained = None

    toy(tmp_path / "toy.safetensors")
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.ConfigError, match=r"Own is none of them; give it a callable"):
            tiermem.load_checkpoint(Own, tmp_path / "toy.safetensors", tier=tier)


def clip_vision() -> Any:
    """Its class embedding is drawn as the model is made, with ``torch.randn``."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**small, num_hidden_layers=1, image_size=16, patch_size=8)
    )


def diffllama() -> Any:
    """``torch.normal(0, std, size)`` draws on the meta device, too."""
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SMALL))


def mamba() -> Any:
    """What ``_init_weights`` draws is dropped where there are values."""
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8)
    )


class Drawing(transformers.PreTrainedModel):  # type: ignore[misc]
    """A buffer that no checkpoint has is drawn."""

    config_class = transformers.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("lasting", torch.zeros(3))
        self.register_buffer("drawn", torch.zeros(3), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            initialization = import_module("transformers.initialization")
            initialization.normal_(self.lasting)
            initialization.normal_(self.drawn)


def sana() -> Any:
    diffusers: Any = pytest.importorskip("diffusers")
    return diffusers.SanaTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        num_layers=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
    )


@pytest.mark.parametrize(
    "make",
    [clip_vision, diffllama, mamba, lambda: Drawing(transformers.LlamaConfig(**SMALL)), sana],
    ids=["CLIP", "DiffLlama", "Mamba", "buffer", "Sana"],
)
def test_the_random_generator_is_left_as_from_pretrained_leaves_it(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """Adapters are drawn after that."""
    model = make()
    cls = type(model)
    model.save_pretrained(tmp_path)
    left, drawn = [], []
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        for load in (cls.from_pretrained, lambda f: tiermem.load_checkpoint(cls, f, tier=tier)):
            torch.manual_seed(3)
            found: Any = load(tmp_path)
            left.append(torch.rand(4))
            drawn.append(dict(found.named_buffers()))
    assert torch.equal(*left)
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Gives a folder's file other tensors; None takes one away, ``__`` stands for a dot."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(path)
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(left, path, metadata={"format": "pt"})


def check_loads_alike(cls: Any, folder: Path, said: str | None, **options: Any) -> Any:
    """Compares weights, settings and the random generator's state with ``from_pretrained``."""
    torch.manual_seed(3)
    plain = cls.from_pretrained(folder, **options)
    left = torch.get_rng_state()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        torch.manual_seed(3)
        with nullcontext() if said is None else pytest.warns(UserWarning, match=said):
            model: Any = tiermem.load_checkpoint(cls, folder, tier=tier, **options)
        assert torch.equal(torch.get_rng_state(), left)
        assert type(model) is type(plain) and not model.training
        check_equal(model, plain)
        assert model.all_tied_weights_keys == plain.all_tied_weights_keys
        if plain.can_generate():
            assert model.generation_config.to_dict() == plain.generation_config.to_dict()
        assert model.config.to_dict() == plain.config.to_dict()
    check_equal(model, plain)
    return model


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16])
def test_a_head_that_the_files_do_not_have_is_drawn(dtype: Any, tmp_path: Path) -> None:
    """The same numbers as ``from_pretrained`` draws, and a warning that says so."""
    save(tmp_path, CONFIGS["llama"]())
    said = r"newly initialized.*'score\.weight'.*none of the model's.*'lm_head\.weight'"
    cls = transformers.AutoModelForSequenceClassification
    model = check_loads_alike(cls, tmp_path, said, num_labels=5, dtype=dtype)
    assert model.score.weight.shape == (5, 32) and model.score.weight.abs().sum()
    model = check_loads_alike(transformers.LlamaModel, tmp_path, r"left \('lm_head\.weight'\)")
    assert model.config._name_or_path == str(tmp_path)


def test_what_is_drawn_is_trained_and_saved(tmp_path: Path) -> None:
    """A head is drawn, trained and saved; the folder then has all that the class wants."""
    save(tmp_path / "base", CONFIGS["llama"]())
    cls: Any = transformers.AutoModelForSequenceClassification
    torch.manual_seed(3)
    plain = cls.from_pretrained(tmp_path / "base", pad_token_id=0)
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    batch = {"input_ids": torch.arange(1, 9)[None], "labels": torch.ones(1, dtype=torch.long)}
    with tiermem.TierManager("cpu", hbm=6 * nbytes(plain), dram="16MiB") as tier:
        torch.manual_seed(3)
        with pytest.warns(UserWarning, match="newly"):
            model: Any = tiermem.load_checkpoint(cls, tmp_path / "base", tier=tier, pad_token_id=0)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for _ in range(2):
            losses = [each(**batch).loss for each in (plain, model)]
            assert torch.equal(*losses)
            for loss, each in zip(losses, (stepper, optimizer), strict=True):
                loss.backward()
                each.step()
                each.zero_grad()
        model.save_pretrained(tmp_path / "tuned")
    again = check_loads_alike(cls, tmp_path / "tuned", None)
    check_equal(again, plain)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["no table", "no head", "neither", "the head alone", "layers"])
def test_weights_that_are_missing(kind: str, tied: bool, tmp_path: Path) -> None:
    """What is drawn and dropped is drawn as well: the random generator is left in one state."""
    table = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    save(tmp_path, transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied))
    edits: dict[str, dict[str, torch.Tensor | None]] = {
        "no table": {"model__embed_tokens__weight": None},
        "no head": {"lm_head__weight": None},
        "neither": {"lm_head__weight": None, "model__embed_tokens__weight": None},
        "the head alone": {"lm_head__weight": table, "model__embed_tokens__weight": None},
        "layers": {f"model__layers__1__mlp__{name}_proj__weight": None for name in ("up", "down")},
    }
    edit(tmp_path, **edits[kind])
    whole = tied and kind in ("no head", "the head alone")
    cls = transformers.AutoModelForCausalLM
    model = check_loads_alike(cls, tmp_path, None if whole else "newly initialized")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_missing_weights_of_a_class_that_keeps_them_in_float32(tmp_path: Path) -> None:
    """What is read is kept in float32, what is drawn has the dtype that was asked for."""
    cls = transformers.T5ForConditionalGeneration
    small = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    cls(transformers.T5Config(**small, num_layers=2)).save_pretrained(tmp_path)
    wo = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    edit(tmp_path, **{wo.replace(".", "__"): None})
    model = check_loads_alike(cls, tmp_path, "newly", dtype=torch.float16)
    weights = dict(model.named_parameters())
    assert weights[wo].dtype is torch.float16
    assert weights[wo.replace("block.1", "block.0")].dtype is torch.float32


def test_names_of_earlier_releases_are_passed_over(tmp_path: Path) -> None:
    """Positions and masks that were saved as buffers once, and a head that is not the class's."""
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    edit(tmp_path, bert__embeddings__position_ids=torch.arange(512)[None])
    check_loads_alike(transformers.AutoModelForPreTraining, tmp_path, None)
    check_loads_alike(transformers.BertModel, tmp_path, "none of the model's")
    check_loads_alike(transformers.AutoModelForMaskedLM, tmp_path, "'bert.pooler.dense.bias'")


def test_a_shape_that_differs_may_be_drawn(tmp_path: Path) -> None:
    cls = transformers.LlamaForSequenceClassification
    cls(transformers.LlamaConfig(**SMALL, num_labels=3)).save_pretrained(tmp_path)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=r"'score\.weight' has shape"):
            tiermem.load_checkpoint(cls, tmp_path, tier=tier, num_labels=5)
        assert not tier.residency()
    check_loads_alike(
        cls, tmp_path, "have another shape .*'score.weight'",
        num_labels=5, ignore_mismatched_sizes=True,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["subfolder", "variant", "sharded variant", "config", "option"])
def test_options_of_from_pretrained(way: str, tmp_path: Path) -> None:
    plain = save(tmp_path / "inside", CONFIGS["llama"]())
    cls: Any = transformers.AutoModelForCausalLM
    folder, options = tmp_path / "inside", {}
    if way == "subfolder":
        folder, options = tmp_path, {"subfolder": "inside"}
    elif way == "config":
        options = {"config": transformers.LlamaConfig.from_pretrained(folder, rope_theta=7.0)}
    elif way == "option":
        options = {"attn_implementation": "eager", "use_cache": False, "pad_token_id": None}
        options |= {"low_cpu_mem_usage": True, "revision": "main", "device_map": None}
    else:
        folder, options = tmp_path / "half", {"variant": "fp16"}
        size = "30KB" if way == "sharded variant" else "1GB"
        plain.half().save_pretrained(folder, variant="fp16", max_shard_size=size)
    plain = cls.from_pretrained(folder, **options)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model: Any = tiermem.load_checkpoint(cls, folder, tier=tier, **options)
        check_equal(model, plain)
        assert torch.equal(logits(model), logits(plain))
        ours, theirs = (each.config.to_dict() for each in (model, plain))
        if way == "subfolder":
            assert ours.pop("_name_or_path", None) != theirs.pop("_name_or_path", 0)
        assert ours == theirs
        assert model.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_map": "auto"}, "takes no device_map: the tiers say where .* give TierManager"),
        ({"load_in_8bit": True}, "takes no load_in_8bit: .*from_pretrained, then call tier.wrap"),
        ({"state_dict": {}}, "takes no state_dict; leave it out"),
        ({"use_safetensors": False}, "leave use_safetensors out"),
        ({"subfolder": "../other"}, "leads out of the folder"),
        ({"no_such_thing": 3}, "know no option no_such_thing"),
    ],
)
def test_options_that_say_another_thing_are_refused(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save(tmp_path, CONFIGS["llama"]())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.ConfigError, match=said):
            tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier, **given)
        assert not tier.residency()


@pytest.mark.parametrize("names", ["none", "float16", "mixed"])
def test_the_dtype_where_the_configuration_has_none(names: str, tmp_path: Path) -> None:
    """That of the first floating tensor by its name; a name and ``"auto"`` are taken, too."""
    save(tmp_path, CONFIGS["llama"]())
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    said["dtype"] = {"float16": "float16"}.get(names)
    path.write_text(json.dumps(said))
    if names == "mixed":
        edit(tmp_path, lm_head__weight=torch.ones(96, 32, dtype=torch.bfloat16))
    dtypes = {"none": torch.float32, "float16": torch.float16, "mixed": torch.bfloat16}
    for given in ({}, {"dtype": "auto"}):
        model = check_loads_alike(transformers.AutoModelForCausalLM, tmp_path, None, **given)
        assert {param.dtype for param in model.parameters()} == {dtypes[names]}
    check_loads_alike(transformers.AutoModelForCausalLM, tmp_path, None, dtype="float64")


@pytest.mark.parametrize("written", ["", "{}", "[]", '{"model_type": "llama", "hidden', POINTER])
def test_a_configuration_that_is_damaged(written: str, tmp_path: Path) -> None:
    save(tmp_path, CONFIGS["llama"]())
    (tmp_path / "config.json").write_text(written)
    said = "Git LFS" if written == POINTER else "no configuration can be made of it"
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=f"config.json: .*{said}"):
            tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        assert not tier.residency()


def test_a_folder_that_has_adapters_as_well(tmp_path: Path) -> None:
    """``from_pretrained`` puts them on; here they are asked for."""
    peft: Any = pytest.importorskip("peft")
    plain = save(tmp_path, CONFIGS["llama"]())
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(plain, how).save_pretrained(tmp_path)
    cls = transformers.AutoModelForCausalLM
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=r"LoraConfig\.from_pretrained"):
            tiermem.load_checkpoint(cls, tmp_path, tier=tier)
        lora = peft.LoraConfig.from_pretrained(tmp_path)
        model: Any = tiermem.load_checkpoint(cls, tmp_path, tier=tier, lora=lora)
        tiermem.load_adapters(model, tmp_path)
        expected = logits(cls.from_pretrained(tmp_path))
        assert torch.equal(logits(model.eval()), expected)


CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

class Own(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.again = self.second
        self.register_buffer("mean", torch.full((8,), 0.5))
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.zero_()
"""


def test_code_of_the_folder(tmp_path: Path, monkeypatch: Any) -> None:
    """It is run when that is asked for; weights that it draws are those of ``from_pretrained``."""
    monkeypatch.setattr("sys.stdin", io.StringIO())  # transformers asks, and nobody answers
    (tmp_path / "modeling_own.py").write_text(CODE)
    said = {"model_type": "llama", "auto_map": {"AutoModel": "modeling_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    tensors = {"mean": torch.ones(8)}
    for name in ("first", "second"):
        tensors |= {f"{name}.weight": torch.randn(8, 8), f"{name}.bias": torch.randn(8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    cls = transformers.AutoModel
    model = check_loads_alike(cls, tmp_path, None, trust_remote_code=True)
    assert type(model).__name__ == "Own" and model.mean.sum() == 8
    edit(tmp_path, first__weight=None, first__bias=None)
    check_loads_alike(cls, tmp_path, "newly initialized", trust_remote_code=True)


def test_a_text_model_has_the_dtype_of_its_part(tmp_path: Path) -> None:
    """``AutoModelForCausalLM`` makes the part that reads text, in that one's dtype."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4}
    vision |= {"out_hidden_size": 32, "patch_size": 8}
    config = transformers.Qwen3_5Config(text_config={**SMALL, "head_dim": 8}, vision_config=vision)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    written["dtype"], written["text_config"]["dtype"] = "float32", "bfloat16"
    path.write_text(json.dumps(written))
    found = {}
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        cls: Any = getattr(transformers, name)
        plain = cls.from_pretrained(tmp_path)
        with tiermem.TierManager("cpu", hbm="4MiB", dram="64MiB") as tier:
            with warnings.catch_warnings():  # of the part for images, which one of them leaves
                warnings.simplefilter("ignore", UserWarning)
                model: Any = tiermem.load_checkpoint(cls, tmp_path, tier=tier)
            assert type(model) is type(plain)
            check_equal(model, plain)
        found[name] = plain.dtype
    assert list(found.values()) == [torch.bfloat16, torch.float32]


def test_diffusers_unused_tensors_and_missing_ones(tmp_path: Path) -> None:
    """What is missing has no values after its ``from_pretrained``: an error."""
    cls: Any = pytest.importorskip("diffusers").UNet2DModel
    cls(**UNET).save_pretrained(tmp_path / "unet")
    file = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "of_another": torch.ones(2)}, file, metadata={"format": "pt"})
    plain = cls.from_pretrained(tmp_path, subfolder="unet")
    with tiermem.TierManager("cpu", hbm="4MiB", dram="16MiB") as tier:
        with pytest.warns(UserWarning, match="left .'of_another'"):
            model = tiermem.load_checkpoint(cls, tmp_path, tier=tier, subfolder="unet")
        check_equal(model, plain)
        del tensors["conv_in.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(tiermem.CheckpointError, match=r"conv_in\.weight'; from_pretrained"):
            tiermem.load_checkpoint(cls, file.parent, tier=tier)
        tier.close(discard=True)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """``from_pretrained`` makes a model of random numbers alone."""
    save(tmp_path, CONFIGS["llama"]())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match="no tensor of the files is one of Bert"):
            tiermem.load_checkpoint(transformers.BertModel, tmp_path, tier=tier)
        assert not tier.residency()


def test_what_a_module_of_the_users_lacks_is_not_drawn(tmp_path: Path) -> None:
    """It may have values itself; the class is what draws."""
    plain = save(tmp_path, CONFIGS["llama"]())
    cls = transformers.LlamaForSequenceClassification
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=r"'score\.weight' .*give the class"):
            tiermem.load_checkpoint(cls(plain.config), tmp_path, tier=tier)
        with pytest.raises(tiermem.CheckpointError, match=r"'lm_head\.weight'; .*give the class"):
            tiermem.load_checkpoint(transformers.LlamaModel(plain.config), tmp_path, tier=tier)
        assert not tier.residency()


def test_names_take_the_place_of_transformers_rules(tmp_path: Path) -> None:
    """And the message says so."""
    save(tmp_path, CONFIGS["llama"]())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match="no prefix is added or taken away"):
            tiermem.load_checkpoint(transformers.LlamaModel, tmp_path, tier=tier, names={})


def test_training_leaves_the_files_alone(tmp_path: Path) -> None:
    plain = save(tmp_path, CONFIGS["tied, bfloat16"]())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ids = torch.arange(9)[None]
    with tiermem.TierManager("cpu", hbm=6 * nbytes(plain), dram="16MiB") as tier:
        model: Any = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        homes = [row.home for row in tier.residency() if row.role == "param"]
        assert "nvme" in {str(getattr(home, "value", home)) for home in homes}
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for _ in range(3):
            losses = [each(ids, labels=ids).loss for each in (plain, model)]
            assert torch.equal(*losses)
            for each in losses:
                each.backward()
            for each in (stepper, optimizer):
                each.step()
                each.zero_grad()
        check_equal(model, plain)
    check_equal(model, plain)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_beside_a_swap_file(tmp_path: Path) -> None:
    """What is written goes there, two checkpoints are read from their files."""
    folders = [tmp_path / "first", tmp_path / "second"]
    plain = [save(f, CONFIGS[name]()) for f, name in zip(folders, ("llama", "gpt2"), strict=True)]
    hbm, swap = 6 * max(map(nbytes, plain)), tmp_path / "swap"
    swap.mkdir()
    with tiermem.TierManager(
        "cpu", hbm=hbm, dram="1MiB", nvme=swap, policy={"grads": "nvme", "optimizer": "nvme"}
    ) as tier:
        load: Any = tiermem.load_checkpoint
        models = [load(transformers.AutoModelForCausalLM, f, tier=tier) for f in folders]
        each = list(zip(plain, models, strict=True))
        steppers = [
            (torch.optim.AdamW(one.parameters(), lr=1e-2), tier.optimizer(two, torch.optim.AdamW))
            for one, two in each
        ]
        for expected, found in steppers:
            found.param_groups[0]["lr"] = expected.param_groups[0]["lr"]
        for step in range(3):
            ids = torch.arange(9)[None] + step
            for pair, optimizers in zip(each, steppers, strict=True):
                losses = [model(ids, labels=ids).loss for model in pair]
                assert torch.equal(*losses)
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        links = tier.stats().links
        assert {"hbm->nvme", "dram->nvme"} & links.keys() and links["nvme->hbm"].nbytes
        for one, two in each:
            check_equal(two, one)


def test_a_weight_that_is_written_by_hand(tmp_path: Path) -> None:
    plain = save(tmp_path, CONFIGS["llama"]())
    hbm = max(nbytes(plain) * 3 // 5, 96 << 10)
    with tiermem.TierManager("cpu", hbm=hbm, dram="16MiB") as tier:
        model: Any = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        for each in (plain, model):
            with torch.no_grad():
                for layer in each.model.layers:
                    layer.mlp.up_proj.weight.mul_(0.5)
        for _ in range(3):
            assert torch.equal(logits(model), logits(plain))
        check_equal(model, plain)
    check_equal(model, plain)


def test_adapters_around_streamed_weights(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    plain = save(tmp_path, CONFIGS["llama"]())
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(3)
    plain = peft.get_peft_model(plain, config)
    hbm = max(nbytes(plain) * 3 // 5, 128 << 10)
    with tiermem.TierManager("cpu", hbm=hbm, dram="16MiB") as tier:
        torch.manual_seed(3)
        model: Any = tiermem.load_checkpoint(
            transformers.AutoModelForCausalLM, tmp_path, tier=tier, lora=config
        )
        ids = torch.arange(9)[None]
        trained = [p for p in model.parameters() if p.requires_grad]
        steppers: list[Any] = [
            torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5),
            tier.optimizer(trained, torch.optim.SGD, lr=0.5),
        ]
        plain.eval()
        for _ in range(3):
            losses = [each(ids, labels=ids).loss for each in (plain, model)]
            assert torch.equal(*losses)
            for loss, stepper in zip(losses, steppers, strict=True):
                loss.backward()
                stepper.step()
                stepper.zero_grad()
        assert tier.stats().links.get("hbm->dram", tiermem.LinkStats()).nbytes == 0


class Toy(nn.Module):
    """Two linear layers, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x - self.mean)).relu() * self.table  # type: ignore[no-any-return,operator]


def toy(path: Path, **changes: torch.Tensor | None) -> Toy:
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model = Toy()
    model.mean.fill_(0.25)  # type: ignore[operator]
    tensors = {**model.state_dict(), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)
    return model


def on_meta() -> Toy:
    with torch.device("meta"):
        model = Toy()
    model.table = torch.arange(8.0)
    return model


@pytest.mark.parametrize("made_by", [Toy, Toy(), on_meta()], ids=["factory", "module", "meta"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_any_module(made_by: Any, dtype: torch.dtype | None, tmp_path: Path) -> None:
    plain = toy(tmp_path / "toy.safetensors")
    if dtype is not None:
        for param in plain.parameters():
            param.data = param.data.to(dtype)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tiermem.load_checkpoint(
            made_by, tmp_path / "toy.safetensors", tier=tier, dtype=dtype
        )
        check_equal(model, plain)
    check_equal(model, plain)


def test_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain = toy(tmp_path / "toy.safetensors")
    path = tmp_path / "other.safetensors"
    save_file({f"net.{k}": v for k, v in plain.state_dict().items()} | {"x": torch.ones(2)}, path)
    for names in (lambda name: f"net.{name}", {k: f"net.{k}" for k in plain.state_dict()}):
        with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
            check_equal(tiermem.load_checkpoint(Toy, path, tier=tier, names=names), plain)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first.bias": None}, "'first.bias'"),
        ({"other": torch.ones(3)}, "'other'"),
        ({"first.bias": torch.ones(3)}, r"'first.bias' has shape \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "toy.safetensors"
    toy(path, **changes)
    model = Toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=said):
            tiermem.load_checkpoint(model, path, tier=tier)
        assert not tier.residency()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "nonsense"}, r"dtype must be .* torch\.bfloat16, .* not 'nonsense'"),
        ({"device_map": "auto"}, "got device_map=, which only classes of transformers"),
        ({"dtype": torch.int8}, "dtype must be a floating dtype"),
        ({"names": 5}, "names must be a mapping .* not 5"),
        ({"names": {"first.bias": ["a", "b"]}}, r"names gives \['a', 'b'\] for 'first.bias'"),
        ({"names": lambda name: len(name)}, "names gives 12 for 'first.weight'"),
        ({"blocks": 5}, "blocks=5: give 'auto'"),
        ({"model_or_factory": transformers.AutoConfig}, "AutoConfig is none of them"),
        ({"model_or_factory": transformers.AutoTokenizer}, "AutoTokenizer is none of them"),
    ],
    ids=[
        "text",
        "map",
        "whole numbers",
        "number",
        "list",
        "length",
        "blocks",
        "config",
        "tokenizer",
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    toy(tmp_path / "toy.safetensors")
    options = {"model_or_factory": Toy, "path": tmp_path / "toy.safetensors", **given}
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.ConfigError, match=said):
            tiermem.load_checkpoint(**options, tier=tier)
        assert not tier.residency()


@pytest.mark.parametrize("path", [None, 5, b"models", "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match="path"):
            tiermem.load_checkpoint(Toy, path, tier=tier)


def test_a_meta_buffer_without_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    toy(path)
    with torch.device("meta"):
        model = Toy()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match="'table'"):
            tiermem.load_checkpoint(model, path, tier=tier)


def test_a_file_that_is_changed_meanwhile(tmp_path: Path) -> None:
    plain = save(tmp_path, CONFIGS["llama"]())
    hbm = max(nbytes(plain) * 3 // 5, 96 << 10)
    with tiermem.TierManager("cpu", hbm=hbm, dram="576KiB") as tier:  # next to nothing stays in it
        model: Any = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        for _ in range(2):
            assert torch.equal(logits(model), logits(plain))
        path = tmp_path / "model.safetensors"
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(len(whole) // 3)
            file.write(bytes(byte ^ 0x10 for byte in whole[len(whole) // 3 :]))
        with pytest.raises((tiermem.StorageError, tiermem.IntegrityError), match="changed"):
            for _ in range(2):
                logits(model)
        tier.close(discard=True)


@pytest.mark.parametrize("home", ["dram", "hbm"])
def test_a_tier_is_filled_by_many_reads_past_the_page_cache(
    home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ScriptedEngine] = []

    def engine() -> ScriptedEngine:
        made.append(ScriptedEngine())
        return made[-1]

    monkeypatch.setattr(
        "tiermem.runtime.memory.opening.choose_engine", lambda *_: (engine, "scripted", "a test")
    )
    plain = save(tmp_path, CONFIGS["llama"](), max_shard_size="30KB")
    policy = tiermem.Policy(params=home)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB", policy=policy) as tier:
        model: Any = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        read = made[-1].log
        # descriptors with even numbers go past the cache; the others are for pages cut off
        ends = sum(1 for _ in tmp_path.glob("*.safetensors"))
        assert sum(request.file % 2 for request in read) <= 2 * ends
        assert sum(request.nbytes for request in read) >= nbytes(plain)
        store = tier._manager.parts.homes.sources
        assert store is not None and not store._ranges  # no address is left behind
        assert {str(row.home) for row in tier.residency() if row.role == "param"} == {home}
        assert torch.equal(logits(model), logits(plain))
    check_equal(model, plain)


@pytest.mark.parametrize("home", ["dram", "hbm"])
def test_a_disk_that_fails_while_a_tier_is_filled(
    home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, CONFIGS["llama"](), max_shard_size="30KB")
    broken = {"yes": True}

    def fault(request: Any, tries: int) -> Fault | None:
        return Fault(errno=EIO) if broken["yes"] and request.file == 4 else None

    monkeypatch.setattr(
        "tiermem.runtime.memory.opening.choose_engine",
        lambda *_: (lambda: ScriptedEngine(fault=fault), "scripted", "a test"),
    )
    policy = tiermem.Policy(params=home)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB", policy=policy) as tier:
        with pytest.raises(tiermem.StorageError, match="model-00003") as raised:
            tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        assert raised.value.errno == EIO
        assert not tier.residency()
        assert (
            tier._manager.parts.homes.sources is not None
            and not tier._manager.parts.homes.sources._ranges
        )
        broken["yes"] = False
        model = tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        check_equal(model, plain)


def test_no_config(tmp_path: Path) -> None:
    toy(tmp_path / "model.safetensors")
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match=r"config\.json"):
            tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
        with pytest.raises(tiermem.CheckpointError, match="no such thing"):
            tiermem.load_checkpoint(transformers.AutoModelForCausalLM, tmp_path, tier=tier)
