"""Public architectures with tiny random configurations, trained in the tiers bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_nn import Pair, Tiers, assert_same, check_table, compare_training, seed
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

DRAM = Tiers("dram")
_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KV = {**_TEXT, "num_key_value_heads": 2}
Inputs = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def _ids(**more: Any) -> Inputs:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(3, 60, (2, 9))
        kwargs = {"input_ids": ids, **{k: v() for k, v in more.items()}}
        return (), kwargs

    return make


def _labels() -> torch.Tensor:
    return torch.randint(3, 60, (2, 9))


def _pixels(size: int = 32, batch: int = 2) -> Inputs:
    return lambda: ((), {"pixel_values": torch.randn(batch, 3, size, size)})


def _model(kind: str, config: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = getattr(transformers, config)(**settings)
            if getattr(made, "use_cache", None) is not None:
                made.use_cache = False
            return getattr(transformers, kind)(made)

    return build


def _causal(name: str, config: str | None = None, **settings: Any) -> tuple[Any, Inputs]:
    return (
        _model(f"{name}ForCausalLM", config or f"{name}Config", settings),
        _ids(labels=_labels),
    )


_ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

CASES: dict[str, tuple[Any, Inputs]] = {
    "llama": _causal("Llama", **_KV),
    "llama-tied": _causal("Llama", **_KV, tie_word_embeddings=True),
    "qwen2": _causal("Qwen2", **_KV),
    "qwen3": _causal("Qwen3", **_KV, head_dim=8),
    "qwen3-moe": _causal(
        "Qwen3Moe",
        **_KV,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "mistral": _causal("Mistral", **_KV, sliding_window=4),
    "mixtral": _causal("Mixtral", **_KV, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": _causal("Olmo2", **_KV),
    "starcoder2": _causal("Starcoder2", **_KV),
    "stablelm": _causal("StableLm", **_KV),
    "granite": _causal("Granite", **_KV),
    "cohere": _causal("Cohere", **_KV),
    "phi": _causal("Phi", **_TEXT),
    "phi3": _causal("Phi3", **_KV),
    "gemma": _causal("Gemma", **_KV, head_dim=8),
    "gemma2": _causal("Gemma2", **_KV, head_dim=8),
    "gpt2": (_model("GPT2LMHeadModel", "GPT2Config", _GPT2), _ids(labels=_labels)),
    "gpt-neo": _causal(
        "GPTNeo",
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    ),
    "gpt-neox": _causal("GPTNeoX", **_TEXT),
    "gptj": _causal("GPTJ", **_GPT2, rotary_dim=4),
    "codegen": _causal("CodeGen", **_GPT2, rotary_dim=4),
    "gpt-bigcode": _causal("GPTBigCode", **_GPT2),
    "falcon": _causal("Falcon", **_TEXT),
    "opt": _causal("OPT", **_TEXT, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _causal("Bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "mpt": _causal("Mpt", vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "mamba": _causal("Mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mamba2": _causal(
        "Mamba2",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "xglm": _causal("XGLM", vocab_size=64, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
    "bert": (
        _model("BertForMaskedLM", "BertConfig", _TEXT),
        _ids(labels=_labels),
    ),
    "roberta": (_model("RobertaForMaskedLM", "RobertaConfig", _TEXT), _ids(labels=_labels)),
    "electra": (
        _model("ElectraForPreTraining", "ElectraConfig", {**_TEXT, "embedding_size": 16}),
        _ids(),
    ),
    "distilbert": (
        _model(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        ),
        _ids(labels=_labels),
    ),
    "albert": (
        _model(
            "AlbertForMaskedLM",
            "AlbertConfig",
            {**_TEXT, "embedding_size": 16, "num_hidden_layers": 4},
        ),
        _ids(labels=_labels),
    ),
    "deberta": (_model("DebertaForMaskedLM", "DebertaConfig", _TEXT), _ids(labels=_labels)),
    "deberta-v2": (
        _model(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            {
                **_TEXT,
                "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"],
                "position_buckets": 8,
                "conv_kernel_size": 3,
            },
        ),
        _ids(labels=_labels),
    ),
    "xlnet": (
        _model(
            "XLNetLMHeadModel",
            "XLNetConfig",
            {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        ),
        _ids(labels=_labels),
    ),
    "funnel": (
        _model(
            "FunnelModel",
            "FunnelConfig",
            {
                "vocab_size": 64,
                "block_sizes": [1, 1],
                "d_model": 32,
                "n_head": 4,
                "d_head": 8,
                "d_inner": 48,
            },
        ),
        _ids(),
    ),
    "longformer": (
        _model("LongformerModel", "LongformerConfig", {**_TEXT, "attention_window": [4, 4]}),
        _ids(),
    ),
    "mpnet": (_model("MPNetForMaskedLM", "MPNetConfig", _TEXT), _ids(labels=_labels)),
    "modernbert": (
        _model(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            {**_TEXT, "cls_token_id": 1, "sep_token_id": 2},
        ),
        _ids(labels=_labels),
    ),
    "t5": (
        _model(
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "vocab_size": 64,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 0,
            },
        ),
        _ids(labels=_labels),
    ),
    "bart": (
        _model("BartForConditionalGeneration", "BartConfig", _ENCODER_DECODER),
        _ids(labels=_labels),
    ),
    "pegasus": (
        _model("PegasusForConditionalGeneration", "PegasusConfig", _ENCODER_DECODER),
        _ids(labels=_labels),
    ),
    "m2m100": (
        _model("M2M100ForConditionalGeneration", "M2M100Config", _ENCODER_DECODER),
        _ids(labels=_labels),
    ),
    "vit": (_model("ViTForImageClassification", "ViTConfig", _VISION), _pixels()),
    "deit": (_model("DeiTForImageClassification", "DeiTConfig", _VISION), _pixels()),
    "beit": (_model("BeitForImageClassification", "BeitConfig", _VISION), _pixels()),
    "dinov2": (_model("Dinov2Model", "Dinov2Config", _VISION), _pixels()),
    "swin": (
        _model(
            "SwinForImageClassification",
            "SwinConfig",
            {
                "image_size": 32,
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [2, 1],
                "num_heads": [2, 4],
                "window_size": 4,
            },
        ),
        _pixels(),
    ),
    "resnet": (
        _model(
            "ResNetForImageClassification",
            "ResNetConfig",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
        ),
        _pixels(),
    ),
    "convnext": (
        _model(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2},
        ),
        _pixels(),
    ),
    "mobilenet-v2": (
        _model(
            "MobileNetV2ForImageClassification", "MobileNetV2Config", {"depth_multiplier": 0.35}
        ),
        _pixels(),
    ),
    "segformer": (
        _model(
            "SegformerForImageClassification",
            "SegformerConfig",
            {
                "num_encoder_blocks": 2,
                "depths": [1, 1],
                "sr_ratios": [2, 1],
                "hidden_sizes": [8, 16],
                "patch_sizes": [3, 3],
                "strides": [2, 2],
                "num_attention_heads": [1, 2],
                "mlp_ratios": [2, 2],
            },
        ),
        _pixels(),
    ),
    "clip": (
        _model(
            "CLIPModel",
            "CLIPConfig",
            {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16},
        ),
        _ids(pixel_values=lambda: torch.randn(2, 3, 32, 32)),
    ),
    "siglip": (
        _model("SiglipModel", "SiglipConfig", {"text_config": _TEXT, "vision_config": _VISION}),
        _ids(pixel_values=lambda: torch.randn(2, 3, 32, 32)),
    ),
    "vilt": (
        _model("ViltModel", "ViltConfig", {**_TEXT, **_VISION}),
        _ids(pixel_values=lambda: torch.randn(2, 3, 32, 32)),
    ),
    "whisper": (
        _model(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {
                **_ENCODER_DECODER,
                "num_mel_bins": 8,
                "max_source_positions": 16,
                "max_target_positions": 16,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 1,
            },
        ),
        lambda: ((), {"input_features": torch.randn(2, 8, 32), "labels": _labels()}),
    ),
    "wav2vec2": (
        _model(
            "Wav2Vec2Model",
            "Wav2Vec2Config",
            {
                "vocab_size": 32,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "conv_dim": [16, 16],
                "conv_stride": [4, 4],
                "conv_kernel": [8, 4],
                "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 4,
                "num_feat_extract_layers": 2,
                "mask_time_length": 2,
            },
        ),
        lambda: ((torch.randn(2, 400),), {}),
    ),
    "hubert": (
        _model(
            "HubertModel",
            "HubertConfig",
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "conv_dim": [16, 16],
                "conv_stride": [4, 4],
                "conv_kernel": [8, 4],
                "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 4,
                "num_feat_extract_layers": 2,
                "mask_time_length": 2,
            },
        ),
        lambda: ((torch.randn(2, 400),), {}),
    ),
    "detr": (
        _model(
            "DetrModel",
            "DetrConfig",
            {
                **{k: v for k, v in _ENCODER_DECODER.items() if "vocab" not in k},
                "num_queries": 5,
                "use_timm_backbone": False,
                "backbone": None,
                "use_pretrained_backbone": False,
                "backbone_config": {
                    "model_type": "resnet",
                    "embedding_size": 8,
                    "hidden_sizes": [8, 16],
                    "depths": [1, 1],
                    "out_features": ["stage2"],
                },
            },
        ),
        _pixels(),
    ),
    "sam": (
        _model(
            "SamModel",
            "SamConfig",
            {
                "vision_config": {
                    "hidden_size": 16,
                    "output_channels": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                    "global_attn_indexes": [1],
                    "window_size": 2,
                    "num_pos_feats": 8,
                    "mlp_dim": 32,
                },
                "prompt_encoder_config": {
                    "hidden_size": 16,
                    "image_size": 32,
                    "patch_size": 8,
                    "image_embedding_size": 4,
                },
                "mask_decoder_config": {
                    "hidden_size": 16,
                    "num_attention_heads": 2,
                    "mlp_dim": 32,
                    "num_hidden_layers": 1,
                    "iou_head_hidden_dim": 16,
                },
            },
        ),
        lambda: (
            (),
            {
                "pixel_values": torch.randn(1, 3, 32, 32),
                "input_points": torch.tensor([[[[8.0, 9.0]]]]),
            },
        ),
    ),
    "rwkv": _causal("Rwkv", vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=32),
    "time-series": (
        _model(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            {
                "num_input_channels": 2,
                "context_length": 32,
                "patch_length": 4,
                "patch_stride": 4,
                "prediction_length": 4,
                "d_model": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "ffn_dim": 32,
            },
        ),
        lambda: ((torch.randn(2, 32, 2),), {}),
    ),
}
# its prompt encoder returns views of its weights, which keep their block in HBM
_ROOM = {"sam": 1 << 16}
_QUICK = {"llama-tied", "mixtral", "albert", "t5", "resnet", "wav2vec2", "mamba", "deberta-v2"}


@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CASES)]
)
@pytest.mark.one_in(3)
def test_architecture_trains_bit_for_bit(name: str) -> None:
    build, inputs = CASES[name]
    compare_training(build, inputs, Tiers("dram", extra_hbm=_ROOM.get(name, 0)), steps=2)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(CASES))
def test_architecture_trains_from_the_disk(name: str, tmp_path: Any) -> None:
    build, inputs = CASES[name]
    tiers = Tiers("nvme", 1 << 20, str(tmp_path), "nvme", _ROOM.get(name, 0))
    compare_training(build, inputs, tiers, steps=2)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(CASES))
def test_architecture_evaluates_bit_for_bit(name: str) -> None:
    build, inputs = CASES[name]
    with Pair(build, Tiers("dram", extra_hbm=_ROOM.get(name, 0))) as pair:
        pair.plain.eval()
        pair.model.eval()
        for context in (torch.no_grad, torch.inference_mode):

            def run(model: nn.Module, optimizer: Any, context: Any = context) -> Any:
                args, kwargs = inputs()
                with context():
                    return model(*args, **kwargs)

            pair.both(run)
        pair.finish()


_CHECKPOINTED = ["llama", "gpt2", "bert", "t5", "mixtral", "vit", "opt", "whisper", "swin"]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("llama", "bert") else pytest.param(n, marks=pytest.mark.slow)
        for n in _CHECKPOINTED
    ],
)
@pytest.mark.one_in(5)
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    build, inputs = CASES[name]

    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()

    if name in ("vit", "whisper", "swin") and reentrant:
        prepare_with = lambda m: m.gradient_checkpointing_enable({"use_reentrant": False})  # noqa: E731
    else:
        prepare_with = prepare
    compare_training(build, inputs, DRAM, steps=2, prepare=prepare_with)


_GENERATING = ["llama", "llama-tied", "gpt2", "qwen2", "mixtral", "t5", "bart", "mamba", "falcon"]


@pytest.mark.parametrize(
    "name",
    [n if n in ("llama", "t5") else pytest.param(n, marks=pytest.mark.slow) for n in _GENERATING],
)
@pytest.mark.one_in(2)
def test_generation_with_a_cache(name: str) -> None:
    build, inputs = CASES[name]
    with Pair(build, DRAM, optimizer=None) as pair:
        pair.plain.eval()
        pair.model.eval()
        for sample in (False, True):

            def generate(model: Any, optimizer: Any, sample: bool = sample) -> Any:
                _, kwargs = inputs()
                return model.generate(
                    kwargs["input_ids"], max_new_tokens=6, do_sample=sample, use_cache=True
                )

            pair.both(generate)
        check_table(pair.tier)
        pair.finish()


def test_frozen_base_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    build, inputs = CASES["llama"]

    def lora() -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
        return peft.get_peft_model(build(), config)

    compare_training(lora, inputs, DRAM, steps=3)


def test_saved_by_the_library_itself(tmp_path: Any) -> None:
    build, _ = CASES["llama-tied"]
    with Pair(build, DRAM, optimizer=None) as pair:
        pair.plain.save_pretrained(tmp_path / "plain")
        pair.model.save_pretrained(tmp_path / "tiered")
        loaded = [
            transformers.LlamaForCausalLM.from_pretrained(tmp_path / which).state_dict()
            for which in ("plain", "tiered")
        ]
        assert_same(dict(loaded[0]), dict(loaded[1]), "saved")
        seed(1)
