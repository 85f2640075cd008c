"""One unit of an optimizer step: some parameters of one block, their gradients and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tiermem.config import format_size
from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape
from tiermem.errors import CapacityError, StepError
from tiermem.nn.grads import Change, GradUnit
from tiermem.nn.group import Entry, Group
from tiermem.nn.lazy import LazyTensor, flush, forget, lazy, refresh
from tiermem.nn.runtime import ModuleRuntime
from tiermem.nn.shapes import shape_of
from tiermem.optim.probe import Make, StateProbe, settings_of
from tiermem.runtime.slots import Slot

State = dict[Any, Any]


class StepUnit:
    """What is stepped together.

    Attributes:
        name: For messages.
        members: Parameters and the number of their parameter group, in order.
        entries: The managed ones among them, in the same order; empty for ordinary parameters.
        group: The group of weights they are from, or None.
        block: The block of their state, or None.
        keys: For each tensor of that block, its parameter and the state's key.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[tuple[torch.Tensor, int]],
        entries: Sequence[Entry],
        make: Make,
    ) -> None:
        """Describes a unit; its state gets a home later."""
        self.name = name
        self.members = list(members)
        self.entries = list(entries)
        self.group: Group | None = entries[0].group if entries else None
        self.block: Block | None = None
        self.keys: list[tuple[torch.Tensor, str]] = []
        self._make = make
        self._optimizer: torch.optim.Optimizer | None = None
        self._numbers = list(dict.fromkeys(number for _, number in members))

    def blocks(self) -> list[Block]:
        """Returns the blocks that a step uses, in the order it does."""
        found = [self.group.block] if self.group is not None else []
        found += [unit.block for unit in self.grad_units()]
        if self.block is not None:
            found.append(self.block)
        return found

    def grad_units(self) -> list[GradUnit]:
        """Returns the blocks of gradients of these parameters; normally one."""
        units = [e.unit for e in self.entries if e.unit is not None]
        return list({id(unit): unit for unit in units}.values())

    def wanted(self, runtime: ModuleRuntime) -> bool:
        """Whether any parameter of it has a gradient."""
        for entry in self.entries:
            runtime.grads.sync(entry)
        return any(param.grad is not None for param, _ in self.members)

    # -- the step --------------------------------------------------------

    def step(self, runtime: ModuleRuntime, groups: Sequence[dict[str, Any]], state: State) -> None:
        """Steps the unit: everything it needs is brought up first, so it happens whole or not."""
        if self.group is not None and self.group.freed:
            raise StepError(
                f"{self.name!r}: the model was taken out of the tiers with tier.unwrap; make a new "
                "optimizer over it (this one's state_dict() can be loaded there)"
            )
        stored = [e for e in self.entries if e.has_grad and not e.materialized]
        optimizer = self._optimizer_for(groups)
        for entry in self.entries:
            runtime.grads.sync(entry)
        self._flush(optimizer)
        with self._held(runtime) as slots:
            slot = slots.get(id(self.block))
            try:
                for entry in stored:
                    unit = entry.unit
                    if unit is not None:
                        entry.param.grad = slots[id(unit.block)].views[entry.unit_index]
                self._attach(optimizer, slot)
                try:
                    optimizer.step()
                finally:
                    self._detach(runtime, optimizer, slot, state)
            finally:
                for entry in stored:
                    unit = entry.unit
                    if unit is not None:
                        refresh(entry.lazy, slots[id(unit.block)].views[entry.unit_index])
                    entry.param.grad = None
                    runtime.grads.expose(entry)

    @contextmanager
    def _held(self, runtime: ModuleRuntime) -> Iterator[dict[int, Slot]]:
        """Holds weights, gradients and state together; yields slots by the id of their block."""
        manager = runtime.manager
        units = [u for u in self.grad_units() if any(e.has_grad for e in u.entries)]
        blocks = [u.block for u in units] + ([self.block] if self.block is not None else [])
        stepped = False
        if self.group is not None:
            self.group.hold()
        try:
            slots = manager.acquire_all(blocks)
            try:
                for unit, slot in zip(units, slots, strict=False):
                    runtime.grads.settle(unit, slot)
                stepped = True
                yield {id(block): slot for block, slot in zip(blocks, slots, strict=True)}
            finally:
                # a class may write gradients too, and weights through `param.data`: nobody counts
                for block in blocks:
                    manager.release(block, dirty=stepped)
        finally:
            if self.group is not None:
                self.group.let_go(dirty=stepped)

    def _flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in what was written through views of the state."""
        for param, key in self.keys:
            flush(optimizer.state.get(param, {}).get(key))

    def _optimizer_for(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns the plain optimizer of this unit, with the settings of now."""
        if self._optimizer is None:
            with torch.enable_grad():
                self._optimizer = self._make(
                    [
                        {
                            **settings_of(groups[number]),
                            "params": [p for p, n in self.members if n == number],
                        }
                        for number in self._numbers
                    ]
                )
        for mine, number in zip(self._optimizer.param_groups, self._numbers, strict=True):
            mine.update(settings_of(groups[number]))
        return self._optimizer

    def _attach(self, optimizer: torch.optim.Optimizer, slot: Slot | None) -> None:
        """Points the state at its slot, where there is state already."""
        if slot is None:
            return
        for (param, key), view in zip(self.keys, slot.views, strict=True):
            own = optimizer.state.get(param)
            if own is not None and isinstance(own.get(key), LazyTensor):
                forget(own[key])
                own[key] = view

    def _detach(
        self,
        runtime: ModuleRuntime,
        optimizer: torch.optim.Optimizer,
        slot: Slot | None,
        state: State,
    ) -> None:
        """Takes what is new into the slot and leaves lazy stand-ins behind."""
        if slot is not None and self.block is not None:
            for index, (param, key) in enumerate(self.keys):
                own = optimizer.state.get(param)
                value = own.get(key) if own is not None else None
                view = slot.views[index]
                if (
                    own is None
                    or not isinstance(value, torch.Tensor)
                    or isinstance(value, LazyTensor)
                ):
                    continue
                if value.shape != view.shape or value.dtype is not view.dtype:
                    continue  # it became something else: it stays in ordinary memory
                if value is not view:
                    view.copy_(value)
                own[key] = self._lazy(runtime, index, view)
        for param, _ in self.members:
            if param in optimizer.state:
                state[param] = optimizer.state[param]

    def _lazy(self, runtime: ModuleRuntime, index: int, view: torch.Tensor) -> LazyTensor:
        return lazy(
            view.shape,
            view.dtype,
            view.device,
            partial(self._load, runtime, index),
            partial(self._store, runtime, index),
        )

    def _load(self, runtime: ModuleRuntime, index: int) -> torch.Tensor:
        if self.block is None:
            raise RuntimeError(f"{self.name}: no state")
        slot = runtime.manager.acquire(self.block)
        try:
            with torch.no_grad():
                return slot.views[index].clone()
        finally:
            runtime.manager.release(self.block)

    def _store(self, runtime: ModuleRuntime, index: int, value: torch.Tensor) -> None:
        if self.block is None:
            raise RuntimeError(f"{self.name}: no state")
        slot = runtime.manager.acquire(self.block)
        try:
            with torch.no_grad():
                slot.views[index].copy_(value)
        finally:
            runtime.manager.release(self.block, dirty=True)

    def begin(self, runtime: ModuleRuntime, groups: Sequence[dict[str, Any]], state: State) -> None:
        """Takes in the state that the class makes before any step."""
        with torch.no_grad(), self._held(runtime) as slots:
            optimizer = self._optimizer_for(groups)
            self._detach(runtime, optimizer, slots.get(id(self.block)), state)

    # -- gradients -------------------------------------------------------

    def zero_grad(self, runtime: ModuleRuntime, *, set_to_none: bool) -> None:
        """Forgets the gradients, or sets them to zero."""
        for entry in self.entries:
            runtime.grads.sync(entry)
        if not set_to_none:
            self.change(runtime, _zero)
            return
        for entry in self.entries:
            if entry.has_grad:
                entry.param.grad = None
                runtime.grads.clear(entry)
        for param, _ in self.members:
            param.grad = None

    def each_gradient(
        self, runtime: ModuleRuntime, use: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Calls ``use`` with every parameter that has a gradient, and the gradient."""
        for entry in self.entries:
            runtime.grads.sync(entry)
        for unit in self.grad_units():
            stored = [e for e in self.entries if e.has_grad and e.unit is unit]
            if not stored:
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
        """Has every gradient changed: ordinary ones now, stored ones when next in HBM."""
        for entry in self.entries:
            runtime.grads.sync(entry)
        for unit in self.grad_units():
            if any(e.has_grad for e in unit.entries):
                unit.pending.append(change)
        loose = [
            p.grad
            for p, _ in self.members
            if p.grad is not None and not isinstance(p.grad, LazyTensor)
        ]
        if loose:
            change(loose)

    # -- state in and out ------------------------------------------------

    def export(self, runtime: ModuleRuntime, state: State) -> Iterator[tuple[torch.Tensor, State]]:
        """Yields each parameter that has state, with copies of it in host memory."""
        present = [param for param, _ in self.members if state.get(param)]
        if not present:
            return
        tensors = runtime.manager.read(self.block) if self.block is not None else []
        stored = {(id(p), key): tensors[i] for i, (p, key) in enumerate(self.keys)}
        for param in present:
            values: State = {}
            for key, value in state[param].items():
                if isinstance(value, LazyTensor):
                    values[key] = stored[(id(param), key)].clone()
                elif isinstance(value, torch.Tensor):
                    values[key] = value.detach().clone()
                else:
                    values[key] = value
            yield param, values

    def import_state(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        state: State,
        loaded: dict[int, State],
    ) -> None:
        """Takes state over; ``loaded`` is by the id of the parameter and fits."""
        optimizer = self._optimizer_for(groups)
        with torch.no_grad():
            slot = runtime.manager.acquire(self.block) if self.block is not None else None
            try:
                for param, _ in self.members:
                    optimizer.state.pop(param, None)
                    state.pop(param, None)
                    if id(param) in loaded:
                        optimizer.state[param] = dict(loaded[id(param)])
                self._detach(runtime, optimizer, slot, state)
            finally:
                if self.block is not None:
                    runtime.manager.release(self.block, dirty=True)


def _zero(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def plan_units(
    runtime: ModuleRuntime,
    groups: Sequence[dict[str, Any]],
    first: int,
    probe: StateProbe,
    make: Make,
) -> list[StepUnit]:
    """Plans the units of parameter groups and reserves homes for gradients and state.

    Args:
        runtime: The modules' runtime.
        groups: The parameter groups.
        first: Number of the first of them.
        probe: Knows the state.
        make: Makes a plain optimizer.

    Raises:
        CapacityError: If a step or the state does not fit; nothing is reserved then.
    """
    number_of = {id(p): first + i for i, group in enumerate(groups) for p in group["params"]}
    runtime.grads.reserve(runtime.groups)
    units: list[StepUnit] = []
    seen: set[int] = set()
    by_unit: dict[int, list[Entry]] = {}
    for group in runtime.groups:
        for entry in group.entries:
            if id(entry.param) in number_of:
                seen.add(id(entry.param))
                by_unit.setdefault(id(entry.unit) if entry.unit else id(group), []).append(entry)
    for entries in by_unit.values():
        members = [(e.param, number_of[id(e.param)]) for e in entries]
        units.append(StepUnit(f"step[{entries[0].name}]", members, entries, make))
    rest = [
        (p, first + i)
        for i, group in enumerate(groups)
        for p in group["params"]
        if id(p) not in seen
    ]
    if rest:
        units.append(StepUnit("step[ordinary parameters]", rest, [], make))
    _reserve_state(runtime, units, groups, first, probe)
    return units


def _reserve_state(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    groups: Sequence[dict[str, Any]],
    first: int,
    probe: StateProbe,
) -> None:
    wanted: list[tuple[str, Role, Sequence[TensorShape]]] = []
    owners: list[tuple[StepUnit, list[tuple[torch.Tensor, str]]]] = []
    for unit in units:
        shapes: list[TensorShape] = []
        keys: list[tuple[torch.Tensor, str]] = []
        number_of = {id(param): number for param, number in unit.members}
        for entry in unit.entries:
            number = number_of[id(entry.param)]
            spec = entry.group.block.tensors[entry.index]
            settings = settings_of(groups[number - first])
            if not entry.param.requires_grad:
                continue
            for key, like in probe.state_of(entry.param, spec.stride, number, settings).items():
                shapes.append(shape_of(f"{entry.name}.{key}", like))
                keys.append((entry.param, key))
        if shapes:
            wanted.append((f"{unit.name}.state", Role.OPTIMIZER, shapes))
            owners.append((unit, keys))
    blocks = runtime.manager.add_blocks(wanted)
    for (unit, own), block in zip(owners, blocks, strict=True):
        unit.block, unit.keys = block, own
    try:
        _check_step(runtime, units)
    except CapacityError:
        runtime.manager.remove_blocks(blocks)
        raise


def _check_step(runtime: ModuleRuntime, units: Sequence[StepUnit]) -> None:
    """Refuses a device budget in which a step could not be made."""
    table = runtime.manager.table
    fixed = sum(r.block.nbytes for r in table if r.fixed)
    for unit in units:
        blocks = [b for b in unit.blocks() if not table[b.id].fixed]
        need = fixed + sum(b.nbytes for b in blocks)
        if need > table.hbm.capacity:
            raise CapacityError(
                f"an optimizer step of block {unit.name!r} takes {format_size(need)} in tier hbm: "
                f"weights, gradients and state together; the budget is "
                f"{format_size(table.hbm.capacity)}; give hbm= at least {need}"
            )
