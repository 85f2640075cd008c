"""Modules of torch that hand weights of modules inside them to one kernel.

They ask first whether one of these is of a class that intercepts operations, and if so they go
another way, which rounds differently.
"""

from __future__ import annotations

from typing import Any

from torch import nn

LOOKS = nn.TransformerEncoder.forward.__code__
"""Asks that of its first layer's weights before it calls that layer; if not, padding is left out of
all layers."""

HANDS_ON = (nn.TransformerEncoderLayer.forward.__code__, nn.MultiheadAttention.forward.__code__)
"""Ask it of weights that their own calls hold, and hand these to the kernel."""

ASK = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""All of these modules, whose settings say whether they do: to look at them may use a weight."""


def uses_inside(module: nn.Module) -> bool:
    """Whether a module's call uses the weights of modules inside without calling these.

    A block may begin at such a module, and none inside it.
    """
    layer: Any = module
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.batch_first and module._qkv_same_embed_dim)
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    attention = layer.self_attn
    return bool(
        isinstance(attention, nn.MultiheadAttention)
        and uses_inside(attention)
        and attention.in_proj_bias is not None
        and getattr(layer, "activation_relu_or_gelu", False)
    )
