"""Gradients as autograd accumulates them: announced, accumulated, taken into the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, gt, itemgetter
from sys import getrefcount
from typing import Any

import torch

from tiermem.core.alike import all_are, all_same, any_none, without_none
from tiermem.errors import REFUSALS
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.weakly import Hook
from tiermem.nn.groups.above import Backward, Passes
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.groups.need import accumulates, check_gradients, is_caught
from tiermem.nn.groups.newgrads import NewGradients
from tiermem.nn.tensors.lazy import (
    ALONE_IN_GRAD,
    ALONE_IN_GRAD_AND_LIST,
    LazyTensor,
    flush,
    is_shared,
)
from tiermem.runtime.services.sweep import BlockSweep

_first, _grad = itemgetter(0), attrgetter("param.grad")
_hooks = attrgetter("param._backward_hooks")
_has_grad, _displaced = attrgetter("has_grad"), attrgetter("displaced")
_shares, _materialized = attrgetter("shares"), attrgetter("materialized")
_layout, _requires_grad = attrgetter("layout"), attrgetter("requires_grad")
_dtype, _own_dtype = attrgetter("dtype"), attrgetter("placeholder.dtype")


class IncomingGradients:
    """Takes the gradients that autograd accumulates, and hands them to the store.

    Attributes:
        manager: The manager of their blocks.
        left: For how many forwards in a row they were left to torch, as ordinary tensors, since HBM
            has room for everything; 0 if they go to the tiers.
        new: Gradients that were accumulated and are not in the tiers yet.
        staying: The same for parameters that stay in HBM, whose gradients arrive between others.
    """

    def __init__(self, runtime: Passes, backward: Backward) -> None:
        """Serves ``runtime``.

        Args:
            runtime: The runtime of the modules.
            backward: The backward that accumulates them.
        """
        self._runtime = runtime
        self._backward = backward
        self.manager = runtime.manager
        self._store = runtime.grads
        self._owed = self.manager.parts.deferred.owed
        self.left = 0
        self.new = NewGradients(self.manager.parts.device, self.take_over)
        self.staying = NewGradients(self.manager.parts.device, self.take_over)
        self._arriving: GradUnit | None = None
        self._pipeline: BlockSweep | None = None
        self._unheard: dict[int, Entry] = {}  # parameters with gradients that came unannounced

    def track(self, entry: Entry) -> None:
        """Watches the gradients of a parameter from now on."""
        if entry.tracked or not entry.param.requires_grad:
            return
        entry.tracked = True
        entry.hooks += [
            entry.param.register_hook(_Before(self, entry)),
            entry.param.register_post_accumulate_grad_hook(_After(self, entry)),
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
        """Prepares, when a backward begins, for users' hooks and unannounced gradients.

        torch 2.6 loses the hooks of a parameter if Python code (a compiled block's backward, a
        ``torch.autograd.Function``) reads a saved tensor of it while saved-tensor hooks are active.
        Hooks that run after accumulation are still called.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for group in self._runtime.groups:
                counts = map(len, without_none([*map(_hooks, group.entries)]))
                several = any(map(gt, counts, repeat(1)))
                for entry in group.entries if several else ():
                    hooks: Any = entry.param._backward_hooks if entry.tracked else None
                    if hooks is not None and len(hooks) > 1:  # None where torch has forgotten them
                        _come_last(entry, hooks)
        for entry in self._unheard.values():
            self.announce(entry)

    def take_rest(self) -> None:
        """Takes all gradients that have arrived into the tiers: no more arrive."""
        self.new.end_backward()
        self.staying.end_backward()

    def forget_new(self) -> None:
        """Leaves waiting gradients as ordinary gradients, after an exception anywhere."""
        self.new.forget()
        self.staying.forget()

    def end_backward(self) -> None:
        """Called when a backward ends and all its gradients are in the tiers."""
        self._store.restore()
        self._arrives(None)
        self._pipeline = None

    def forget_backward(self) -> None:
        """Forgets the state of a backward that an exception has ended."""
        self._arriving = self._pipeline = None
        self._store.displaced = []

    def take_over(self, entries: Sequence[Entry]) -> None:
        """Takes ordinary gradients of parameters of one unit into the tiers, if possible."""
        with torch._C.DisableTorchFunctionSubclass():
            stored = self._take_in(entries)
        for watcher in self._store.watchers if stored else ():
            watcher.arrived(stored)

    @inside
    def announce(self, entry: Entry) -> None:
        """Prepares for a gradient that is about to be accumulated, or caught."""
        entry.announced = True
        if entry.materialized:
            return
        if entry.waits:
            self._waiting(entry).take()
        self._backward.enter()
        if entry.unit is None and accumulates(entry):
            check_gradients(self._runtime)
        self._store.pay(entry.unit)  # before param.grad changes
        for watcher in self._store.watchers:
            if watcher.listens and watcher.arriving(entry):
                return
        with torch._C.DisableTorchFunctionSubclass():
            self._make_way(entry)

    @inside
    def arrived(self, entry: Entry) -> None:
        """Handles a gradient that was accumulated, announced or not."""
        if not entry.announced:
            entry.unheard = True
            self._unheard[id(entry.param)] = entry
            for watcher in self._store.watchers:
                watcher.arriving(entry)
        entry.announced = False
        if self._backward.reduced.active:
            self._backward.reduced.arrived = True
        elif not self.left or entry.has_grad:
            self._waiting(entry).add(entry)

    # -- inside ----------------------------------------------------------

    def _waiting(self, entry: Entry) -> NewGradients:
        """Returns the waiting gradients to which a parameter's belongs."""
        return self.staying if entry.group.resident else self.new

    def _make_way(self, entry: Entry) -> None:
        if entry.displaced and entry.param.grad is None:
            return
        if self._backward.reduced.active:
            self._backward.reduced.make_ordinary(entry)
            return
        self._store.follow(entry)
        current = entry.param.grad
        if isinstance(current, LazyTensor):
            if is_caught(entry):  # other hooks may read it meanwhile
                return
            flush(current)
            entry.param.grad = None
            if entry.has_grad:
                entry.displaced = True
                self._store.displaced.append(entry)
        else:
            entry.shares = type(current) is torch.Tensor and is_shared(current)

    def _take_in(self, entries: Sequence[Entry]) -> list[Entry]:
        """Stores new gradients of parameters of one unit; returns whose were stored.

        A gradient to which the program has a reference has to stay ``param.grad``, and so does one
        that is a part of a buffer for all gradients.
        """
        gradients = _new_alone(entries)
        found = [] if gradients is None else [*zip(entries, gradients, strict=True)]
        del gradients  # as references are counted
        for entry in entries if not found else ():
            made_way, entry.displaced = entry.displaced, False
            shares, entry.shares = entry.shares, False
            gradient = entry.param.grad
            if gradient is None or entry.materialized:
                if made_way and entry.has_grad and not entry.materialized:
                    self._store.expose(entry)  # frozen after forward, so nothing was accumulated
                continue
            if (
                gradient.layout is not torch.strided
                or gradient.requires_grad
                or gradient.dtype is not entry.placeholder.dtype
            ):
                if entry.has_grad:
                    self._join(entry, gradient)
            elif entry.has_grad or not (shares or getrefcount(gradient) > ALONE_IN_GRAD):
                found.append((entry, gradient))
        if not found:
            return []
        unit = found[0][0].unit
        self._store.add(found, in_a_row=unit is self._arriving)
        stored = [*map(_first, found)]
        if unit is not self._arriving and not stored[0].group.resident:  # those stay in HBM
            self._arrives(unit)
        return stored

    def _join(self, entry: Entry, gradient: torch.Tensor) -> None:
        """Leaves a gradient that the tiers cannot store to torch, and adds what they have of it."""
        joined = self._store.load(entry) + gradient
        self._store.clear(entry)
        entry.param.grad = joined

    def _arrives(self, unit: GradUnit | None) -> None:
        """Begins to write home the previous unit's block, when gradients of ``unit`` arrive.

        Otherwise that would begin when its room is needed, and fetches would wait for it.
        """
        before, self._arriving = self._arriving, unit
        if before is None or not any(entry.has_grad for entry in before.entries):
            return
        if self._pipeline is None:
            self._pipeline = BlockSweep(self.manager)
        self._pipeline.write(before.blocks, gradients=True)


