"""What has to be undone if a step fails half way.

A unit is stepped in place, and the step may stop in the middle (an error of the user's class or of
a hook, no memory for temporaries, Ctrl-C). So what a step changes is kept before it begins:
bytes that are also at home are read again from there if necessary, which costs nothing if the step
succeeds, and the others are copied. On the host, where nothing interrupts, a step that cannot fail
once it has begun to write needs no copies: one call of a fused torch kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from tiermem.core.alike import all_are, without_none
from tiermem.core.block import align_up
from tiermem.nn.tensors.lazy import LazyTensor
from tiermem.nn.tensors.shells import insides
from tiermem.optim.rules.torchsteps import states_of
from tiermem.runtime.base.functorch import outside_inference
from tiermem.transfer.copy import host_copy

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

_KINDS = {torch.Tensor, LazyTensor}
_values, _dtype, _device = methodcaller("values"), attrgetter("dtype"), attrgetter("device")
_layout, _dim, _item = attrgetter("layout"), torch.Tensor.dim, torch.Tensor.item

_is_inference = torch._C.TensorBase.is_inference

OURS: set[Any] = set()
"""Hooks for the steps of all optimizers that do nothing if tiermem performs the step."""


def cannot_fail_midway(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step either raises before it has written anything, or is completed."""
    groups = optimizer.param_groups
    return (
        type(optimizer) in _FUSED
        and len(groups) == 1
        and bool(groups[0].get("fused"))
        and len({p.dtype for p in groups[0]["params"]}) == 1
        and OURS.issuperset(torch_optimizer._global_optimizer_post_hooks.values())
        and not optimizer._optimizer_step_post_hooks
    )


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code runs before a step, and may write what it reads."""
    return bool(torch_optimizer._global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)


class Undo:
    """Copies of what a step changes, and the functions that restore it.

    Attributes:
        steps: Called last when everything is undone, in order; perhaps twice.
    """

    def __init__(self, scratch: torch.Tensor | None = None) -> None:
        """Keeps copies in ``scratch``; if that is full, in ordinary memory."""
        self._scratch = scratch
        self._used = 0
        # lists would be six more objects for the garbage collector; most have at most one element
        self._kept: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._entries: tuple[tuple[Any, ...], ...] = ()  # as _put_back takes them
        self._values: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._numbers: tuple[tuple[list[torch.Tensor], Iterable[Any]], ...] = ()
        self._dicts: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
        self.steps: list[Callable[[], Any]] = []

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors of one block, in the order of their offsets."""
        if not tensors:
            return
        whole = _run(tensors)
        copy = self._room(whole)
        _copy(copy, whole)
        self._kept = (*self._kept, (whole, copy))

    def keep_values(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors outside the tiers; a few numbers of one kind in one call."""
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        numbers = not any(map(_dim, tensors)) and all_are(map(_layout, tensors), torch.strided)
        kinds = {*zip(map(_dtype, tensors), map(_device, tensors), strict=True)}
        if numbers and len(kinds) == 1:  # as in most steps
            alike[kinds.pop()] = [*tensors]
        for tensor in () if alike else tensors:
            if tensor.dim() or tensor.layout is not torch.strided:
                self._values = (*self._values, (tensor, tensor.detach().clone()))
            else:
                alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (_, device), found in alike.items():
            here = device.type == "cpu"
            values = [*map(_item, found)] if here else torch.stack(found).detach()
            self._numbers = (*self._numbers, (found, values))

    def keep_at_home(
        self, tensors: Sequence[torch.Tensor], restore: Callable[[int, int], object]
    ) -> None:
        """Notes tensors of one block whose bytes are also at home.

        Args:
            tensors: Some, in any order.
            restore: Reads a range of the block's bytes again from there.
        """
        self.steps.append(partial(restore, *span_of(tensors)))

    def keep_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        owns: Sequence[torch.Tensor],
        shown: dict[Any, Any],
        params: Sequence[Any],
    ) -> None:
        """Notes a plain optimizer's state, and what a tiered one shows of it.

        Args:
            optimizer: The plain one.
            owns: The tensors that it steps.
            shown: The state that the tiered one shows.
            params: The parameters of that state, if there is any.
        """
        self.keep_entries(optimizer.state, owns)
        self.keep_shown(shown, params)
        self.keep_settings(optimizer)

    def keep_entries(self, state: dict[Any, Any], keys: Sequence[Any]) -> None:
        """Notes an optimizer's state of some parameters; its ordinary tensors are copied."""
        entries = states_of(state, keys)
        # a dictionary for each parameter would be as many objects for the garbage collector
        there = without_none(entries)
        values = [*chain.from_iterable(map(_values, there))]
        names = [*chain.from_iterable(there)]
        found = state, tuple(keys), entries, [*map(len, there)], names, values
        self._entries = (*self._entries, found)
        kinds = [*map(type, values)]
        ordinary = [*compress(values, map(is_, kinds, repeat(torch.Tensor)))]
        for value in values if set(kinds) - _KINDS else ():
            if type(value) not in _KINDS and isinstance(value, torch.Tensor):
                ordinary += [tensor for _, tensor in insides(value)]
        self.keep_values(ordinary)

    def entries(self) -> list[dict[Any, Any] | None]:
        """Returns copies of what :meth:`keep_entries` noted last, with the values at that time."""
        was: dict[int, torch.Tensor] = {id(value): copy.clone() for value, copy in self._values}
        for values, were in self._numbers:
            if isinstance(were, torch.Tensor):
                then = were.clone()
            else:
                then = torch.tensor([*were], dtype=values[0].dtype, device="cpu")
            was.update(zip(map(id, values), then.unbind(), strict=True))
        _, _, entries, lengths, names, values = self._entries[-1]
        sizes, pairs = iter(lengths), zip(names, values, strict=True)
        found: list[dict[Any, Any] | None] = []
        for entry in entries:
            before = None if entry is None else islice(pairs, next(sizes))
            found.append(None if before is None else {n: was.get(id(v), v) for n, v in before})
        return found

    def keep_shown(self, state: dict[Any, Any], keys: Sequence[Any]) -> None:
        """Notes for which parameters a tiered optimizer shows state at all."""
        new = [key for key in keys if key not in state]
        if new:
            self.steps.append(lambda: [state.pop(key, None) for key in new])

    def keep_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what a class keeps in its groups; its own attributes are not undone."""
        tensors: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            self._dicts = (*self._dicts, (group, dict(group)))
            tensors += [v for v in group.values() if isinstance(v, torch.Tensor)]
        self.keep_values(tensors)
        own = vars(optimizer)
        self.steps.append(lambda: [own.pop(name, None) for name in ("grad_scale", "found_inf")])

    def take_back(self) -> None:
        """Restores everything; if interrupted, it may be called again."""
        with torch.no_grad():
            for whole, copy in self._kept:
                _copy(whole, copy)
            for value, was in self._values:
                with _writable(value):
                    value.copy_(was)
            for values, were in self._numbers:
                if isinstance(were, torch.Tensor) and not any(map(_is_inference, values)):
                    torch._foreach_copy_(values, were.unbind())
                    continue
                for value, was in zip(values, were, strict=True):
                    with _writable(value):
                        value.fill_(was)
            for entries in self._entries:
                _put_back(*entries)
            for mapping, before in self._dicts:
                mapping.update(before)
                for key in [key for key in mapping if key not in before]:
                    del mapping[key]
            for step in self.steps:
                step()

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        nbytes = like.numel()
        if self._scratch is None or self._used + nbytes > self._scratch.numel():
            return torch.empty_like(like)
        room = self._scratch.narrow(0, self._used, nbytes)
        self._used += align_up(nbytes)
        return room


def _put_back(
    state: dict[Any, Any],
    keys: Sequence[Any],
    entries: Sequence[dict[Any, Any] | None],
    lengths: Sequence[int],
    names: Sequence[Any],
    values: Sequence[Any],
) -> None:
    """Restores an optimizer's state of some parameters.

    Args:
        state: All of the state.
        keys: The parameters.
        entries: The former entry of each; None for none.
        lengths: The number of names in each of the existing entries.
        names: All these names, concatenated.
        values: The values of the names.
    """
    sizes, befores = iter(lengths), zip(names, values, strict=True)
    for key, entry in zip(keys, entries, strict=True):
        if entry is None:
            state.pop(key, None)
            continue
        before = dict(islice(befores, next(sizes)))
        entry.clear()
        entry.update(before)
        state[key] = entry


def _writable(value: torch.Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which a tensor can be written; a user's may be an inference tensor."""
    return torch.inference_mode() if value.is_inference() else nullcontext()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.device.type == "cpu":
        host_copy(target, source)
    else:
        target.copy_(source)


def _run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes from the first tensor of a block to the last."""
    storage = tensors[0].untyped_storage()
    begin, end = span_of(tensors)
    with outside_inference():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage, begin, (end - begin,), (1,))


def span_of(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Returns the byte range in a storage that tensors of the storage cover."""
    begins = [int(t.storage_offset()) * t.itemsize for t in tensors]
    ends = [b + _extent(t) for b, t in zip(begins, tensors, strict=True)]
    return min(begins), max(ends)


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
