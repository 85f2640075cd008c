"""Which pair of saved-tensor hooks is in force, and whose: asked of torch, or tracked here.

torch 2.6 has no function that returns the pair on top. There, the two functions that push and pop
pairs (``torch.autograd.graph.saved_tensors_hooks`` and all that derives from it go through these
of ``torch._C._autograd``) are wrapped from the import of this module on, thread by thread. A pair
that was pushed before is not known; nor is one that a thread of autograd's takes over from the
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
    """Returns what checkpoints are given for a weight: they count what is saved.

    They also compare what it looks like with what is saved as they compute again, which may be
    after the model has left the tiers. It has the memory of one element.
    """
    return _element(dtype, device).expand(shape)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor has been given to a checkpoint for a weight."""
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
    """Follows the pairs that are pushed and popped from now on.

    Args:
        autograd: Has the two functions, which are replaced by such as note what they do.

    Returns:
        A function that returns the calling thread's pair on top, or None.
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
"""Returns the pair of saved-tensor hooks in force, or None."""

push_pair: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
"""Pushes a pair as it is, whatever :func:`change_pushed` makes of others."""


def change_pushed(change: Callable[[Pair], Pair], autograd: Any = torch._C._autograd) -> None:
    """Replaces the function that pushes pairs by one that changes each pair first.

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
    """Has something done where torch begins to take no hooks, and where it takes them again.

    Args:
        before: Called first: torch refuses where a pair is there.
        after: Called when hooks are taken again.
        autograd: Has the two functions, which are replaced.
    """
    disable: Callable[..., None] = autograd._saved_tensors_hooks_disable
    enable: Callable[[], None] = autograd._saved_tensors_hooks_enable

    @wraps(disable)
    def changed_disable(message: str, *more: Any, **named: Any) -> None:
        if not more and not named:  # else torch traces, and takes pairs that are there for none
            before()
        disable(message, *more, **named)

    @wraps(enable)
    def changed_enable() -> None:
        enable()
        after()

    autograd._saved_tensors_hooks_disable = changed_disable
    autograd._saved_tensors_hooks_enable = changed_enable


def is_of_checkpoint(pair: Pair) -> bool:
    """Whether a pair of saved-tensor hooks is one of ``torch.utils.checkpoint``'s."""
    return getattr(pair[0], "__module__", "") == "torch.utils.checkpoint"


def is_recomputation(pair: Pair) -> bool:
    """Whether a pair is the one with which a checkpoint computes again."""
    name = getattr(pair[0], "__qualname__", "")
    return is_of_checkpoint(pair) and name.startswith("_recomputation_hook.")


def passed_over(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a pack hook that covers no other as none of a user's.

    From torch 2.15 on, selective checkpoints hand what they keep to the user's hooks if they are
    told to, and warn where they are not told. They pass over hooks of checkpoints, which they know
    by these two names; and tiermem's have to be passed over as well.
    """
    pack.__dict__.update(_checkpoint_internal=True, _user_hooks=None)
    return pack
