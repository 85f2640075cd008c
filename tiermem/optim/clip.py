"""Gradient clipping over tiered gradients, with torch's own arithmetic and order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)


def norms_of(
    tensors: Sequence[torch.Tensor], norm_type: float, foreach: bool | None
) -> list[torch.Tensor]:
    """Returns the norm of each tensor, by the kernel that ``clip_grad_norm_`` would use."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        device = tensor.device
        if (foreach is None and _has_foreach_support([tensor], device)) or (
            foreach and _device_has_foreach_support(device)
        ):
            found.extend(torch._foreach_norm([tensor], norm_type))
        else:
            found.append(torch.linalg.vector_norm(tensor, norm_type))
    return found


def total_norm(
    norms: Sequence[torch.Tensor], like: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """Returns the norm over all gradients from theirs.

    Args:
        norms: One per gradient, 0-d, in the order of the parameters.
        like: Tensors of the gradients' devices and dtypes, in the same order; torch sums by
            device and dtype, and the order of a sum matters to its last bit.
        norm_type: Which norm.
    """
    if not norms:
        return torch.tensor(0.0)
    grouped = _group_tensors_by_device_and_dtype([list(like)], with_indices=True)
    order = [index for _, indices in grouped.values() for index in indices]
    first = norms[0].device
    stacked = torch.stack([norms[i].to(first) for i in order])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total


def scale(tensors: Sequence[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiplies gradients in place, by the kernel that ``clip_grad_norm_`` would use."""
    for tensor in tensors:
        device = tensor.device
        moved = factor.to(device)
        if (foreach is None and _has_foreach_support([tensor], device)) or (
            foreach and _device_has_foreach_support(device)
        ):
            torch._foreach_mul_([tensor], moved)
        else:
            tensor.mul_(moved)
