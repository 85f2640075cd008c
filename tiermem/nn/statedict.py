"""Refuses a state dict that does not fit before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError


def check_state(module: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> None:
    """Refuses a state dict whose tensors have other shapes than the module's.

    Args:
        module: What is to be loaded.
        state: As given to ``load_state_dict``, like the rest.
        strict: As torch has it; missing and unexpected names are torch's own business.
        assign: Not possible here.

    Raises:
        CheckpointError: Naming the first tensor that differs.
    """
    if assign:
        raise CheckpointError(
            "load_state_dict(assign=True) would replace tensors that live in the tiers; leave "
            "assign out, the values are copied in"
        )
    if not isinstance(state, Mapping):
        return
    for name, part in module.named_modules():
        if part._load_state_dict_pre_hooks or not _loads_plainly(part):
            continue  # it may reshape what it is given
        for own, tensor in [*part._parameters.items(), *part._buffers.items()]:
            key = f"{name}.{own}" if name else own
            value = state.get(key)
            if tensor is None or not isinstance(value, torch.Tensor):
                continue
            if value.shape != tensor.shape and not (tensor.dim() == 0 and value.numel() == 1):
                raise CheckpointError(
                    f"the checkpoint's {key!r} has shape {tuple(value.shape)}, the model's has "
                    f"{tuple(tensor.shape)}; nothing was loaded"
                )


def _loads_plainly(module: nn.Module) -> bool:
    """Whether a module takes its state as torch's own modules do."""
    return type(module)._load_from_state_dict.__module__.startswith("torch.")
