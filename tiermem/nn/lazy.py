"""A tensor whose bytes are in the tiers, and that fetches itself when it is used.

``param.grad`` and the optimizer's state are such tensors between their uses
by tiermem itself. Any torch operation on one gets a copy of the real tensor
instead; where the operation changed it, the change is written back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tiermem.nn.placeholder import placeholder
from tiermem.nn.standin import Opened, StandIn, writes
from tiermem.runtime.slots import use_count

_NOTHING = {torch.Tensor.detach_, torch.Tensor.requires_grad_}
_OWN_REFERENCES = 2


class LazyTensor(StandIn, torch.Tensor):
    """Stands for a tensor in the tiers. Make it with :func:`lazy`."""

    _load: Callable[[], torch.Tensor]
    _store: Callable[[torch.Tensor], Any]
    _kept: torch.Tensor | None
    _gone = False

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        return (True, self) if func in _NOTHING else (False, None)

    def _open(self) -> Opened:
        flush(self)
        return _Copy(self, self._kept if self._kept is not None else self._load())

    def _in_a_pass(self) -> Any:
        flush(self)
        return self._load()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self._load()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._load().__reduce_ex__(protocol)


class _Copy(Opened):
    """A copy of a lazy tensor, in use by an operation."""

    __slots__ = ("lazy", "version")

    def __init__(self, stand_in: LazyTensor, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.lazy = stand_in
        self.version = tensor._version

    def close(self, func: Callable[..., Any]) -> None:
        """Writes a change back; keeps the copy while something else looks into it."""
        if self.tensor._version != self.version or writes(func):
            self.lazy._store(self.tensor.detach())
        self.lazy._kept = self.tensor if _seen(self.tensor) else None


def _seen(tensor: torch.Tensor) -> bool:
    return use_count(tensor.untyped_storage()) > _OWN_REFERENCES


def flush(tensor: torch.Tensor | None) -> None:
    """Writes back what was changed through a view of a lazy tensor (``p.grad[0].zero_()``).

    Not every change is counted (``p.grad.data``, numpy), so one is assumed.
    """
    if not isinstance(tensor, LazyTensor) or tensor._kept is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        kept, tensor._kept = tensor._kept, None
        tensor._store(kept.detach())
        if _seen(kept):
            tensor._kept = kept


def forget(tensor: torch.Tensor) -> None:
    """Lets the views of a lazy tensor be."""
    if isinstance(tensor, LazyTensor):
        tensor._kept = None


def is_viewed(tensor: Any) -> bool:
    """Whether somebody may have a view of a copy that a lazy tensor made."""
    return isinstance(tensor, LazyTensor) and tensor._kept is not None


def is_gone(tensor: Any) -> bool:
    """Whether a lazy tensor stands for what is kept nowhere any more; it says so when used."""
    return isinstance(tensor, LazyTensor) and tensor._gone


def ensure_there(tensor: Any) -> None:
    """Has a lazy tensor say so if what it stands for is kept nowhere any more."""
    if is_gone(tensor):
        tensor._load()


def orphan(tensor: LazyTensor) -> None:
    """Gives a lazy tensor its value for good: what it stood for is about to be forgotten."""
    kept = tensor._kept if tensor._kept is not None else tensor._load()
    tensor._kept = None
    tensor._load = lambda: kept
    tensor._store = lambda value: None if value is kept else kept.copy_(value) and None


def _references(thing: object) -> int:
    return sys.getrefcount(thing)


def _alone() -> int:
    thing = object()
    return _references(thing)


ALONE = _alone()
"""What :func:`_references` counts for an object that one local variable holds."""


def is_held(tensor: LazyTensor, own: int) -> bool:
    """Whether anybody has a reference to a lazy tensor besides ``own`` of the caller's."""
    return _references(tensor) > ALONE + own


def refresh(tensor: torch.Tensor | None, value: torch.Tensor) -> None:
    """Shows a change of what is stored in the views of a lazy tensor that are still seen."""
    if isinstance(tensor, LazyTensor) and tensor._kept is not None:
        kept = tensor._kept
        tensor._kept = kept if _seen(kept) else None
        if tensor._kept is not None:
            with torch.no_grad():
                kept.copy_(value)


def lazy(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[], torch.Tensor],
    store: Callable[[torch.Tensor], Any],
) -> LazyTensor:
    """Makes a lazy tensor.

    Args:
        shape: Of the real tensor.
        dtype: Of the real tensor.
        device: Of the real tensor.
        load: Returns a copy of the real tensor, in ordinary memory.
        store: Takes a changed copy back.
    """
    tensor: LazyTensor = torch.Tensor._make_subclass(LazyTensor, placeholder(shape, dtype, device))
    tensor._load = load
    tensor._store = store
    tensor._kept = None
    return tensor


def gone(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, refuse: Callable[..., Any]
) -> LazyTensor:
    """Makes a stand-in for a tensor that is kept nowhere.

    Args:
        shape: Of the tensor that was.
        dtype: Of it.
        device: Of it.
        refuse: Raises, with the reason, when its values are asked for or written.
    """
    tensor = lazy(shape, dtype, device, refuse, refuse)
    tensor._gone = True
    return tensor
