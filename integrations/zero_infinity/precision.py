"""Which dtypes weights, inputs and operations have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from . import mapping, reading
from .mapping import Plan


def cast(plan: Plan, model: nn.Module) -> None:
    """Casts weights to the configuration's dtype, one at a time; buffers where it says so."""
    if plan.dtype is not None:
        for param in model.parameters():
            if param.is_floating_point() and param.dtype is not plan.dtype:
                param.data = param.data.to(plan.dtype)
    wanted = plan.config["data_types.buffer_dtype"]
    if wanted is None:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(mapping.DTYPES[reading.SHORT[wanted]])


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which a forward runs."""
    config = plan.config
    if not config["torch_autocast.enabled"]:
        return nullcontext()
    return torch.autocast(device.type, mapping.dtype_of(config, "torch_autocast.dtype"))


def halved(value: Any) -> Any:
    """Returns inputs with floating tensors as float16."""
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: halved(item) for key, item in value.items()}
    return type(value)(map(halved, value)) if isinstance(value, list | tuple) else value
