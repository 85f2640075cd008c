"""Norms of gradients, by torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch.utils._foreach_utils import _device_has_foreach_support, _has_foreach_support

Kind = tuple[float, bool | None, torch.dtype | None]
"""Which norm, whether torch's ``foreach`` kernels are asked for, and what is cast to first."""


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


@cache
def measure_of(kind: Kind) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what takes a norm of this kind of one tensor; the same object for the same kind."""
    return partial(_norm_of, kind=kind)


def _norm_of(gradient: torch.Tensor, kind: Kind) -> torch.Tensor:
    return norms_of([gradient if kind[2] is None else gradient.to(kind[2])], *kind[:2])[0]
