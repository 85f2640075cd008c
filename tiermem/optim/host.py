"""Steps on the host: torch's own CPU optimizers over the homes in DRAM.

Gradient, state and masters stay where they are at home, and only the new weights go up, when
they are next used. A unit's step runs in a thread of its own, inside torch's kernels and so
without the GIL; whoever needs one of its blocks waits for it first.

The arithmetic is torch's on the CPU. It rounds differently from the same class on a device (fused
kernels, the order of operations); it is the same, bit for bit, as the class stepped on the CPU
with the same settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiermem.core.block import Block, Tier
from tiermem.errors import StepError
from tiermem.nn.grads import Change
from tiermem.nn.group import Entry
from tiermem.nn.lazy import LazyTensor, forget, refresh
from tiermem.nn.placeholder import placeholder
from tiermem.nn.runtime import ModuleRuntime
from tiermem.nn.shapes import follow
from tiermem.optim.probe import Make
from tiermem.optim.scaling import Scaling
from tiermem.optim.unit import State, StepUnit
from tiermem.transfer.copy import Event

_CPU = torch.device("cpu")


def with_fused(make: Make) -> Make:
    """Returns a maker of the same optimizer with torch's fused CPU kernel, where there is one.

    A user's own choice of ``foreach`` or ``fused`` stands.
    """

    def fused(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group in groups:
            if group.get("fused") is None and not group.get("foreach"):
                group["fused"] = True
        return make(groups)

    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    try:
        plain = make([{"params": [probe]}])
        settings = plain.param_groups[0]
        chosen = settings.get("foreach") is not None or settings.get("fused") is not None
        if chosen or "fused" not in settings:
            return make
        fused([{"params": [probe]}]).step()
    except Exception:  # no such kernel for these settings: the class decides itself
        return make
    return fused


def lives_in_dram(runtime: ModuleRuntime, unit: StepUnit) -> bool:
    """Whether everything that a unit's step uses has its home in DRAM."""
    table = runtime.manager.table
    return unit.group is not None and all(
        table[block.id].home is Tier.DRAM for block in unit.blocks()
    )


@dataclass(slots=True)
class Job:
    """One step of one unit on the host."""

    stored: list[Entry]
    gradients: dict[int, torch.Tensor]
    changes: list[Change]
    blocks: list[Block]
    views: dict[int, list[torch.Tensor]]
    events: list[Event]
    follows: bool
    scaling: Scaling | None
    future: Future[None] = field(init=False)

    def succeeded(self) -> bool:
        """Whether it is over, and well."""
        return self.future.done() and self.future.exception() is None

    def wait(self) -> None:
        """Waits until it is over, well or not."""
        self.future.exception()


