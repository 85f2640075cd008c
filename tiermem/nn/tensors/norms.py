"""Norms of gradients, by torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch.utils._foreach_utils import _device_has_foreach_support, _has_foreach_support

Kind = tuple[float, bool | None, torch.dtype | None]
"""Which norm, whether torch's ``foreach`` kernels are requested, and the dtype to cast to first."""

_ALIGNED = 16
"""Alignment in bytes; at other addresses torch's kernel adds in another order than for a cast."""


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
    """Returns the function that computes such a norm of one tensor; one object per kind."""
    return partial(_norm_of, kind=kind)


def _norm_of(gradient: torch.Tensor, kind: Kind) -> torch.Tensor:
    norm_type, foreach, dtype = kind
    if dtype is None or gradient.dtype is dtype:
        return norms_of([gradient], norm_type, foreach)[0]
    if (
        gradient.is_cuda
        and foreach is not False
        and gradient.is_contiguous()
        and gradient.data_ptr() % _ALIGNED == 0
    ):
        # casts while reading: the bits of a cast beforehand, without its pass over memory
        return torch._foreach_norm([gradient], norm_type, dtype)[0]
    return norms_of([gradient.to(dtype)], norm_type, foreach)[0]
