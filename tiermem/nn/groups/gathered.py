"""Gradients of small parameters that stay in HBM: they are taken in together as a backward ends.

Two parameters in three are vectors (biases, norms' weights) with a thousandth of the bytes. Hooks
at each of them, and a copy as each one comes, take the host longer than those of all matrices. So
they have no hooks: torch accumulates their gradients as ordinary tensors, and one call takes in all
of them once nothing more comes.

Until then ``param.grad`` is what it is without tiermem, for hooks of users as well. Where that is
not enough, since there is a gradient to add to, or an optimizer steps inside backward, they get the
hooks that others have, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, groupby
from operator import attrgetter

import torch

from tiermem.core.alike import all_none, any_none
from tiermem.nn.groups.above import Backward, Passes
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.need import check_gradients
from tiermem.nn.tensors.lazy import LazyTensor

_grad, _unit, _has_grad = attrgetter("param.grad"), attrgetter("unit"), attrgetter("has_grad")


class GatheredGradients:
    """The gradients that wait, without hooks, for the end of the backward under way."""

    def __init__(
        self,
        runtime: Passes,
        backward: Backward,
        hook: Callable[[Entry], None],
        take_over: Callable[[Sequence[Entry]], None],
    ) -> None:
        """Gathers none yet.

        Args:
            runtime: Of the modules.
            backward: Accumulates them.
            hook: Has the gradients of a parameter taken in as they come, from now on.
            take_over: Takes the gradients of parameters of one unit into the tiers.
        """
        self._runtime, self._backward = runtime, backward
        self._hook, self._take_over = hook, take_over
        self._entries: list[Entry] = []
        self._under_way = False

    def add(self, entry: Entry) -> None:
        """Gathers the gradients of a parameter from the next backward on."""
        self._entries.append(entry)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Forgets parameters, which leave the tiers."""
        gone = {*map(id, entries)}
        self._entries = [entry for entry in self._entries if id(entry) not in gone]

    def begin_backward(self, *, left: bool) -> None:
        """Has all of them hooked where they are added to, or watched one by one.

        Args:
            left: Whether gradients that are new stay ordinary tensors.
        """
        self._under_way = False
        if not self._entries or (left and not self._any_stored()):
            return
        if self._suits():
            for unit in dict.fromkeys(map(_unit, self._entries)):
                self._runtime.grads.pay(unit)  # while param.grad is what it was
            self._under_way = not left
            return
        entries, self._entries = self._entries, []
        for entry in entries:
            if entry.param.requires_grad:
                self._hook(entry)
            else:  # it takes none while it is frozen
                self._entries.append(entry)

    def end_backward(self) -> None:
        """Takes in all that have come."""
        if not self._under_way:
            return
        self._under_way = False
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [*map(_grad, self._entries)]
            came = [type(g) is not LazyTensor and g is not None for g in gradients]
        del gradients  # references are counted
        found = [*compress(self._entries, came)]
        if any_none(map(_unit, found)):
            check_gradients(self._runtime)
        for _, entries in groupby(found, _unit):
            self._take_over([*entries])

    def cut_short(self) -> None:
        """Leaves what has come where it is, after an exception anywhere."""
        self._under_way = False

    # -- inside ----------------------------------------------------------

    def _any_stored(self) -> bool:
        """Whether any has a gradient in the tiers, or what stood for one."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(map(_has_grad, self._entries)) or any(
                type(gradient) is LazyTensor for gradient in map(_grad, self._entries)
            )

    def _suits(self) -> bool:
        """Whether nothing can tell, in the backward that begins, when gradients are taken in."""
        entries, backward = self._entries, self._backward
        if backward.reduced.active or any(w.looks_at_each for w in self._runtime.grads.watchers):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return all_none(map(_grad, entries)) and not any(map(_has_grad, entries))
