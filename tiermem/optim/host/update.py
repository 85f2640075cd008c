"""What a step on the host does in its thread: the optimizer's call on tensors in DRAM."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

import torch
from torch import nn

from tiermem.nn.compat.counters import sum_of_versions
from tiermem.nn.compat.shapes import follow
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.tensors.lazy import LazyTensor
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.optim.host.exact import Beside, ExactCalls
from tiermem.optim.host.job import Job
from tiermem.optim.host.proof import stand_in
from tiermem.optim.host.room import HostRoom
from tiermem.optim.rules.casts import cast
from tiermem.optim.rules.plainstep import run
from tiermem.optim.units.places import part_exchanged
from tiermem.optim.units.undo import Undo, cannot_fail_midway
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.manager import BlockManager


class HostUpdate:
    """Performs the steps of one unit on its lent tensors, in DRAM.

    Attributes:
        owns: The host's parameters by the ids of the model's; they have bytes during a step.
    """

    def __init__(self, unit: StepUnit) -> None:
        """Creates the parameters that a unit's plain optimizer works on."""
        self._unit = unit
        self.owns: dict[int, nn.Parameter] = {}
        self._away: dict[int, torch.Tensor] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        for param, _ in unit.members:
            dtype = unit.masters.dtype if unit.has_master(param) and unit.masters else param.dtype
            away = shared_placeholder(param.shape, dtype, torch.device("cpu"))
            self._away[id(param)] = away
            self.owns[id(param)] = nn.Parameter(away, param.requires_grad)

    def run(
        self,
        manager: BlockManager,
        optimizer: torch.optim.Optimizer,
        job: Job,
        room: HostRoom | None,
    ) -> None:
        """Performs a step completely, or leaves everything unchanged; its thread runs this.

        Args:
            manager: The manager of the blocks.
            optimizer: The plain one, over :attr:`owns`.
            job: The step.
            room: Has the memory for undoing it.
        """
        if job.computed:  # submitted twice: a Ctrl-C came just after the first time
            return
        if manager.parts.device.type == "cuda":
            torch.cuda.set_device(manager.parts.device)  # for the events
        try:
            if job.staged is not None:
                job.staged.bring(job.views)
            began = time.perf_counter_ns()
            for event in job.events:
                manager.parts.copy.wait(event)
            undo = Undo(None if room is None else room.scratch)
            with torch.no_grad():
                try:
                    job.written = self.update(optimizer, job, undo)
                except BaseException:
                    undo.take_back()
                    raise
                finally:
                    for number, own in self.owns.items():
                        own.grad = None
                        own.data = self._away[number]
        except BaseException:
            if job.staged is not None:
                job.staged.give_up()
            raise
        job.computed = True
        if job.staged is not None:
            job.staged.write_home(job.written)
        manager.parts.timeline.add("optimizer", self._unit.name, began, time.perf_counter_ns())

    def update(self, optimizer: torch.optim.Optimizer, job: Job, undo: Undo) -> set[int]:
        """Steps the lent tensors; returns the ids of the blocks that were changed."""
        unit = self._unit
        gradients = job.settled_gradients()
        weights = self._open(job)
        owns = [self.owns[id(param)] for param, _ in unit.members]
        found = [gradients.get(id(param)) for param, _ in unit.members]
        beside = self._give_gradients(job, owns, found, weights)
        seen = [u for u in job.gradients.units() if unit.sees(u)]
        counts = [sum_of_versions(job.views[u.block.id]) for u in seen]
        undo.keep_entries(optimizer.state, list(self.owns.values()))
        undo.keep_settings(optimizer)
        if not job.elsewhere and not cannot_fail_midway(optimizer):
            self._keep_for_undo(job, undo, seen)
        if job.gradients.scaling is not None:
            pairs = zip(owns, found, strict=True)
            fresh = [own for own, gradient in pairs if own.grad is not gradient]
            job.gradients.scaling.unscale(list(self.owns.values()), fresh)
        self._attach(optimizer, job)
        if job.proven is None:
            run(optimizer)
        else:
            calls = ExactCalls(job.proven, beside, job.targets())
            calls.step(optimizer, run)
            if job.elsewhere:
                self._go_there(optimizer, job, calls.written)
        self._keep(optimizer, job)
        for param, _ in unit.members if job.proven is None else ():
            own = self.owns[id(param)]
            if own.grad is not None and unit.has_master(param):
                weights[id(param)].copy_(own.data)
        if unit.masters is not None:
            unit.masters.made = True
        written = {block.id for block in [*unit.kept_blocks(), job.blocks[-1]]}
        for u, before in zip(seen, counts, strict=True):
            if unit.handed.spoils or sum_of_versions(job.views[u.block.id]) != before:
                written.add(u.block.id)
        return written

    def _give_gradients(
        self,
        job: Job,
        owns: Sequence[nn.Parameter],
        found: Sequence[torch.Tensor | None],
        weights: dict[int, torch.Tensor],
    ) -> dict[int, Beside]:
        """Gives gradients to the optimizer, or to the loop, which reads them as they are.

        Returns:
            Further tensors for the loop, by the address of the stepped tensor.
        """
        beside: dict[int, Beside] = {}
        if job.proven is None:
            for own, gradient in zip(owns, cast(found, [own.dtype for own in owns]), strict=True):
                own.grad = gradient
            return beside
        factor = job.gradients.factor
        for (param, _), own, given in zip(self._unit.members, owns, found, strict=True):
            own.grad = None if given is None else self._stand_in(own)
            target = weights[id(param)] if self._unit.has_master(param) else None
            beside[own.data_ptr()] = Beside(given, target, factor)
        return beside

    def _stand_in(self, own: nn.Parameter) -> torch.Tensor:
        """Returns a stand-in for a gradient that the loop gets directly; nobody writes it."""
        found = self._stand_ins.get(id(own))
        if found is None:
            found = self._stand_ins[id(own)] = stand_in(own)
        return found

    def _keep_for_undo(self, job: Job, undo: Undo, seen: Sequence[GradUnit]) -> None:
        """Copies what is about to be changed; a copy of what files have is not needed."""
        unit, masters = self._unit, self._unit.masters
        files = job.in_files()
        for block in unit.kept_blocks():
            if block.id not in files:
                undo.keep(job.views[block.id])
        alone = [e for e in unit.entries if masters is None or not unit.has_master(e.param)]
        undo.keep([job.views[e.group.block.id][e.index] for e in alone])
        for u in seen if unit.handed.spoils else ():
            if u.block.id not in files:  # another optimizer may be using others of the block
                mine = [entry for entry in unit.entries if entry.unit is u]
                undo.keep([job.views[u.block.id][entry.unit_index] for entry in mine])
        for loose in masters.loose() if masters is not None else ():
            undo.keep([loose])

    def _open(self, job: Job) -> dict[int, torch.Tensor]:
        """Points the host's parameters at their homes; returns the weights."""
        unit, masters = self._unit, self._unit.masters
        weights: dict[int, torch.Tensor] = {}
        for entry in unit.entries:
            weight = job.views[entry.group.block.id][entry.index]
            weights[id(entry.param)] = weight
            own = self.owns[id(entry.param)]
            if masters is None or not unit.has_master(entry.param):
                own.data = weight
                continue
            kept = None if masters.block is None else job.views.get(masters.block.id)
            own.data, fresh = masters.place_of(entry.param, kept, weight)
            if fresh:
                own.data.copy_(weight)
            elif job.follows:
                follow(own.data, weight)
        return weights

    def _attach(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        """Points the state at its home, if there is state already."""
        block = self._unit.block
        if block is None:
            return
        for place in self._unit.plain.places:
            own = optimizer.state.get(self.owns[id(place.param)])
            if own is not None and isinstance(own.get(place.key), LazyTensor):
                own[place.key] = place.over(job.views[block.id])

    def _go_there(
        self, optimizer: torch.optim.Optimizer, job: Job, written: Container[int]
    ) -> None:
        """Completes the results that are elsewhere, and makes them the unit's from now on."""
        job.bring_the_rest(written)
        block = self._unit.block
        for place in self._unit.plain.places if block is not None else ():
            own = optimizer.state.get(self.owns[id(place.param)], {})
            if block is not None and place.is_over(own.get(place.key), job.views[block.id]):
                own[place.key] = place.over(job.elsewhere[block.id])
        job.views.update(job.elsewhere)  # at once: what fails before is made again from the old

    def _keep(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        """Writes new state to its home."""
        block = self._unit.block
        if block is None:
            return
        job.renewed.clear()
        views, places = job.views[block.id], self._unit.plain.places
        states = [optimizer.state.get(self.owns[id(place.param)], {}) for place in places]
        part_exchanged(zip(states, places, strict=True), views)
        for own, place in zip(states, places, strict=True):
            value = own.get(place.key)
            if not isinstance(value, torch.Tensor) or place.is_over(value, views):
                continue
            if place.put(value, views):
                own[place.key] = place.over(views)
                job.renewed.add(place.first)
