"""What a model needs of the device beside its weights: forecasts, made before anything is loaded.

* Keys and values: layers x key and value heads x head size x 2 x bytes x tokens, where a layer that
  looks back over a window alone keeps no more tokens than that. While a layer's cache grows, the
  former one is there, too.
* A layer that computes holds, per token, eight of its widths (residual, norm, query, key, value,
  attention, projection) and four of its MLP's. Attention is taken to be fused, as ``sdpa`` is.
* Logits of ``b`` bytes take ``b`` in a forward and ``2·b + 12`` bytes each with the loss: the
  float32 copy, the logarithms and their gradient, and the logits' gradient.
* Recomputed in backward, a layer keeps its input alone, and one layer's everything and its
  gradient is there at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tiermem import Budgets, budgets_for
from tiermem.cli.folders import text_config
from tiermem.cli.model import ByteGPT
from tiermem.loading.untouched import Untouched

_WIDTHS = 8
_MLP_WIDTHS = 4
_WITH_GRADIENTS = 3
"""A layer in backward holds what it recomputed, what its kernels saved of it, and gradients."""


@dataclass(frozen=True)
class Sizes:
    """What of a model these forecasts need.

    Attributes:
        layers: Number of them.
        width: Of the residual stream.
        mlp: Width inside a layer's MLP, of all experts that a token sees.
        heads: Heads of keys and of values; 0 where nothing is kept from token to token.
        head: Size of one.
        windows: Most tokens that each layer looks back on; None for all.
        vocabulary: Number of tokens it knows.
        positions: Most tokens in a sequence; None if it says none.
        itemsize: Bytes of an activation.
    """

    layers: int
    width: int
    mlp: int
    heads: int
    head: int
    windows: tuple[int | None, ...]
    vocabulary: int
    positions: int | None
    itemsize: int

    def cache_nbytes(self, tokens: int) -> int:
        """Returns the bytes of keys and values of so many tokens, and of one layer's anew."""
        each = 2 * self.heads * self.head * self.itemsize
        kept = [tokens if window is None else min(tokens, window) for window in self.windows]
        return each * (sum(kept) + max(kept, default=0))

    def forward_nbytes(self, tokens: int) -> int:
        """Returns the bytes of activations of a forward without gradients, to one row of logits."""
        layer = (_WIDTHS * self.width + _MLP_WIDTHS * self.mlp) * self.itemsize
        return tokens * layer + self.vocabulary * (self.itemsize + 8)

    def training_nbytes(self, tokens: int, chunks: int = 0, recomputed: bool = True) -> int:
        """Returns the bytes of activations of forward and backward.

        Args:
            tokens: In one forward, all sequences together.
            chunks: In how many parts logits and loss are made; 0 for all at once.
            recomputed: Whether layers are; if not, each keeps what it holds.
        """
        layer = _WITH_GRADIENTS * (_WIDTHS * self.width + _MLP_WIDTHS * self.mlp) * self.itemsize
        kept = self.layers * (self.width * self.itemsize if recomputed else layer)
        at_once = -(-tokens // max(1, chunks))
        logits = at_once * self.vocabulary * (2 * self.itemsize + 12)
        return tokens * kept + max(tokens * layer, logits)


def sizes_of(model: nn.Module) -> Sizes:
    """Returns the sizes of a byte GPT or of a model of transformers, from its configuration."""
    itemsize = next(model.parameters()).element_size()
    if isinstance(model, ByteGPT):
        own = model.shape
        windows: tuple[int | None, ...] = ()
        return Sizes(
            own.layers, own.width, 4 * own.width, 0, 0, windows, 256, own.context, itemsize
        )
    config = text_config(model)
    layers, width = int(config.num_hidden_layers), int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    positions = getattr(config, "max_position_embeddings", None)
    return Sizes(
        layers=layers,
        width=width,
        mlp=_mlp(config, width),
        heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head=int(getattr(config, "head_dim", None) or width // heads),
        windows=_windows(config, layers),
        vocabulary=int(config.vocab_size),
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        itemsize=itemsize,
    )


def _mlp(config: Any, width: int) -> int:
    """Returns the widest MLP that a token goes through: the plain one, or its experts."""
    plain = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    experts = int(getattr(config, "num_experts_per_tok", None) or 0)
    each = int(getattr(config, "moe_intermediate_size", None) or plain or 4 * width)
    return max(int(plain or 4 * width), experts * each)


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return tuple(window if "sliding" in kind else None for kind in kinds)


def least_budgets(model: nn.Module, *options: Any, **named: Any) -> Budgets:
    """Returns what :func:`tiermem.budgets_for` says of a model without weights; none is made."""
    stand_in = Untouched(model, {})
    try:
        return budgets_for(model, *options, **named)
    finally:
        stand_in.undo()
