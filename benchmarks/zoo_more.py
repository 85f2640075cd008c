"""Further architectures of transformers for :mod:`zoo`, their sizes by one scale for each set.

They are measured only where they are asked for by name::

    python benchmarks/bench_calls.py phi3 bert swin --tokens 1 2048 --calls 7
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from zoo_kind import Draw, Given, Kind, images, of_transformers, split


@dataclass(frozen=True)
class Scale:
    """What the sizes of a set follow.

    Attributes:
        hidden: Width of the residual stream.
        inner: Width within a gated feed-forward layer.
        layers: How many.
        heads: Of attention.
        words: Size of the vocabulary.
        positions: The longest sequence, in tokens.
        side: Of an image, in pixels.
        experts: Of a layer, where there are few.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    words: int
    positions: int
    side: int
    experts: int


FULL = Scale(2048, 5632, 60, 16, 32000, 4096, 224, 16)
QUICK = replace(FULL, layers=24)
TINY = Scale(64, 128, 12, 4, 128, 256, 64, 8)
"""Of so many layers that a quarter of the bytes is enough to run in."""

_CHOSEN = 4
"""Experts for a token, whatever the set."""


# -- inputs ------------------------------------------------------------------


def _ids(longest: int) -> Callable[[Any, int, Draw, bool], Given]:
    """Returns what makes token ids; without labels only the last position has logits."""

    def given(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
        config = model.config
        length = min(longest, getattr(config, "max_position_embeddings", longest))
        ids = draw.ids(config.vocab_size, *split(tokens, length))
        takes = inspect.signature(model.forward).parameters
        made = {"input_ids": ids}
        if train and "labels" in takes:
            made["labels"] = ids
        elif "logits_to_keep" in takes:
            made["logits_to_keep"] = 1
        return made

    return given


def _pairs(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    config = model.config
    count, side = 1 if tokens == 1 else 8, config.vision_config.image_size
    return {
        "input_ids": draw.ids(config.text_config.vocab_size, count, 32),
        "pixel_values": draw.normal(count, 3, side, side),
        "return_loss": train,
    }


def _sound(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    """Of one second, or of twenty."""
    return {"input_values": draw.normal(1, 16000 * (1 if tokens == 1 else 20))}


def _pictures_and_words(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    config = model.config
    count, side = 1 if tokens == 1 else 4, config.vision_config.image_size
    words = draw.ids(config.text_config.vocab_size - 3, count, 32) + 3
    patches = words.new_full((count, (side // config.vision_config.patch_size) ** 2), 1)
    return {
        "input_ids": torch.cat([patches, words], 1),
        "pixel_values": draw.normal(count, 3, side, side),
    }


# -- sizes -------------------------------------------------------------------


def _plain(s: Scale) -> Given:
    """Names that many architectures have in common."""
    return {
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "vocab_size": s.words,
    }


def _usual(s: Scale) -> Given:
    return {
        **_plain(s),
        "intermediate_size": s.inner,
        "num_key_value_heads": s.heads // 4,
        "max_position_embeddings": s.positions,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _opt(s: Scale) -> Given:
    own = {"ffn_dim": 4 * s.hidden, "word_embed_proj_dim": s.hidden}
    return {**_plain(s), **own, "max_position_embeddings": s.positions}


def _bloom(s: Scale) -> Given:
    return {
        "hidden_size": s.hidden,
        "n_layer": s.layers,
        "n_head": s.heads,
        "vocab_size": s.words,
    }


def _gptj(s: Scale) -> Given:
    return {
        "n_embd": s.hidden,
        "n_layer": s.layers,
        "n_head": s.heads,
        "vocab_size": s.words,
        "rotary_dim": min(64, s.hidden // s.heads),
        "n_positions": s.positions // 2,
    }


def _with_heads(s: Scale) -> Given:
    return {**_usual(s), "head_dim": s.hidden // s.heads}


def _mixture(s: Scale, **more: Any) -> Given:
    layers = max(6, s.layers // 3)
    return {**_usual(s), "num_hidden_layers": layers, "num_experts_per_tok": _CHOSEN, **more}


def _gpt_oss(s: Scale) -> Given:
    return {
        **_usual(s),
        "num_hidden_layers": max(6, s.layers // 4),
        "num_local_experts": s.experts,
        "num_experts_per_tok": _CHOSEN,
        "intermediate_size": s.hidden // 2,
        "head_dim": s.hidden // s.heads,
    }


def _deepseek(s: Scale) -> Given:
    return {
        **_plain(s),
        "num_hidden_layers": max(6, s.layers // 3),
        "num_key_value_heads": s.heads,
        "intermediate_size": s.inner,
        "moe_intermediate_size": s.hidden // 4,
        "n_routed_experts": 4 * s.experts,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": _CHOSEN,
        "q_lora_rank": s.hidden // 4,
        "kv_lora_rank": s.hidden // 4,
        "first_k_dense_replace": 1,
    }


def _olmoe(s: Scale) -> Given:
    return _mixture(s, num_experts=2 * s.experts, intermediate_size=s.hidden // 2)


def _mamba2(s: Scale) -> Given:
    return {
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "vocab_size": s.words,
        "num_heads": 2 * s.hidden // 64,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 64,
        "chunk_size": 64,
    }


def _deberta(s: Scale) -> Given:
    return {**_usual(s), "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}


def _vision(s: Scale) -> Given:
    return {
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "image_size": s.side,
        "patch_size": s.side // 16,
    }


def _tower(s: Scale) -> Given:
    """Half as deep as the text's part beside it."""
    return {**_vision(s), "num_hidden_layers": s.layers // 2, "intermediate_size": 4 * s.hidden}


def _swin(s: Scale) -> Given:
    return {
        "image_size": s.side,
        "embed_dim": s.hidden // 8,
        "depths": [2, 2, s.layers, 2],
        "num_heads": [s.heads // 4 * times for times in (1, 2, 4, 8)],
        "window_size": s.side // 32,
    }


def _clip(s: Scale) -> Given:
    text = {"hidden_size": s.hidden // 2, "intermediate_size": 2 * s.hidden, "eos_token_id": 2}
    return {"text_config": {**_plain(s), **text}, "vision_config": _tower(s)}


def _wav2vec2(s: Scale) -> Given:
    return {
        **_plain(s),
        "intermediate_size": 4 * s.hidden,
        "conv_dim": [min(512, s.hidden)] * 7,
        "mask_time_prob": 0.0,  # numpy draws the masks of training, otherwise every time
    }


def _qwen2_moe(s: Scale) -> Given:
    return _mixture(
        s,
        num_experts=2 * s.experts,
        moe_intermediate_size=s.hidden // 2,
        shared_expert_intermediate_size=s.inner,
        decoder_sparse_step=1,
    )


def _granite_moe(s: Scale) -> Given:
    return _mixture(s, num_local_experts=2 * s.experts, intermediate_size=s.hidden // 2)


def _glm4_moe(s: Scale) -> Given:
    return _mixture(
        s,
        n_routed_experts=2 * s.experts,
        moe_intermediate_size=s.hidden // 2,
        head_dim=s.hidden // s.heads,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )


def _esm(s: Scale) -> Given:
    own = {"mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": False}
    return {**_usual(s), **own}


def _beit(s: Scale) -> Given:
    own = {"intermediate_size": s.inner, "use_relative_position_bias": True}
    return {**_vision(s), **own}


def _convnext(s: Scale) -> Given:
    return {
        "hidden_sizes": [s.hidden // 8 * times for times in (1, 2, 4, 8)],
        "depths": [3, 3, s.layers, 3],
    }


def _llava(s: Scale) -> Given:
    return {
        "text_config": {"model_type": "llama", **_usual(s)},
        "vision_config": {"model_type": "siglip_vision_model", **_tower(s)},
        "image_token_index": 1,
        "image_token_id": 1,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    }


# -- all of them -------------------------------------------------------------


def _kind(
    name: str,
    sizes: Callable[[Scale], Given],
    given: Callable[[Any, int, Draw, bool], Given],
    kind: str = "Model",
    config: str = "",
    **more: Any,
) -> Kind:
    make = of_transformers(name, kind, config)
    return Kind(make, given, sizes(FULL), sizes(QUICK), sizes(TINY), apart=True, **more)


def _decoder(name: str, sizes: Callable[[Scale], Given] = _usual, **more: Any) -> Kind:
    return _kind(name, sizes, _ids(2048), "ForCausalLM", generates=True, **more)


MORE: dict[str, Kind] = {
    "phi3": _decoder("Phi3"),
    "falcon": _decoder("Falcon", _plain),
    "opt": _decoder("OPT", _opt),
    "bloom": _decoder("Bloom", _bloom),
    "gptj": _decoder("GPTJ", _gptj),
    "cohere": _decoder("Cohere"),
    "olmo2": _decoder("Olmo2"),
    "gemma3": _decoder("Gemma3", _with_heads, config="Gemma3TextConfig"),
    "starcoder2": _decoder("Starcoder2"),
    "gpt-oss": _decoder("GptOss", _gpt_oss, experts=(_CHOSEN, 16, ".experts.")),
    "deepseek-v3": _decoder("DeepseekV3", _deepseek, experts=(_CHOSEN, 64, ".experts.")),
    "olmoe": _decoder("Olmoe", _olmoe, experts=(_CHOSEN, 32, ".experts.")),
    "mamba2": _decoder("Mamba2", _mamba2, most_trained=512),  # as mamba
    "bert": _kind("Bert", _usual, _ids(512)),
    "deberta": _kind("DebertaV2", _deberta, _ids(512)),
    "dinov2": _kind("Dinov2", _vision, images),
    "swin": _kind("Swin", _swin, images),
    "clip": _kind("CLIP", _clip, _pairs),
    "wav2vec2": _kind("Wav2Vec2", _wav2vec2, _sound),
    "granite": _decoder("Granite"),
    "glm4": _decoder("Glm4", _with_heads),
    "nemotron": _decoder("Nemotron"),
    "qwen2-moe": _decoder("Qwen2Moe", _qwen2_moe, experts=(_CHOSEN, 32, ".experts.")),
    "granite-moe": _decoder("GraniteMoe", _granite_moe, experts=(_CHOSEN, 32, ".experts.")),
    "glm4-moe": _decoder("Glm4Moe", _glm4_moe, experts=(_CHOSEN, 32, ".experts.")),
    "modernbert": _kind("ModernBert", _usual, _ids(512)),
    "esm": _kind("Esm", _esm, _ids(512)),
    "beit": _kind("Beit", _beit, images),
    "convnextv2": _kind("ConvNextV2", _convnext, images),
    "llava": _kind("Llava", _llava, _pictures_and_words, "ForConditionalGeneration"),
}
"""By name."""