def _new_alone(entries: Sequence[Entry]) -> list[torch.Tensor] | None:
    """Returns the gradients of parameters, if each is new, and nobody has a reference to it.

    Args:
        entries: The parameters; torch functions of subclasses are off.
    """
    if any(map(_has_grad, entries)) or any(map(_displaced, entries)) or any(map(_shares, entries)):
        return None
    gradients = [*map(_grad, entries)]
    if any_none(gradients) or any(map(_materialized, entries)):
        return None
    if not all_are(map(_layout, gradients), torch.strided) or any(map(_requires_grad, gradients)):
        return None
    if not all_same(map(_dtype, gradients), map(_own_dtype, entries)):
        return None
    if any(map(gt, map(getrefcount, gradients), repeat(ALONE_IN_GRAD_AND_LIST))):
        return None
    return gradients


class _Before(Hook[IncomingGradients, Entry]):
    """Runs before autograd accumulates: removes the lazy stand-in from ``param.grad``.

    Mostly a backward has begun already, ``param.grad`` is None, and nothing has to be done. This is
    tested here, in line, as it is called for every parameter. A program may put a former stand-in,
    or another parameter's, into ``param.grad`` at any time.
    """

    __slots__ = ()

    def __call__(self, _gradient: torch.Tensor) -> None:
        """Announces a gradient."""
        incoming, entry = self._owner(), self._entry()
        if incoming is None or entry is None:
            return
        unit, backward = entry.unit, incoming._backward
        busy = (
            unit is None
            or entry.lazy is not None
            or entry.waits
            or entry.displaced
            or entry.materialized
            or not backward.under_way
            or backward.ending() is None
            or backward.reduced.active
            or unit.block.id in incoming._owed
        )
        for watcher in incoming._store.watchers:
            busy = busy or watcher.listens
        if not busy:
            with torch._C.DisableTorchFunctionSubclass():
                gradient = entry.param.grad
            busy = gradient is not None if not incoming.left else type(gradient) is LazyTensor
        if busy:
            incoming.announce(entry)
        else:
            entry.announced = True


