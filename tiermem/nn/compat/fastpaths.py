"""Modules of torch that pass weights of their submodules to one kernel.

They first check if one of these is of a class that intercepts operations, and if so use
another implementation, which rounds differently.
"""

from __future__ import annotations

import dis
import types
from typing import Any

from torch import nn

LOOKS = nn.TransformerEncoder.forward.__code__
"""It checks its first layer's weights before it calls that layer; if it finds none, padding is
removed for all layers."""

ASK = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""All of these modules, whose settings determine if they do: checking them may use a weight."""


def _asked(code: types.CodeType) -> range:
    """Returns where a forward collects the weights whose class it checks."""
    found = list(dis.get_instructions(code))
    for end, instruction in enumerate(found):
        if instruction.opname.startswith("STORE") and "tensor_args" in instruction.argrepr:
            begin = end
            while found[begin - 1].opname.startswith(("LOAD", "BUILD_TUPLE")):
                begin -= 1
            return range(found[begin].offset, instruction.offset)
    return range(0)


_ASKED = {
    forward.__code__: _asked(forward.__code__)
    for forward in (nn.MultiheadAttention.forward, nn.TransformerEncoderLayer.forward)
}


def only_asks(frame: types.FrameType) -> bool:
    """Whether code that is looking a weight up only checks its class, and does not use it."""
    return frame.f_code is LOOKS or frame.f_lasti in _ASKED.get(frame.f_code, ())


def uses_inside(module: nn.Module) -> bool:
    """Whether a module's call uses the weights of its submodules without calling these.

    A block may begin at such a module, but not inside it.
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
