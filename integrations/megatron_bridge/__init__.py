"""Megatron Bridge's and Megatron-Core's CPU offloading on any torch model.

    from tiermem.integrations import megatron_bridge

    with megatron_bridge.Offloading(model, provider) as run:
        optimizer = run.tier.optimizer(run.model, torch.optim.AdamW, lr=1e-4)

``provider`` is any object with the fields: a model provider, a ``TransformerConfig``, a mapping;
fields can also be given by name. As in Megatron, the first layers are the offloaded ones.
"""

from __future__ import annotations

from .fields import FIELDS, Fields
from .offloading import Offloading, explain

__all__ = ["FIELDS", "Fields", "Offloading", "explain"]
