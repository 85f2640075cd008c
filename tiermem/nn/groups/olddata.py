"""What users got as ``weight.data``: it keeps its values where ``weight.data = ...`` follows.

torch gives the weight other memory then, and leaves the old one to whoever has it. Programs rely on
that: an average of weights is put in their place, and they are put back. Here the memory has to
stay the block's, so that it is the other tensors that get memory of their own.
"""

from __future__ import annotations

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

_given: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Managed tensor to references to those that were given out as its ``data``."""


class Replaced:
    """Which managed tensors were given other data, in the order in which they were.

    A view that autograd has saved keeps the old values with torch. Here these are gone.

    Attributes:
        times: How often any was.
    """

    __slots__ = ("_last", "times")

    def __init__(self) -> None:
        """Starts with none."""
        self.times = 0
        self._last: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor is given other data."""
        self.times += 1
        self._last[tensor] = self.times

    def since(self, tensor: torch.Tensor, times: int) -> bool:
        """Whether a tensor was given other data when any had been ``times`` times."""
        return bool(self._last.get(tensor, 0) > times)


REPLACED = Replaced()


def give(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Notes that a user gets ``data``, over the memory of ``tensor``; returns it."""
    kept = [ref for ref in _given.get(tensor, ()) if ref() is not None]
    _given[tensor] = [*kept, TensorWeakRef(data)]
    return data


def keep_old(tensor: torch.Tensor, own: torch.Tensor, value: torch.Tensor) -> None:
    """Gives memory of their own to those that were given out, before ``own`` is written.

    Args:
        tensor: The managed tensor.
        own: Its memory.
        value: What is written; where it is one of them, the memory stays the same.
    """
    given = [data for ref in _given.get(tensor, ()) if (data := ref()) is not None]
    if not given or any(data is value and share(own, data) for data in given):
        return
    del _given[tensor]
    old: torch.Tensor | None = None
    for data in given:
        alike = data.shape == own.shape and data.stride() == own.stride()
        if alike and share(own, data):
            old = own.clone() if old is None else old  # they are one memory, as they were
            data.data = old


def share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have one storage."""
    same: bool = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return same
