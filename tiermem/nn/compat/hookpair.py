"""Which pair of saved-tensor hooks is active: queried from torch, or tracked here.

torch 2.6 has no function that returns the top pair. There, the two functions that push and pop
pairs (``torch.autograd.graph.saved_tensors_hooks`` and everything derived from it use these
of ``torch._C._autograd``) are wrapped when this module is imported, for each thread. A pair
that was pushed before is not known; nor is one that an autograd thread takes over from the
thread that called ``backward()`` inside such a pair.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from typing import Any

import torch

from tiermem.runtime.base.functorch import outside_inference

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@lru_cache(maxsize=1024)
def stand_in(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Returns what checkpoints get instead of a weight: they count what is saved.

    They also compare its metadata with what is saved in the recomputation, which may be
    after the model has left the tiers. It has the memory of one element.
    """
    return _element(dtype, device).expand(shape)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor was given to a checkpoint instead of a weight."""
    return tensor.data_ptr() == _element(tensor.dtype, tensor.device).data_ptr()


@cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with outside_inference():
        return torch.empty((), dtype=dtype, device=device)


class _Pairs(threading.local):
    """The pairs that a thread has pushed, the last one on top."""

    def __init__(self) -> None:
        self.pushed: list[Pair] = []


def follow(autograd: Any) -> Callable[[], Pair | None]:
    """Tracks the pairs that are pushed and popped from now on.

    Args:
        autograd: Has the two functions, which are replaced by wrappers.

    Returns:
        A function that returns the calling thread's top pair, or None.
    """
    pairs = _Pairs()
    push: Callable[..., None] = autograd._push_saved_tensors_default_hooks
    pop: Callable[[], None] = autograd._pop_saved_tensors_default_hooks

    def noted_push(pack: Callable[..., Any], unpack: Callable[..., torch.Tensor]) -> None:
        push(pack, unpack)
        pairs.pushed.append((pack, unpack))

    def noted_pop() -> None:
        pop()
        if pairs.pushed:
            pairs.pushed.pop()

    def top() -> Pair | None:
        return pairs.pushed[-1] if pairs.pushed else None

    autograd._push_saved_tensors_default_hooks = noted_push
    autograd._pop_saved_tensors_default_hooks = noted_pop
    return top


def _teller(autograd: Any) -> Callable[[], Pair | None]:
    told: Callable[[bool], Pair | None] | None
    told = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    if told is None:
        return follow(autograd)
    return partial(told, False)


top_pair: Callable[[], Pair | None] = _teller(torch._C._autograd)
"""Returns the active pair of saved-tensor hooks, or None."""

push_pair: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
"""Pushes a pair unchanged, whatever :func:`change_pushed` does to others."""


def change_pushed(change: Callable[[Pair], Pair], autograd: Any = torch._C._autograd) -> None:
    """Replaces the function that pushes pairs with one that changes each pair first.

    Args:
        change: Gets a pair and returns the one to push.
        autograd: Has the function that pushes, which is replaced.
    """
    push: Callable[..., None] = autograd._push_saved_tensors_default_hooks

    def changed_push(pack: Callable[..., Any], unpack: Callable[..., torch.Tensor]) -> None:
        push(*change((pack, unpack)))

    autograd._push_saved_tensors_default_hooks = changed_push


def change_disabling(
    before: Callable[[], None], after: Callable[[], None], autograd: Any = torch._C._autograd
) -> None:
    """Adds functions to call when torch begins to disallow hooks, and when it allows them again.

    Args:
        before: Called first: torch raises if a pair is active.
        after: Called when hooks are allowed again.
        autograd: Has the two functions, which are replaced.
    """
    disable: Callable[..., None] = autograd._saved_tensors_hooks_disable
    enable: Callable[[], None] = autograd._saved_tensors_hooks_enable

    @wraps(disable)
    def changed_disable(message: str, *more: Any, **named: Any) -> None:
        if not more and not named:  # otherwise torch traces, and ignores active pairs
            before()
        disable(message, *more, **named)

    @wraps(enable)
    def changed_enable() -> None:
        enable()
        after()

    autograd._saved_tensors_hooks_disable = changed_disable
    autograd._saved_tensors_hooks_enable = changed_enable


def is_of_checkpoint(pair: Pair) -> bool:
    """Whether a pair of saved-tensor hooks belongs to ``torch.utils.checkpoint``."""
    return getattr(pair[0], "__module__", "") == "torch.utils.checkpoint"


def is_recomputation(pair: Pair) -> bool:
    """Whether a pair is the one with which a checkpoint recomputes."""
    name = getattr(pair[0], "__qualname__", "")
    return is_of_checkpoint(pair) and name.startswith("_recomputation_hook.")


def passed_over(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a pack hook that hides no other as not being a user's.

    From torch 2.15 on, selective checkpoints pass what they keep to the user's hooks if
    requested, and warn if this is not set. They skip hooks of checkpoints, which they identify
    by these two names; and tiermem's have to be skipped as well.
    """
    pack.__dict__.update(_checkpoint_internal=True, _user_hooks=None)
    return pack
