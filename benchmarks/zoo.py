"""Models of many architectures with random weights, and what is put into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from zoo_kind import Draw, Given, Kind, images, of_transformers, split
from zoo_more import MORE

# -- decoders ----------------------------------------------------------------


def _tokens(longest: int = 4096, last: bool = True) -> Callable[[Any, int, Draw, bool], Given]:
    """Returns what makes token ids; without labels only the last position has logits."""

    def given(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
        ids = draw.ids(model.config.vocab_size, *split(tokens, longest))
        made: Given = {"input_ids": ids, "use_cache": False}
        if train:
            made["labels"] = ids
        elif last:
            made["logits_to_keep"] = 1
        return made

    return given


def _sizes(hidden: int, inner: int, layers: int, heads: int, groups: int = 0) -> Given:
    made = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return made | ({"num_key_value_heads": groups} if groups else {})


_TINY = {**_sizes(64, 128, 12, 4, 2), "head_dim": 16, "vocab_size": 128}


def _dense(name: str, full: Given, quick: Given, tiny: Given, longest: int = 4096) -> Kind:
    return Kind(of_transformers(name), _tokens(longest), full, quick, tiny, generates=True)


# -- other architectures -----------------------------------------------------


def _both_sides(longest: int) -> Callable[[Any, int, Draw, bool], Given]:
    """Half of the tokens to the encoder, half to the decoder."""

    def given(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
        shape = split(max(1, tokens // 2), longest)
        vocabulary = model.config.vocab_size
        ids, answer = draw.ids(vocabulary, *shape), draw.ids(vocabulary, *shape)
        to = {"labels": answer} if train else {"decoder_input_ids": answer}
        return {"input_ids": ids, "use_cache": False, **to}

    return given


def _speech(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    config = model.config
    clips = max(1, tokens // config.max_source_positions)
    length = 2 * config.max_source_positions
    answer = draw.ids(config.vocab_size, clips, 32 if tokens > 1 else 1)
    return {
        "input_features": draw.normal(clips, config.num_mel_bins, length),
        "use_cache": False,
        **({"labels": answer} if train else {"decoder_input_ids": answer}),
    }


def _vit_h_14(sizes: Given) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(**sizes)  # type: ignore[no-any-return]


def _convnext(sizes: Given) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths, depths = sizes["widths"], sizes["depths"]
    after = [*widths[1:], None]
    stages = [CNBlockConfig(*stage) for stage in zip(widths, after, depths, strict=True)]
    return ConvNeXt(stages)  # type: ignore[no-any-return]


def _pictures(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    side = getattr(model, "image_size", 224)
    key = "x"
    return {key: draw.normal(max(1, tokens // 256), 3, side, side)}


def _flux(sizes: Given) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(**sizes)  # type: ignore[no-any-return]


def _latents(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    config, device = model.config, draw.device
    count, text = max(16, tokens), 16 if tokens == 1 else 512
    return {
        "hidden_states": draw.normal(1, count, config.in_channels),
        "encoder_hidden_states": draw.normal(1, text, config.joint_attention_dim),
        "pooled_projections": draw.normal(1, config.pooled_projection_dim),
        "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
        "img_ids": torch.zeros(count, 3, device=device),
        "txt_ids": torch.zeros(text, 3, device=device),
        "return_dict": False,
    }


class Layer(nn.Module):
    """A norm and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the residual stream."""
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))  # type: ignore[no-any-return]


def _layers(sizes: Given) -> nn.Module:
    return nn.Sequential(*[Layer(sizes["width"]) for _ in range(sizes["layers"])])


def _hidden(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    return {"input": draw.normal(tokens, model[0].norm.weight.shape[0])}


class Recurrent(nn.Module):
    """LSTMs with a residual stream around each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the residual stream, ``(batch, tokens, width)``."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return hidden


def _lstm(sizes: Given) -> nn.Module:
    return Recurrent(**sizes)


