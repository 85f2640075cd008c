"""Models of transformers of any class, made small without knowing them, and inputs for them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support_nn import leaves, seed
from torch import nn

MOST = 50 << 20
"""Bytes of weights above which a model is not small."""
VOCABULARY = 128
_EITHER = r"(?:^|_)"
_SIZES: tuple[tuple[str, int], ...] = (  # the first that is found in a name counts
    (r"(?:vocab_size|num_embeddings|n_vocab|codebook_size|vocab_size_.*)$", VOCABULARY),
    (r"(?:num_key_value_heads|num_kv_heads|n_kv_heads?|key_value_heads)$", 2),
    (r"(?:num_experts_per_tok|top_k_experts|moe_topk|num_selected_experts|topk_group)$", 2),
    (r"(?:n_group|moe_num_shared_experts|n_shared_experts)$", 1),
    (r"(?:num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$", 4),
    (r"(?:head_dim|qk_nope_head_dim|v_head_dim|qk_rope_head_dim|d_kv|head_size|d_head)$", 16),
    (r"(?:heads|n_head|num_head)$", 4),
    (r"(?:hidden_layers|num_layers|n_layers?|num_blocks|layers|depth|hidden_layers_.*)$", 2),
    (r"(?:intermediate_size|ffn_dim|d_ff|ffn_hidden_size|mlp_dim|d_inner|ffn_size|n_inner)$", 96),
    (r"(?:hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embedding_dim)$", 64),
    (r"(?:hidden_size_per_layer_input|projection_dim|out_hidden_size|projector_.*size)$", 64),
    (r"(?:d_embed|proj_dim|adapter_.*size|bottleneck_.*(?:dim|size)|hidden_channels)$", 64),
    (r"(?:lora_rank|low_rank|_rank)$", 16),
    (r"(?:width|dim|channels|_size_?)$", 64),
)
_LEFT = re.compile(
    r"patch|window|num_channels|kernel|stride|image_size|_token|in_channels|chunk|ratio|_id$|"
    r"num_mel|max_|position|type_vocab|scale|sample_size|num_labels|group|crop|spectrogram|"
    r"sampling|sequence|input_size|resolution|pool|downsampl|num_frames|fps|state_size|conv_"
)
_PATTERNS = [(re.compile(_EITHER + pattern), size) for pattern, size in _SIZES]


class NotSmallError(Exception):
    """No small model of a class was found, and why."""


def configurations(make: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """Yields smaller and smaller changes of a default configuration, with what was done."""
    for what, change in (
        ("all", _shrink),
        ("layers and vocabulary", _fewer_layers),
        ("width alone", lambda name, value: None if _is_layers(name) else _shrink(name, value)),
        ("nothing", lambda name, value: None),
    ):
        try:
            config = make()
            _visit(config, change)
        except Exception as error:  # a check of the class's own
            yield what, error
        else:
            yield what, config


def _is_layers(name: str) -> bool:
    return bool(re.search(r"layers|depth|n_layer|num_blocks", name))


def _shrink(name: str, value: int) -> int | None:
    if _LEFT.search(name):
        return None
    for pattern, size in _PATTERNS:
        if pattern.search(name):
            return size
    return None


def _fewer_layers(name: str, value: int) -> int | None:
    if _is_layers(name) or name.endswith(("vocab_size", "num_experts", "n_routed_experts")):
        return _shrink(name, value)
    return None


def _visit(config: Any, change: Callable[[str, int], int | None]) -> None:
    """Changes the numbers of a configuration, and of those in it, where that makes them less."""
    own = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    layers: int | None = None
    for name, value in own.items():
        if hasattr(value, "to_dict"):
            _visit(value, change)
            continue
        new = None
        if isinstance(value, int) and not isinstance(value, bool):
            smaller = change(name, value)
            if smaller is not None and smaller < value:
                new = smaller
            elif smaller is not None and value < 0:
                new = None
            if _is_layers(name):
                layers = min(layers or value, new or value)
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            new = _shrunk_list(name, value, change)
        if new is not None:
            _set(config, name, new)
    if layers is not None:
        for name in ("layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers"):
            listed = own.get(name)
            if isinstance(listed, list) and len(listed) > layers:
                kinds = [k for i, k in enumerate(listed) if k not in listed[:i]][:layers]
                _set(config, name, (kinds + listed)[:layers] if kinds else listed[:layers])
    for name, value in own.items():
        if name.endswith("token_id") and isinstance(value, int):
            most = getattr(config, "vocab_size", None)
            if isinstance(most, int) and value >= most > 2:
                _set(config, name, most - 1 - sum(map(ord, name)) % min(20, most - 1))


def _shrunk_list(name: str, value: list[int], change: Callable[[str, int], int | None]) -> Any:
    if name in ("depths", "num_blocks", "layer_depths"):
        return [1] * len(value) if change("depth", 24) is not None else None
    if re.search(r"hidden_sizes|embed_dims?$|widths|channels$|neck_hidden", name):
        if change("hidden_size", 10**6) is None:
            return None
        most = max(value)
        return [max(16, v * 64 // most // 16 * 16) for v in value]
    return None


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property, or a check of the class's own
        return


def small_model(cls: Any, make_config: Callable[[], Any], build: Callable[[Any], nn.Module]) -> Any:
    """Returns a small model of a class, with inputs that it takes.

    Args:
        cls: The class.
        make_config: Makes its default configuration.
        build: Makes a model of a configuration.

    Returns:
        What makes the model with the same numbers each time, and what makes inputs for a length.

    Raises:
        NotSmallError: If there is none, with the last reason for each way that was tried.
    """
    reasons: list[str] = []
    for what, config in configurations(make_config):
        if isinstance(config, Exception):
            reasons.append(f"{what}: {said(config)}")
            continue
        try:
            with torch.device("meta"):
                nbytes = weights(build(config))
        except Exception as error:
            reasons.append(f"{what}: {said(error)}")
            if not reasons[-1].count("meta"):
                continue
            nbytes = 0
        if nbytes > MOST:
            reasons.append(f"{what}: {nbytes >> 20} MiB")
            continue

        def made(config: Any = config) -> nn.Module:
            seed(11)
            return build(config)

        try:
            model = made()
        except Exception as error:
            reasons.append(f"{what}: {said(error)}")
            continue
        if weights(model) > MOST:
            reasons.append(f"{what}: {weights(model) >> 20} MiB")
            continue
        inputs = taken_inputs(model, config, reasons)
        if inputs is not None:
            return made, inputs
    raise NotSmallError("; ".join(dict.fromkeys(reasons)))


def said(error: BaseException) -> str:
    """Returns an exception as a line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160]


