"""The gradients of one unit: cleared, read and changed."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch

from tiermem.core.alike import all_are, set_all, without_none
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.grads import is_stored_alone
from tiermem.nn.groups.gradunit import Change, GradUnit
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, ensure_there, is_viewed

Unit = TypeVar("Unit", bound="UnitGradients")

_first, _grad, _unit = itemgetter(0), attrgetter("grad"), attrgetter("unit")
_has_grad, _gone = attrgetter("has_grad"), attrgetter("_gone")


class UnitGradients:
    """Gradients of some parameters of one block.

    Attributes:
        members: Parameters and the number of their parameter group, in order.
        entries: The managed ones among them, in the same order; empty for ordinary parameters.
    """

    members: list[tuple[torch.Tensor, int]]
    entries: list[Entry]

    def grad_units(self) -> list[GradUnit]:
        """Returns the blocks of gradients of these parameters; normally one."""
        return without_none([*dict.fromkeys(map(_unit, self.entries))])

    def entries_in(self, unit: GradUnit) -> list[Entry]:
        """Returns those of its parameters that have their gradients in a block."""
        return [entry for entry in self.entries if entry.unit is unit]

    def has_own_gradients(self) -> bool:
        """Whether the managed gradients are those in the tiers, without views of them."""
        with torch._C.DisableTorchFunctionSubclass():
            if is_stored_alone(self.entries):
                return True
            for entry in self.entries:
                stand_in: Any = entry.lazy if entry.has_grad else None
                if stand_in is not None and stand_in._kept is not None:  # is_viewed in line
                    return False
                if entry.param.grad is not stand_in:
                    return False
        return True

    def sync(self, runtime: ModuleRuntime) -> None:
        """Updates the tiers after users' changes of the gradients."""
        runtime.grads.sync_all(self.entries)

    def clear_forgotten(self, runtime: ModuleRuntime) -> None:
        """Clears gradients that users cleared or replaced while a step was deferred."""
        for entry in self.entries:
            stored = entry.has_grad and not entry.materialized
            if stored and entry.param.grad is not entry.lazy:
                runtime.grads.clear(entry)

    def zero_grad(self, runtime: ModuleRuntime, *, set_to_none: bool) -> None:
        """Clears the gradients, or sets them to zero."""
        self.sync(runtime)
        if not set_to_none:
            self.change(runtime, _zero)
            return
        with torch._C.DisableTorchFunctionSubclass():  # once, not for every parameter
            set_all(map(_first, self.members), "grad", None)
        grads, there = runtime.grads, [*compress(self.entries, map(_has_grad, self.entries))]
        owed = {unit for unit in self.grad_units() if grads.owed(unit)} if there else ()
        if owed:  # these are cleared once they have been used
            there = [entry for entry in there if entry.unit not in owed]
        grads.clear(*there)

    def each_gradient(
        self,
        runtime: ModuleRuntime,
        use: Callable[[torch.Tensor, torch.Tensor], None],
        but: Container[int] = (),
    ) -> None:
        """Calls ``use`` with every parameter that has a gradient, and the gradient.

        Args:
            runtime: The modules' runtime.
            use: The function; it writes nothing.
            but: Ids of entries to skip.
        """
        self.sync(runtime)
        for unit in self.grad_units():
            stored = [e for e in self.entries if e.has_grad and e.unit is unit and id(e) not in but]
            if not stored:
                continue
            if unit.runs:
                (entry,) = stored
                use(entry.param, runtime.grads.load(entry, runtime.grads.homes.dtype_of(entry)))
                continue
            slot = runtime.grads.open(unit)
            try:
                for entry in stored:
                    use(entry.param, slot.views[entry.unit_index])
            finally:
                runtime.manager.release(unit.block)
        for param, _ in self.members:
            if param.grad is not None and not isinstance(param.grad, LazyTensor):
                use(param, param.grad)

    def change(self, runtime: ModuleRuntime, change: Change) -> None:
        """Applies a change to every gradient: stored ones when they are next in HBM, others now.

        One that has a view is changed now as well: the view must show the change, and its
        contents are used when the gradient is next accessed.
        """
        self.change_stored(runtime, change)
        loose = self.loose()
        if loose:
            change(loose)

    def change_stored(self, runtime: ModuleRuntime, change: Change) -> None:
        """Does what :meth:`change` does, except for ordinary gradients."""
        self.sync(runtime)
        for unit in self.grad_units():
            entries = self.entries_in(unit)
            if any(e.has_grad for e in entries):
                runtime.grads.pay(unit)
                unit.await_change(entries, change)
                if any(is_viewed(e.lazy) for e in entries):
                    runtime.grads.settle_now(unit)

    def loose(self) -> list[torch.Tensor]:
        """Returns the gradients that are ordinary tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [*map(_grad, map(_first, self.members))]
            if all_are(map(type, found), LazyTensor):
                return []
        return [g for g in found if g is not None and not isinstance(g, LazyTensor)]

    def unchange(self, change: Change) -> None:
        """Undoes a change that stored gradients still await."""
        for unit in self.grad_units():
            unit.forget_change(change)


def wanted(units: Sequence[Unit], runtime: ModuleRuntime) -> list[Unit]:
    """Returns the units of which any parameter has a gradient.

    Args:
        units: Units of an optimizer.
        runtime: The modules' runtime.

    Raises:
        StepError: If one was used up by another optimizer's step.
    """
    runtime.grads.sync_all([*chain.from_iterable([unit.entries for unit in units])])
    found = []
    with torch._C.DisableTorchFunctionSubclass():
        for unit in units:
            gradients = without_none([*map(_grad, map(_first, unit.members))])
            if all_are(map(type, gradients), LazyTensor) and not any(map(_gone, gradients)):
                found += [unit] if gradients else []
                continue
            for gradient in gradients:
                if isinstance(gradient, LazyTensor) and gradient._gone:
                    ensure_there(gradient)
            if gradients:
                found.append(unit)
    return found


def _zero(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()