def _sequence(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    return {"hidden": draw.normal(*split(tokens, 128), model.width)}


_VIT = {
    **_sizes(1664, 8192, 48, 16),
    "image_size": 224,
    "patch_size": 14,
}
_VIT_TINY = {**_sizes(64, 128, 12, 4), "image_size": 28, "patch_size": 4}

KINDS: dict[str, Kind] = {
    "llama": _dense(
        "Llama",
        {**_sizes(3072, 8192, 28, 24, 8), "vocab_size": 128256, "tie_word_embeddings": True},
        {"num_hidden_layers": 20, "vocab_size": 64000},
        _TINY,
    ),
    "llama3b": replace(
        _dense(
            "Llama",
            {**_sizes(3072, 8192, 28, 24), "vocab_size": 32000, "attn_implementation": "sdpa"},
            {},
            _TINY,
        ),
        apart=True,
    ),
    "gemma2": _dense(
        "Gemma2",
        {
            **_sizes(2304, 9216, 26, 8, 4),
            "vocab_size": 128000,
            "attn_implementation": "eager",
        },
        {"num_hidden_layers": 20},
        {**_TINY, "query_pre_attn_scalar": 16},
        longest=1024,
    ),
    "t5": Kind(
        of_transformers("T5", "ForConditionalGeneration"),
        _both_sides(512),
        {
            "d_model": 2048,
            "d_ff": 5120,
            "d_kv": 64,
            "num_heads": 32,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        {"d_model": 1536, "d_ff": 4096, "num_heads": 24},
        {
            "d_model": 64,
            "d_ff": 64,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "vocab_size": 128,
        },
        generates=True,
    ),
    "vit": Kind(
        of_transformers("ViT", "Model"), images, _VIT, {"num_hidden_layers": 32}, _VIT_TINY
    ),
    "layers": Kind(
        _layers,
        _hidden,
        {"width": 1280, "layers": 160},
        {"layers": 120},
        {"width": 32, "layers": 8},
    ),
    "mixtral": Kind(
        of_transformers("Mixtral"),
        _tokens(),
        {**_sizes(2048, 7168, 10, 16, 8), "vocab_size": 32000, "num_local_experts": 8},
        {"num_hidden_layers": 6},
        {**_TINY, "num_local_experts": 4},
        generates=True,
        experts=(2, 8, ".experts."),
    ),
    "qwen3-moe": Kind(
        of_transformers("Qwen3Moe"),
        _tokens(),
        {
            **_sizes(2048, 768, 7, 32, 4),
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 32000,
        },
        {"hidden_size": 1024, "moe_intermediate_size": 512},
        {**_TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        generates=True,
        experts=(8, 128, ".experts."),
    ),
    "flux": Kind(
        _flux,
        _latents,
        {"num_layers": 6, "num_single_layers": 12, "guidance_embeds": False},
        {"num_layers": 2, "num_single_layers": 5},
        {
            "num_layers": 4,
            "num_single_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "axes_dims_rope": (4, 6, 6),
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
        },
        cudnn=False,  # backward of 8,704 tokens ends plain torch 2.11 with an illegal access
    ),
    "whisper": Kind(
        of_transformers("Whisper", "ForConditionalGeneration"),
        _speech,
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "vocab_size": 51866,
        },
        {"encoder_layers": 16, "decoder_layers": 16},
        {
            "d_model": 64,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 16,
            "max_target_positions": 64,
            "vocab_size": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
        },
    ),
    "mamba": Kind(
        of_transformers("Mamba"),
        _tokens(longest=32, last=False),
        {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280},
        {"num_hidden_layers": 20},
        {"hidden_size": 64, "num_hidden_layers": 12, "vocab_size": 128},
        generates=True,
        most_trained=512,  # without kernels of its own it keeps every state of every token
    ),
    "gpt2": Kind(
        of_transformers("GPT2", "LMHeadModel"),
        _tokens(1024),
        {"n_embd": 2048, "n_layer": 36, "n_head": 16},
        {"n_layer": 16},
        {"n_embd": 64, "n_layer": 12, "n_head": 4, "vocab_size": 128},
        generates=True,
    ),
    "neox": _dense(
        "GPTNeoX",
        {**_sizes(2560, 10240, 32, 32), "vocab_size": 50304},
        {"num_hidden_layers": 12},
        {**_sizes(64, 128, 12, 4), "vocab_size": 128},
        longest=2048,
    ),
    "qwen3": _dense(
        "Qwen3",
        {**_sizes(2560, 9728, 36, 32, 8), "head_dim": 128, "tie_word_embeddings": True},
        {"num_hidden_layers": 10, "vocab_size": 32000},
        _TINY,
    ),
    "mistral": _dense("Mistral", _sizes(4096, 14336, 12, 32, 8), {"num_hidden_layers": 5}, _TINY),
    "bart": Kind(
        of_transformers("Bart", "ForConditionalGeneration"),
        _both_sides(512),
        {
            "d_model": 1536,
            "encoder_layers": 24,
            "decoder_layers": 24,
            "encoder_ffn_dim": 6144,
            "decoder_ffn_dim": 6144,
        },
        {"d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
        {
            "d_model": 64,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": 128,
            "max_position_embeddings": 64,
        },
        generates=True,
    ),
    "siglip": Kind(
        of_transformers("SiglipVision", "Model"), images, _VIT, {"num_hidden_layers": 20}, _VIT_TINY
    ),
    "vit_h_14": Kind(
        _vit_h_14,
        _pictures,
        {
            "image_size": 224,
            "patch_size": 14,
            "num_layers": 52,
            "num_heads": 16,
            "hidden_dim": 1280,
            "mlp_dim": 5120,
        },
        {"num_layers": 32},
        {"image_size": 28, "num_layers": 12, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 64},
    ),
    "convnext": Kind(
        _convnext,
        _pictures,
        {"widths": (448, 896, 1792, 3584), "depths": (4, 4, 30, 4)},
        {"widths": (384, 768, 1536, 3072)},
        {"widths": (16, 32, 64, 128), "depths": (1, 1, 2, 1)},
    ),
    "lstm": Kind(
        _lstm, _sequence, {"width": 2048, "layers": 40}, {"layers": 20}, {"width": 32, "layers": 16}
    ),
    **MORE,
}
"""By name, the most important first."""