def weights(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


Inputs = Callable[[int], dict[str, Any]]


def taken_inputs(model: Any, config: Any, reasons: list[str]) -> Inputs | None:
    """Returns the first inputs that a model's forward takes and makes tensors of."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.eval()
    for inputs in candidates(model, config):
        try:
            for length in (1, 2):
                seed(3)
                with torch.no_grad():
                    output = model(**inputs(length))
        except Exception as error:
            reasons.append(f"forward({', '.join(inputs(1))}): {said(error)}")
            continue
        finally:
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    if name in state and value.shape == state[name].shape:
                        value.copy_(state[name])
        if any(isinstance(v, torch.Tensor) and v.numel() for _, v in leaves(output)):
            return inputs
    return None


def _found(config: Any, *names: str) -> Any:
    """Returns an entry of a configuration, or of one in it."""
    nested = [v for v in vars(config).values() if hasattr(v, "to_dict")]
    for name in names:
        for each in (config, *nested):
            value = getattr(each, name, None)
            if value is not None:
                return value
        for each in nested:
            value = _found(each, name)
            if value is not None:
                return value
    return None


def _ids(config: Any, length: int) -> torch.Tensor:
    most = _found(config, "vocab_size") or VOCABULARY
    most = most if isinstance(most, int) else VOCABULARY
    return torch.randint(3, max(4, min(most - 30, 90)), (2, length))


def _pixels(config: Any, batch: int = 2) -> torch.Tensor:
    size = _found(config, "image_size", "input_size", "sample_size") or 64
    size = size if isinstance(size, list | tuple) else (size, size)
    size = size[-2:] if len(size) > 2 else size
    if not all(isinstance(s, int) and 0 < s <= 512 for s in size):
        size = (64, 64)
    channels = _found(config, "num_channels", "in_channels", "in_chans") or 3
    return torch.randn(batch, channels if isinstance(channels, int) else 3, *size)


def candidates(model: Any, config: Any) -> Iterator[Inputs]:
    """Yields guesses of inputs, by the names that forward takes."""
    known = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")

    def ids(length: int) -> torch.Tensor:
        return _ids(config, (12, 7, 16)[length])

    def decoder(length: int) -> dict[str, Any]:
        return {"decoder_input_ids": ids(length)} if "decoder_input_ids" in known else {}

    mels = _found(config, "num_mel_bins", "num_mel_filters", "feature_size", "n_mels") or 80
    frames = _found(config, "max_source_positions") or 64
    guesses: dict[str, list[Inputs]] = {
        "input_ids": [
            lambda n: {"input_ids": ids(n), **decoder(n)},
            lambda n: {"input_ids": ids(n)},
            lambda n: {"input_ids": ids(n), "pixel_values": _pixels(config)},
            lambda n: {"input_ids": _ids(config, 64)},
        ],
        "pixel_values": [
            lambda n: {"pixel_values": _pixels(config, n)},
            lambda n: {"pixel_values": _pixels(config, n), **decoder(n)},
            lambda n: {"pixel_values": torch.randn(n, 3, 224, 224)},
            lambda n: {"pixel_values": torch.randn(n, 3, 64, 64)},
            lambda n: {
                "pixel_values": torch.randn(n, _found(config, "num_frames") or 4, 3, 64, 64)
            },
        ],
        "pixel_values_videos": [
            lambda n: {
                "pixel_values_videos": torch.randn(
                    n, _found(config, "frames_per_clip") or 4, 3, *_pixels(config).shape[-2:]
                )
            }
        ],
        "input_features": [
            lambda n: {"input_features": torch.randn(2, mels, 2 * frames), **decoder(n)},
            lambda n: {"input_features": torch.randn(2, 48 * n, mels), **decoder(n)},
            lambda n: {"input_features": torch.randn(2, 1, 64 * n, mels), **decoder(n)},
            lambda n: {"input_features": torch.randn(2, mels, 96 * n)},
        ],
        "input_values": [
            lambda n: {"input_values": torch.randn(2, 2000 * n), **decoder(n)},
            lambda n: {"input_values": torch.randn(2, 1, 2000 * n)},
            lambda n: {"input_values": torch.randn(2, 1024, 128)},
        ],
        "past_values": [
            lambda n: {"past_values": torch.randn(2, _found(config, "context_length") or 32, 1)},
            lambda n: {
                "past_values": torch.randn(
                    2,
                    _found(config, "context_length") or 32,
                    _found(config, "num_input_channels") or 1,
                )
            },
        ],
        "inputs": [lambda n: {"inputs": ids(n)}],
        "inputs_embeds": [lambda n: {"inputs_embeds": torch.randn(2, 8 * n, 64)}],
        "speech": [lambda n: {"spectrogram": torch.randn(2, 10 * n, mels)}],
    }
    first = [main, *(name for name in guesses if name != main)]
    for name in first:
        if name in known or name == main:
            yield from guesses.get(name, [])
