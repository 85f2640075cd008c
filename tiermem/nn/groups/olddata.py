"""Keeps the values of tensors that users got as ``weight.data`` when ``weight.data = ...`` follows.

torch gives the weight other memory then, and tensors over the old memory keep it. Programs rely on
that: they replace weights by an average, and restore them later. Here the weight has to keep the
block's memory, so the other tensors get memory of their own.
"""

from __future__ import annotations

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

_given: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each managed tensor, references to the tensors that users got as its ``data``."""


class Replaced:
    """Which managed tensors were given other data, in order.

    With torch, a view that autograd has saved keeps the old values. Here these are lost.

    Attributes:
        times: How often any tensor was given other data.
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
        """Whether a tensor was given other data since :attr:`times` had that value."""
        return bool(self._last.get(tensor, 0) > times)


REPLACED = Replaced()


def give(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Notes that a user gets ``data``, over the memory of ``tensor``; returns it."""
    kept = [ref for ref in _given.get(tensor, ()) if ref() is not None]
    _given[tensor] = [*kept, TensorWeakRef(data)]
    return data


def keep_old(tensor: torch.Tensor, own: torch.Tensor, value: torch.Tensor) -> None:
    """Gives the tensors that users got memory of their own, before ``own`` is written.

    Args:
        tensor: The managed tensor.
        own: Its memory.
        value: The value to be written; if it is one of them, the memory stays the same.
    """
    given = [data for ref in _given.get(tensor, ()) if (data := ref()) is not None]
    if not given or any(data is value and share(own, data) for data in given):
        return
    del _given[tensor]
    old: torch.Tensor | None = None
    for data in given:
        alike = data.shape == own.shape and data.stride() == own.stride()
        if alike and share(own, data):
            old = own.clone() if old is None else old  # they share memory, as before
            data.data = old


def share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have one storage."""
    same: bool = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return same
