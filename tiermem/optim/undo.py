"""What a step on the host takes back where it fails half way.

A unit is stepped in place. What cannot fail once it has begun to write needs nothing: one call of
a fused kernel of torch's. Anything else (temporaries that find no memory, a class of the user's
own, a hook) may leave some tensors stepped and others not, so what is stepped is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from tiermem.core.block import align_up
from tiermem.nn.lazy import LazyTensor
from tiermem.nn.shells import insides
from tiermem.transfer.copy import host_copy

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

Put = Callable[[int], torch.Tensor]


def cannot_fail_midway(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step either raises before it has written anything, or makes the whole of it."""
    groups = optimizer.param_groups
    dtypes = {p.dtype for group in groups for p in group["params"]}
    return (
        type(optimizer) in _FUSED
        and len(groups) == 1
        and len(dtypes) == 1
        and bool(groups[0].get("fused"))
        and not torch_optimizer._global_optimizer_post_hooks
        and not optimizer._optimizer_step_post_hooks
    )


class Undo:
    """Copies of what a step changes, and the way back."""

    def __init__(self, scratch: torch.Tensor | None) -> None:
        """Keeps copies in ``scratch``; where that is full, in ordinary memory."""
        self._scratch = scratch
        self._used = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._entries: list[tuple[dict[Any, Any], Any, dict[Any, Any] | None]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors of one block, in the order in which they lie there."""
        if not tensors:
            return
        whole = _run(tensors)
        copy = self._room(whole.numel())
        host_copy(copy, whole)
        self._kept.append((whole, copy))

    def keep_entry(self, state: dict[Any, Any], key: Any) -> None:
        """Notes an optimizer's state of one parameter; what is small in it is copied."""
        entry = state.get(key)
        if entry is None:
            self._entries.append((state, key, None))
            return
        self._entries.append((state, key, dict(entry)))
        for value in entry.values():
            if isinstance(value, LazyTensor) or not isinstance(value, torch.Tensor):
                continue  # what stands for a block's, or a number
            for _, tensor in insides(value):
                self._values.append((tensor, tensor.detach().clone()))

    def take_back(self) -> None:
        """Makes everything what it was."""
        with torch.no_grad():
            for whole, copy in self._kept:
                host_copy(whole, copy)
            for value, was in self._values:
                value.copy_(was)
        for state, key, before in self._entries:
            if before is None:
                state.pop(key, None)
            elif state.get(key) is not None:
                state[key].clear()
                state[key].update(before)

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._scratch is None or self._used + nbytes > self._scratch.numel():
            return torch.empty(nbytes, dtype=torch.uint8)
        room = self._scratch.narrow(0, self._used, nbytes)
        self._used += align_up(nbytes)
        return room


def _run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes from the first tensor of a block to the last."""
    storage = tensors[0].untyped_storage()
    begins = [t.storage_offset() * t.itemsize for t in tensors]
    ends = [b + _extent(t) for b, t in zip(begins, tensors, strict=True)]
    begin, end = min(begins), max(ends)
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8).set_(storage, begin, (end - begin,), (1,))


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
