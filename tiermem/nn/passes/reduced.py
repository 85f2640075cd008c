"""Gradients if the model is inside a ``DistributedDataParallel``.

Its reducer, in C++, copies every gradient from ``param.grad`` as soon as it is accumulated, and the
mean over all processes back into it when backward ends. It cannot use stand-ins. So in a backward
with a reducer, gradients are ordinary tensors on the device, as for a resident model, and stay so
until they are cleared. They take memory outside the budgets, like the reducer's own buckets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tiermem.errors import CapacityError, StepError, WrapError
from tiermem.nn.passes.scopes import PassScope
from tiermem.nn.tensors.lazy import LazyTensor, flush, is_gone

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Entry
    from tiermem.nn.groups.group import Group
    from tiermem.nn.passes.runtime import ModuleRuntime

_NAME = DistributedDataParallel.__name__


class ReducedGradients:
    """Provides the reducer with ordinary gradients.

    Attributes:
        active: Whether gradients of the current or next backward are reduced.
        arrived: Whether any was accumulated since the forward (not by ``torch.autograd.grad``).
    """

    active = False
    arrived = False

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self._held: list[Group] = []
        self._inside: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()

    def hold_buffers(self, model: nn.Module) -> None:
        """Keeps the buffers of a model in HBM, as they are broadcast when a forward begins.

        Raises:
            CapacityError: If there is no room.
        """
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        ids = {id(tensor) for name, tensor in model.named_buffers() if name not in ignored}
        new: list[Group] = []
        for group in self._runtime.groups:
            if group in self._held or not any(id(b.tensor) in ids for b in group.buffers):
                continue
            try:
                group.hold()
            except CapacityError as error:
                self.let_go(new)
                raise CapacityError(
                    f"{_NAME} broadcasts the buffers of its module in every forward, so those in "
                    f"block {group.block.name!r} have to stay in HBM (broadcast_buffers=False "
                    f"leaves them to each process): {error}"
                ) from error
            new.append(group)
            self._held.append(group)
            group.manager.mark_dirty(group.block)  # torch does not count the broadcast's writes

    def holds(self, group: Group) -> bool:
        """Whether a group is held here, independent of calls of its module."""
        return group in self._held

    def let_go(self, groups: Iterable[Group]) -> None:
        """Ends the holds of groups that leave the tiers."""
        for group in groups:
            if group in self._held:
                self._held.remove(group)
                group.let_go(dirty=True)

    def begin_forward(self, scope: PassScope) -> None:
        """Called when a wrapped module is called; a backward may follow.

        Args:
            scope: The scope of the module.

        Raises:
            StepError: If an optimizer steps before gradients are reduced.
            WrapError: If the reducer works in a way that is not supported.
        """
        around: Any = DistributedDataParallel._active_ddp_module
        if around is None or not torch.is_grad_enabled() or not self._is_inside(scope, around):
            return
        if not around.require_backward_grad_sync:  # no_sync(): accumulated in this process only
            # unless the backward of a forward outside of no_sync() is still to come
            self.active = self.active and not self.arrived
            return
        self._check(around)
        self.active, self.arrived = True, False
        for group in self._runtime.groups:
            for entry in group.entries:
                if entry.tracked:
                    self.make_ordinary(entry)

    def _is_inside(self, scope: PassScope, around: nn.Module) -> bool:
        """Whether a module is a part of another one, and not only called in its forward."""
        if around not in self._inside:
            self._inside[around] = {id(module) for module in around.modules()}
        return id(scope.wrapped.model.get_submodule(scope.name)) in self._inside[around]

    def _check(self, around: Any) -> None:
        device = self._runtime.manager.parts.device
        if around.device != device:
            raise WrapError(
                f"{_NAME} was made while the model was on {around.device}, and its gradients are "
                f"on {device}: wrap first, {_NAME}(tier.wrap(model))"
            )
        if around.gradient_as_bucket_view:
            raise WrapError(
                f"{_NAME}(gradient_as_bucket_view=True) keeps gradients in buckets of its own, "
                "where they cannot go to the tiers; leave that option out"
            )
        if not all(watcher.revocable for watcher in self._runtime.backward.watchers):
            raise StepError(
                f"overlap='backward' makes steps before {_NAME} has reduced the gradients; use "
                "overlap='forward' or none"
            )

    def make_ordinary(self, entry: Entry) -> None:
        """Makes ``param.grad`` an ordinary tensor if it is a stand-in.

        Raises:
            StepError: If it is kept in another dtype, which the reducer cannot accumulate.
        """
        grads, param = self._runtime.grads, entry.param
        grads.sync(entry)
        current = param.grad
        if not isinstance(current, LazyTensor) or is_gone(current) or not entry.has_grad:
            return
        kept = grads.homes.dtype_of(entry)
        if kept is not param.dtype:
            raise StepError(
                f"the gradient of parameter {entry.name!r} is kept in {kept} "
                f"(grad_dtype=), in which {_NAME} cannot add to it; "
                "leave grad_dtype out, or make one backward per step"
            )
        flush(current)
        gradient = grads.load(entry)
        grads.clear(entry)
        param.grad = gradient

    def end_backward(self) -> None:
        """Moves gradients to the tiers if they are kept in other dtypes (``grad_dtype=``).

        Otherwise they stay ordinary tensors: there is room for them already, the step uses them in
        place, and the next backward would need them there.
        """
        if not self.active or self._runtime.grads.in_own_dtypes:
            return
        incoming = self._runtime.backward.incoming
        for group in self._runtime.groups:
            for entry in group.entries:
                if entry.tracked and not isinstance(entry.param.grad, LazyTensor):
                    incoming.take_over([entry])