class HostSide:
    """Steps one unit on the host."""

    def __init__(self, unit: StepUnit) -> None:
        """Gives a unit, whose blocks are all at home in DRAM, what its optimizer works on."""
        self.unit = unit
        self._own: dict[int, nn.Parameter] = {}
        for param, _ in unit.members:
            dtype = unit.masters.dtype if unit.has_master(param) and unit.masters else param.dtype
            away = placeholder(param.shape, dtype, _CPU)
            self._own[id(param)] = nn.Parameter(away, param.requires_grad)
        self._writes = -1

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the host's parameter for a model's."""
        return self._own[id(param)]

    # -- begun under the manager's lock ----------------------------------

    def check(self, runtime: ModuleRuntime) -> None:
        """Makes ready for a step, or says why there cannot be one.

        Raises:
            StepError: If somebody sees the weights in HBM, which have to leave it.
        """
        unit = self.unit
        if unit.group is not None and unit.group.freed:
            unit.refuse_freed()
        for entry in unit.entries:
            runtime.grads.sync(entry)
        unit.flush()
        taken = [e.name for e in unit.entries if e.materialized]
        taken = taken or [runtime.manager.lender.can_lend(self._blocks())]
        if taken[0]:
            raise StepError(
                f"{unit.name!r} is stepped on the host, and {taken[0]!r} is in use: let views of "
                "it go and leave tier.materialize before step(), or make the optimizer with "
                "where='device'"
            )

    def _blocks(self) -> list[Block]:
        """Returns what a step works on, the weights last."""
        unit = self.unit
        held = [u for u in unit.grad_units() if any(e.has_grad for e in u.entries)]
        weights = [unit.group.block] if unit.group is not None else []
        return [u.block for u in held] + unit.kept_blocks() + weights

    def submit(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        pool: ThreadPoolExecutor,
    ) -> Job:
        """Begins a step that :meth:`check` allows; :meth:`take_up` ends it."""
        unit, manager = self.unit, runtime.manager
        optimizer = unit.optimizer_for(groups)
        stored = [e for e in unit.entries if e.has_grad and not e.materialized]
        held = [u for u in unit.grad_units() if any(e.has_grad for e in u.entries)]
        blocks = self._blocks()
        loose = {
            id(p): p.grad.detach().to(_CPU)
            for p, _ in unit.members
            if p.grad is not None and not isinstance(p.grad, LazyTensor)
        }
        weights = manager.table[blocks[-1].id]
        follows = weights.writes != self._writes
        views, events = manager.lender.lend(blocks)
        self._writes = weights.writes
        changes = [change for u in held for change in u.pending]
        for u in held:
            u.pending.clear()
        job = Job(
            stored,
            loose,
            changes,
            blocks,
            {block.id: tensors for block, tensors in zip(blocks, views, strict=True)},
            events,
            follows,
            scaling,
        )
        job.future = pool.submit(self._work, runtime, optimizer, job)
        return job

    def take_up(self, runtime: ModuleRuntime, job: Job, state: State) -> None:
        """Waits for a step and has its blocks back.

        Raises:
            StepError: If it failed; its blocks are not used again.
        """
        unit = self.unit
        try:
            job.future.result()
        except Exception as error:
            raise StepError(
                f"the step of {unit.name!r} on the host failed with {type(error).__name__}: "
                f"{error}; its weights and state may be half made, load a checkpoint"
            ) from error
        optimizer = unit.optimizer_for(None)
        slot = job.views.get(unit.block.id) if unit.block is not None else None
        for index, (param, key) in enumerate(unit.keys):
            own = optimizer.state.get(self.own(param))
            if own is not None and slot is not None and own.get(key) is slot[index]:
                own[key] = unit.stand_in(runtime, index)
        unit.publish(optimizer, state)
        for entry in job.stored:
            if entry.unit is not None and job.changes:
                refresh(entry.lazy, job.views[entry.unit.block.id][entry.unit_index])
        runtime.manager.lender.give_back(job.blocks)
        for entry in job.stored:
            if entry.param.grad is not entry.lazy:
                runtime.grads.clear(entry)

    # -- in the thread ---------------------------------------------------

    def _work(self, runtime: ModuleRuntime, optimizer: torch.optim.Optimizer, job: Job) -> None:
        manager, unit = runtime.manager, self.unit
        began = time.perf_counter_ns()
        if manager.device.type == "cuda":
            torch.cuda.set_device(manager.device)  # for the events
        for event in job.events:
            manager.copy.wait(event)
        with torch.no_grad():
            gradients = dict(job.gradients)
            for entry in job.stored:
                if entry.unit is not None:
                    view = job.views[entry.unit.block.id][entry.unit_index]
                    gradients[id(entry.param)] = view
            stored = [gradients[id(entry.param)] for entry in job.stored]
            for change in job.changes:
                change(stored)
            weights = self._open(job)
            try:
                for param, _ in unit.members:
                    own, gradient = self._own[id(param)], gradients.get(id(param))
                    own.grad = None if gradient is None else gradient.to(own.dtype)
                if job.scaling is not None:
                    job.scaling.unscale(list(self._own.values()))
                self._attach(optimizer, job)
                optimizer.step()
                self._keep(optimizer, job)
                for param, _ in unit.members:
                    own = self._own[id(param)]
                    if own.grad is not None and unit.has_master(param):
                        weights[id(param)].copy_(own.data)
            finally:
                for param, _ in unit.members:
                    own = self._own[id(param)]
                    own.grad = None
                    own.data = placeholder(param.shape, own.dtype, _CPU)
        manager.timeline.add("optimizer", unit.name, began, time.perf_counter_ns())

    def _open(self, job: Job) -> dict[int, torch.Tensor]:
        """Points the host's parameters at their homes; returns the weights."""
        unit, masters = self.unit, self.unit.masters
        weights: dict[int, torch.Tensor] = {}
        for entry in unit.entries:
            weight = job.views[entry.group.block.id][entry.index]
            weights[id(entry.param)] = weight
            own = self._own[id(entry.param)]
            if masters is None or not unit.has_master(entry.param):
                own.data = weight
                continue
            kept = None if masters.block is None else job.views.get(masters.block.id)
            own.data, fresh = masters.place_of(entry.param, kept, weight)
            if fresh:
                own.data.copy_(weight)
            elif job.follows:
                follow(own.data, weight)
        if masters is not None:
            masters.made = True
        return weights

    def _attach(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        """Points the state at its home, where there is state already."""
        block = self.unit.block
        if block is None:
            return
        for (param, key), view in zip(self.unit.keys, job.views[block.id], strict=True):
            own = optimizer.state.get(self.own(param))
            if own is not None and isinstance(own.get(key), LazyTensor):
                forget(own[key])
                own[key] = view

    def _keep(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        """Writes state that is new to its home."""
        block = self.unit.block
        if block is None:
            return
        for (param, key), view in zip(self.unit.keys, job.views[block.id], strict=True):
            own = optimizer.state.get(self.own(param), {})
            value = own.get(key)
            if not isinstance(value, torch.Tensor) or value is view:
                continue
            if value.shape == view.shape and value.dtype is view.dtype:
                view.copy_(value)
                own[key] = view