class _After(Hook[IncomingGradients, Entry]):
    """Runs after autograd has put a new gradient into ``param.grad``."""

    __slots__ = ()

    def __call__(self, _param: torch.Tensor) -> None:
        """Handles the gradient."""
        incoming, entry = self._owner(), self._entry()
        if incoming is None or entry is None:
            return
        if not entry.announced or incoming._backward.reduced.active:
            incoming.arrived(entry)
            return
        try:
            entry.announced = False
            if not incoming.left or entry.has_grad:
                incoming._waiting(entry).add(entry)
        except REFUSALS:
            raise
        except BaseException as error:  # as the decorator ``inside`` does
            if OUTSIDE not in error.__dict__:
                incoming.manager.gate.torn = incoming.manager.gate.unsure = True
            raise


def _come_last(entry: Entry, hooks: Any) -> None:
    """Puts the hook behind those of users, which may need ``param.grad`` before accumulation.

    Args:
        entry: The parameter.
        hooks: All of its, in order.
    """
    key = entry.hooks[0].id
    if key in hooks and next(reversed(hooks)) != key:
        hooks[key] = hooks.pop(key)  # torch calls hooks in the order of the dictionary


def _come_first(entry: Entry) -> None:
    """Puts the hook before those that users have added so far, which need the whole sum."""
    hooks: Any = entry.param._post_accumulate_grad_hooks
    others = [key for key in hooks if key != entry.hooks[1].id]
    for key in others:
        hooks[key] = hooks.pop(key)
