"""Version counters of several tensors in one call, if this torch version has such calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as _unchanged


def _takes_several(call: Callable[[Any], object]) -> bool:
    """Whether a function accepts a tuple instead of a tensor; older ones look for its counter."""
    try:
        call(())
    except (AttributeError, TypeError):
        return False
    return True


_INCREMENTS, _KEEPS = map(_takes_several, (torch.autograd.graph.increment_version, _unchanged))


_version = attrgetter("_version")


def sum_of_versions(tensors: Sequence[torch.Tensor]) -> int:
    """Returns how often tensors were written, as counted by torch."""
    return sum(map(_version, tensors))


def increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Counts a write of each tensor."""
    for several in (tensors,) if _INCREMENTS and tensors else tensors:
        torch.autograd.graph.increment_version(several)


def keep_versions(tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Returns entered contexts that reset the version counters of tensors at their exit."""
    if not tensors:
        return ()
    return [_unchanged(tuple(tensors))] if _KEEPS else [_unchanged(tensor) for tensor in tensors]
