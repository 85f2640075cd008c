"""Gradients as autograd accumulates them: announced, accumulated, taken into the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.weakly import Hook
from tiermem.nn.groups.above import Passes
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.groups.need import accumulates, check_gradients
from tiermem.nn.groups.newgrads import NewGradients
from tiermem.nn.tensors.lazy import LazyTensor, flush, is_shared
from tiermem.runtime.services.sweep import BlockSweep


class IncomingGradients:
    """Takes the gradients that autograd accumulates, and hands them to the store.

    Attributes:
        manager: Of the blocks that they go to.
        new: Those that were accumulated and are not in the tiers yet.
    """

    def __init__(self, runtime: Passes) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self.manager = runtime.manager
        self._store = runtime.grads
        self.new = NewGradients(self.manager.parts.device, self.take_over)
        self._arriving: GradUnit | None = None
        self._pipeline: BlockSweep | None = None
        self._unheard: dict[int, Entry] = {}  # whose gradients once came without being announced

    def track(self, entry: Entry) -> None:
        """Watches the gradients of a parameter from now on."""
        if entry.tracked or not entry.param.requires_grad:
            return
        entry.tracked = True
        entry.hooks += [
            entry.param.register_hook(Hook(self._before, entry)),
            entry.param.register_post_accumulate_grad_hook(Hook(self._after, entry)),
        ]
        with torch._C.DisableTorchFunctionSubclass():
            _come_first(entry)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Stops watching the gradients of parameters, which leave the tiers."""
        for entry in entries:
            while entry.hooks:
                entry.hooks.pop().remove()
            self._unheard.pop(id(entry.param), None)

    def begin_backward(self) -> None:
        """Prepares, as a backward begins, for hooks of users and gradients that come unannounced.

        torch 2.6 forgets the hooks of a parameter when Python code (a compiled block's backward,
        a ``torch.autograd.Function``) has looked at what was saved of it, under any pair of
        saved-tensor hooks; what runs after it was accumulated is still called.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for group in self._runtime.groups:
                for entry in group.entries:
                    if entry.tracked:
                        _come_last(entry)
        for entry in self._unheard.values():
            self._before(entry)

    def end_backward(self) -> None:
        """Called as a backward ends: nothing arrives any more."""
        self._store.restore()
        self._arrives(None)
        self._pipeline = None

    def forget_backward(self) -> None:
        """Forgets what is under way in a backward, which an exception has ended."""
        self._arriving = self._pipeline = None
        self._store.displaced = []

    def take_over(self, entries: Sequence[Entry]) -> None:
        """Takes ordinary gradients of parameters of one unit into the tiers, where that can be."""
        with torch._C.DisableTorchFunctionSubclass():
            stored = self._take_in(entries)
        for watcher in self._store.watchers if stored else ():
            watcher.arrived(stored)

    # -- inside ----------------------------------------------------------

    @inside
    def _before(self, entry: Entry, _gradient: torch.Tensor | None = None) -> None:
        """Runs before autograd accumulates: gets the lazy stand-in out of its way."""
        entry.announced = True
        if entry.materialized:
            return
        if entry.waits:
            self.new.take()
        self._runtime.backward.enter()
        if entry.unit is None and accumulates(entry):
            check_gradients(self._runtime)
        self._store.pay(entry.unit)  # while param.grad is what it was
        for watcher in self._store.watchers:
            if watcher.arriving(entry):
                return
        with torch._C.DisableTorchFunctionSubclass():
            self._make_way(entry)

    def _make_way(self, entry: Entry) -> None:
        if entry.displaced and entry.param.grad is None:
            return
        if self._runtime.backward.reduced.active:
            self._runtime.backward.reduced.make_ordinary(entry)
            return
        self._store.follow(entry)
        current = entry.param.grad
        if isinstance(current, LazyTensor):
            flush(current)
            entry.param.grad = None
            if entry.has_grad:
                entry.displaced = True
                self._store.displaced.append(entry)

    @inside
    def _after(self, entry: Entry, _param: torch.Tensor) -> None:
        """Runs after autograd has put a new gradient into ``param.grad``."""
        if not entry.announced:
            entry.unheard = True
            self._unheard[id(entry.param)] = entry
            for watcher in self._store.watchers:
                watcher.arriving(entry)
        entry.announced = False
        if self._runtime.backward.reduced.active:
            self._runtime.backward.reduced.arrived = True
        else:
            self.new.add(entry)

    def _take_in(self, entries: Sequence[Entry]) -> list[Entry]:
        """Stores new gradients of parameters of one unit; returns whose are in the tiers now."""
        found = [(e, gradient) for e in entries if (gradient := self._dense(e)) is not None]
        if not found:
            return []
        unit = found[0][0].unit
        self._store.add(found, in_a_row=unit is self._arriving)
        stored = [entry for entry, _ in found]
        if unit is not self._arriving and not stored[0].group.resident:  # else it stays in HBM
            self._arrives(unit)
        return stored

    def _dense(self, entry: Entry) -> torch.Tensor | None:
        """Returns a new gradient that the tiers can take; leaves any other where it is.

        One that a program has got hold of meanwhile is to stay the same tensor as ``param.grad``.
        """
        entry.displaced = False
        gradient = entry.param.grad
        if gradient is None or entry.materialized:
            return None
        if (
            gradient.layout is torch.strided
            and not gradient.requires_grad
            and gradient.dtype is entry.placeholder.dtype
        ):
            return None if is_shared(gradient) and not entry.has_grad else gradient
        if entry.has_grad:  # part of it was dense: let torch join the two
            joined = self._store.load(entry) + gradient
            self._store.clear(entry)
            entry.param.grad = joined
        return None

    def _arrives(self, unit: GradUnit | None) -> None:
        """Begins to write home the block filled before ``unit``, where its gradients are kept.

        Otherwise that would happen when its room is needed, and copies up would wait for it.
        """
        before, self._arriving = self._arriving, unit
        if before is None or not any(entry.has_grad for entry in before.entries):
            return
        if self._pipeline is None:
            self._pipeline = BlockSweep(self.manager)
        self._pipeline.write(before.blocks, gradients=True)


def _come_last(entry: Entry) -> None:
    """Puts the hook behind those of users: they are to see the gradient that is added to."""
    hooks: Any = entry.param._backward_hooks  # None where torch has forgotten them
    if hooks and len(hooks) > 1:
        key = entry.hooks[0].id
        if key in hooks and next(reversed(hooks)) != key:
            hooks[key] = hooks.pop(key)  # torch goes by the order of the dictionary itself


def _come_first(entry: Entry) -> None:
    """Puts the hook before those that users have added so far: they are to see the whole sum."""
    hooks: Any = entry.param._post_accumulate_grad_hooks
    others = [key for key in hooks if key != entry.hooks[1].id]
    for key in others:
        hooks[key] = hooks.pop(key)
