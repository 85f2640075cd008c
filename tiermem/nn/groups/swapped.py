"""Refuses tensors in the tiers as arguments of ``torch.utils.swap_tensors``.

The function swaps the tensors behind two Python objects. The one in the model would then have
ordinary memory, and lose it when its block is next fetched. torch itself refuses weights, since
there are weak references to them, but does not say what to do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tiermem.errors import ParameterError
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.replaced import named

_followed: list[str] = []


def follow_swaps() -> None:
    """Replaces torch's function that swaps tensors; may be called twice."""
    if _followed:
        return
    _followed.append("swap_tensors")
    swap: Any = torch.utils.swap_tensors

    @functools.wraps(swap)
    def follow(t1: torch.Tensor, t2: torch.Tensor) -> Any:
        for tensor in (t1, t2):
            _refuse_managed(tensor)
        return swap(t1, t2)

    torch.utils.swap_tensors = follow


def _refuse_managed(tensor: torch.Tensor) -> None:
    """Refuses a tensor whose bytes move; small buffers, which stay, are ordinary ones.

    Raises:
        ParameterError: Then.
    """
    group = group_of.get(id(tensor))
    member = None if group is None else group.pointing.member_of(tensor)
    if group is None or member is None or member.materialized or group.stays:
        return
    raise ParameterError(
        f"{named(group, tensor)} lives in the tiers and cannot be swapped with another tensor: "
        "copy the values (`with torch.no_grad(): tensor.copy_(other)`), or swap before tier.wrap "
        "or after tier.unwrap(module)"
    )
