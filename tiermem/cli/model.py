"""The demonstration model: a small GPT over bytes, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tiermem.cli.options import MOST, check_whole
from tiermem.errors import ConfigError
from tiermem.nn.loss import chunked_cross_entropy

VOCABULARY = 256

LINEAR = ("qkv", "out", "up", "down")
"""The linear layers of a :class:`Layer`."""

_HEADS = 6


def usual_heads(width: int) -> int:
    """Returns how many attention heads a layer of this width has by default."""
    return next(heads for heads in range(_HEADS, 0, -1) if width % heads == 0)


@dataclass(frozen=True)
class Shape:
    """The sizes of a :class:`ByteGPT`.

    Attributes:
        layers: Number of equal layers.
        width: Size of the residual stream.
        heads: Attention heads; divides ``width``.
        context: Longest sequence in bytes.
    """

    layers: int = 16
    width: int = 192
    heads: int = 6
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            check_whole(name, getattr(self, name))
        if self.parameters > MOST:
            raise ConfigError(
                f"the model has more than {MOST} parameters: give a smaller --layers or --width"
            )
        if self.width % self.heads:
            raise ConfigError(f"--width {self.width} is not a multiple of --heads {self.heads}")

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        outside = (2 * VOCABULARY + self.context + 2) * self.width
        return self.layers * self.layer_parameters + outside


class Layer(nn.Module):
    """One pre-norm transformer layer: causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after this layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return cast(Tensor, x + self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Head(nn.Linear):
    """The last layer: logits, or the loss itself without ever having all logits."""

    def forward(self, x: Tensor, targets: Tensor | None = None, chunks: int = 0) -> Tensor:
        """Returns logits, or with ``targets`` the mean cross-entropy in ``chunks`` chunks."""
        if targets is None:
            return super().forward(x)
        return chunked_cross_entropy(x, self.weight, targets, chunks=chunks, bias=self.bias)


class ByteGPT(nn.Module):
    """Predicts the next byte.

    Args:
        shape: The sizes.
        checkpointing: Recompute each layer in backward instead of keeping its activations.
    """

    def __init__(self, shape: Shape, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = Head(shape.width, VOCABULARY, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        residual = 0.02 / (2 * self.shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, chunks: int = 0) -> Tensor:
        """Returns the logits of the byte after each position, or the loss given ``targets``."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return cast(Tensor, self.head(self.norm(x), targets, chunks))


def loss_of(model: nn.Module, tokens: Tensor, chunks: int = 0) -> Tensor:
    """Returns the mean cross-entropy, in nats per byte, of predicting ``tokens``.

    Args:
        model: A :class:`ByteGPT`.
        tokens: ``(batch, length + 1)``, int64.
        chunks: In how many parts the logits are made; 0 makes all at once.
    """
    if chunks:
        return cast(Tensor, model(tokens[:, :-1], tokens[:, 1:], chunks))
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))
