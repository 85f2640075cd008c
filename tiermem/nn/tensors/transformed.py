"""Weights that are passed directly to a transform of ``torch.func``: ``grad(loss)(weight)``.

A transform begins by wrapping its tensors, in C++, where no operation is intercepted: it would use
the placeholder of a weight that is not in HBM. So the two functions that wrap tensors are replaced,
and get a tensor that is in HBM as long as the transform keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

from tiermem.nn.tensors.standin import StandIn

_WRAP = ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"))
_followed: list[str] = []


def follow_transforms() -> None:
    """Replaces torch's functions so that transforms get fetched weights; may be called twice."""
    for module, name in _WRAP:
        if name not in _followed:
            _followed.append(name)
            setattr(module, name, _following(getattr(module, name)))


def _following(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def follow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, StandIn):
            with temporarily_pop_interpreter_stack():  # outside the transform that begins
                tensor = tensor.view_as(tensor)  # an operation: the block is fetched, and stays
                if isinstance(tensor, StandIn):  # it cannot be fetched: this raises
                    tensor.data_ptr()
        return wrap(tensor, *args, **kwargs)

    return follow
