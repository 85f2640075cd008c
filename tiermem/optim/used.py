"""Gradients that steps inside backward have used, and accesses refused until ``step()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tiermem.errors import StepError
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, gone
from tiermem.optim.units.finality import accumulates, grad_of, is_own
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.transfers.deferred import Deferred

ELSE = "or make the optimizer with overlap='forward'"
TO_CLIP = "make the optimizer with overlap='auto', the default, or overlap='forward'"


class UsedGradients:
    """The gradients that steps inside backward have used, and the stand-ins that raise for them.

    Attributes:
        consumed: Ids of the parameters whose gradient was used since the last step.
        edited: Ids of the parameters whose gradient other code has written since it was final.
    """

    def __init__(self, runtime: ModuleRuntime, entries: Mapping[int, Entry]) -> None:
        """Starts with none.

        Args:
            runtime: The modules' runtime.
            entries: The optimizer's parameters, by id; kept up to date.
        """
        self._runtime = runtime
        self._entries = entries
        self._stand_ins: dict[int, LazyTensor] = {}
        self.consumed: set[int] = set()
        self.edited: set[int] = set()

    def is_gone(self, entry: Entry) -> bool:
        """Whether the gradient of a parameter was used and replaced by a stand-in that raises."""
        stand_in = self._stand_ins.get(id(entry.param))
        return stand_in is not None and grad_of(entry) is stand_in

    def consume(self, entries: Iterable[Entry]) -> None:
        """Notes that gradients are being used, and have to be kept until then (by the host)."""
        self.consumed.update(id(entry.param) for entry in entries)

    def spend(self, unit: StepUnit) -> None:
        """Replaces the gradients that a step has used by stand-ins that raise."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in unit.entries:
                param = id(entry.param)
                if not entry.has_grad and param not in self.consumed:
                    continue
                if param not in self._stand_ins:
                    self._stand_ins[param] = self._stand_in(entry)
                self.consumed.add(param)
                if entry.has_grad:
                    self._runtime.grads.clear(entry)
                entry.param.grad = self._stand_ins[param]

    def _stand_in(self, entry: Entry) -> LazyTensor:
        shape, formal = entry.param.shape, entry.param.dtype
        dtype, where = self._runtime.grads.homes.dtype_of(entry), self._runtime.manager.parts.device
        return gone(shape, dtype, where, partial(_gone, entry.name), formal)

    def zero(self) -> None:
        """Replaces these stand-ins by zeros, when gradients are set to zero."""
        for param, stand_in in self._stand_ins.items():
            entry = self._entries[param]
            if grad_of(entry) is stand_in:
                shape, dtype = entry.param.shape, entry.param.dtype
                device = self._runtime.manager.parts.device
                zeros = torch.zeros(shape, dtype=dtype, device=device)
                self._runtime.grads.store(entry, zeros)

    def after_step(self) -> None:
        """Starts again; stand-ins stay until gradients are cleared."""
        self.consumed.clear()
        self.edited.clear()

    def added_to(self) -> Entry | None:
        """Returns a parameter to whose used gradient the current backward adds, or None."""
        for param in (*self._stand_ins, *self.consumed):
            entry = self._entries[param]
            if (param in self.consumed or self.is_gone(entry)) and accumulates(entry):
                return entry
        return None

    def is_as_left(self, unit: StepUnit, entry: Entry) -> bool:
        """Whether a gradient is unchanged since the step of its unit."""
        if id(entry.param) not in self.consumed:
            return grad_of(entry) is None
        if unit.host is None:
            return self.is_gone(entry)
        return is_own(entry) and id(entry.param) not in self.edited  # it is kept, for the host

    def refuse_left(self) -> None:
        """Refuses a step with gradients that an earlier step has used.

        Raises:
            StepError: If there are any.
        """
        for param in self._stand_ins:
            entry = self._entries[param]
            if param not in self.consumed and self.is_gone(entry):
                _gone(entry.name)


class ClosedBlocks:
    """Blocks whose use calls a function, or is refused, until ``step()`` is called."""

    def __init__(self, manager: BlockManager) -> None:
        """Starts with none."""
        self._manager = manager
        self._deferred: list[Deferred] = []

    def watch(
        self, name: str, blocks: Sequence[int], work: Callable[[], None], *, first: bool = False
    ) -> None:
        """Calls a function before the next use of blocks.

        Args:
            name: For messages.
            blocks: Ids of the blocks.
            work: The function.
            first: Whether it is called before other deferred work.
        """
        debt = Deferred(name, blocks, work)
        with self._manager.lock:
            self._manager.parts.deferred.add(debt, first=first)
        self._deferred.append(debt)

    def refuse(self, group: Group, blocks: Sequence[int], *, first: bool = False) -> None:
        """Refuses access to blocks of a group that was stepped."""
        self.watch(group.block.name, blocks, partial(_refuse_look, group), first=first)

    def permit_access(self) -> None:
        """Permits access to all blocks again."""
        with self._manager.lock:
            for debt in self._deferred:
                self._manager.parts.deferred.cancel(debt)
            self._deferred.clear()


def _refuse_look(group: Group) -> None:
    raise StepError(
        f"block {group.block.name!r} was stepped inside backward (overlap='backward') and its "
        "weights, gradients or state are used again before optimizer.step(): call "
        f"optimizer.step() first, {ELSE}"
    )


def _gone(name: str, *_: object) -> Any:
    """Raises the error for access to a gradient that a step inside backward has used."""
    raise StepError(
        f"the gradient of parameter {name!r} was used up by a step inside backward "
        "(overlap='backward') and is kept nowhere; look at it with overlap='forward', or read it "
        "in a hook of the parameter (register_hook)"
    )
