"""The steps of one optimizer that are in progress on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tiermem.core.block import Block
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.host.job import Job
from tiermem.optim.host.side import HostSide, side_of
from tiermem.optim.host.team import team
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.transfers.deferred import Deferred

Explain = Callable[[BaseException, Sequence[str]], None]
"""Adds to an error the names of the units that were not stepped."""


@dataclass(frozen=True, slots=True, eq=False)
class StepAhead:
    """A step in progress on the host that was not requested yet.

    Attributes:
        steps: Handles it once it is confirmed.
        host: Performs it.
        job: The step.
        ticket: The ticket of the ``step()`` that confirms it.
    """

    steps: HostSteps
    host: HostSide
    job: Job
    ticket: object

    def failed(self) -> bool:
        """Whether it is known to have failed."""
        return self.job.failed()

    def confirm(self) -> None:
        """Makes it a requested step, once: its end is deferred work of its blocks."""
        self.steps.take_over(self)

    def take_back(self) -> None:
        """Ends it, performed or not, and gives its blocks back; it may be called again."""
        self.host.take_back(self.steps.runtime, self.job)


class HostSteps:
    """Begins steps on the host, registers their ends as deferred work, and completes them.

    Attributes:
        runtime: The modules' runtime.
    """

    def __init__(
        self,
        runtime: ModuleRuntime,
        number: int,
        owed: set[int],
        state: State,
        explain: Explain,
    ) -> None:
        """Creates a thread for the steps.

        Args:
            runtime: The modules' runtime.
            number: Number of the optimizer.
            owed: Ids of the units whose step is deferred; updated here.
            state: The tiered optimizer's state; updated here.
            explain: Adds to an error how far a step got.
        """
        self.runtime = runtime
        self._manager = runtime.manager
        self._owed = owed
        self._state = state
        self._explain = explain
        self._jobs: dict[int, tuple[StepUnit, Job]] = {}
        self._pool = team(f"tiermem-optimizer-{number}")
        self._manager.closers.append(self._pool.shutdown)

    def begin(
        self,
        units: Sequence[StepUnit],
        groups: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        ticket: object,
    ) -> None:
        """Begins the step of every unit that is assigned to the host.

        Args:
            units: Units, some of them the host's.
            groups: Settings of the parameter groups, which are not written from now on.
            scaling: What a GradScaler left to the step, or None.
            ticket: Identifies the requested step.

        Raises:
            StepError: If one cannot be stepped there now; then none is begun.
            StorageError: If a block that is only in HBM cannot be written; then none is begun.
        """
        hosts = [host for host in map(side_of, units) if host is not None]
        if scaling is not None:
            scaling = scaling.on_host()
        with self._manager.lock, unrecorded():
            self.settle_others([host.unit for host in hosts])
            self._prepare(hosts)
            waiting: tuple[HostSide, Job] | None = None
            try:
                for host in hosts:
                    host.unit.counted.ahead(host.unit, ticket)
                    register = partial(self._register, host, ticket)
                    job = host.submit(self.runtime, groups, scaling, register)
                    # the next one is known first: weights that both step are written home once
                    job.announce()
                    before, waiting = waiting, (host, job)
                    if before is not None:
                        before[0].begin(self.runtime, before[1], self._pool)
            finally:
                if waiting is not None:
                    waiting[0].begin(self.runtime, waiting[1], self._pool)
            for host in hosts:
                if host.unit.is_viewed():  # reads through a view do not wait for the step
                    self._manager.parts.deferred.pay(host.unit.blocks()[-1].id)

    def settle_others(self, units: Sequence[StepUnit]) -> None:
        """Performs the steps of other optimizers that come before those of the host's units.

        Each optimizer has its own thread, so otherwise two could step a parameter at the same time.

        Args:
            units: The host's; after this the changes that their gradients await are known.
        """
        deferred = self._manager.parts.deferred
        with self._manager.lock, unrecorded():
            for unit in units:
                writes = frozenset(unit.ids())
                for block in unit.blocks():
                    deferred.pay_before_loan(block.id, writes)

    def _prepare(self, hosts: Sequence[HostSide]) -> None:
        """Checks that units can be stepped on the host, and settles what has to be written first.

        Raises:
            StepError: If one cannot be stepped there now.
            StorageError: If a block that is only in HBM cannot be written.
        """
        for host in hosts:  # weights in files may be in the staging of another optimizer
            for block in host.in_files(self.runtime):
                self._manager.parts.deferred.pay(block.id)
        for host in hosts:
            host.prepare(self.runtime)
        for host in hosts:
            host.settle(self.runtime)
        rounding = [host.unit for host in hosts if not host.only_exact]
        changed = any(u.pending for unit in rounding for u in unit.grad_units())
        device = self._manager.parts.device
        if changed and device.type == "cuda":  # the host reads their factors
            torch.cuda.current_stream(device).synchronize()

    def begin_ahead(
        self,
        units: Sequence[StepUnit],
        groups: Sequence[dict[str, Any]],
        ticket: object,
        note: Callable[[StepAhead], None],
        turn: Callable[[Sequence[Block]], None],
    ) -> None:
        """Begins the steps of all units of a block before they are requested.

        Args:
            units: Units for which :meth:`HostSide.may_be_ahead` is true; the manager's lock is
                held.
            groups: Settings of the parameter groups, which are not written from now on.
            ticket: The ticket of the ``step()`` that confirms them.
            note: Called with each step as soon as its blocks are lent, so that they are given back;
                perhaps twice.
            turn: Gives lent blocks the homes that the steps write.
        """
        hosts = [host for host in map(side_of, units) if host is not None]
        jobs: list[tuple[HostSide, Job]] = []
        with unrecorded():
            for host in hosts:
                register = partial(self._note, host, ticket, note)
                jobs.append((host, host.submit(self.runtime, groups, None, register)))
            turn([jobs[0][1].blocks[-1], *(b for unit in units for b in unit.kept_blocks())])
            theirs = {entry.index for unit in units for entry in unit.entries}
            spare = set(range(len(jobs[0][1].blocks[-1].tensors))) - theirs
            for host, job in jobs:
                host.turn(self.runtime, job, spare)
                spare = set()
            for host, job in jobs:
                host.begin(self.runtime, job, self._pool)

    def _note(
        self, host: HostSide, ticket: object, note: Callable[[StepAhead], None], job: Job
    ) -> None:
        note(StepAhead(self, host, job, ticket))

    def take_over(self, step: StepAhead) -> None:
        """Registers the end of a step that was begun ahead and is requested now."""
        known = self._jobs.get(id(step.host.unit))
        if not step.job.returned and (known is None or known[1] is not step.job):
            self._register(step.host, step.ticket, step.job)

    def _register(self, host: HostSide, ticket: object, job: Job) -> None:
        """Registers the end of a step as deferred work of its blocks; may be called twice."""
        self._owed.add(id(host.unit))
        blocks = [block.id for block in job.blocks]
        work = partial(self._take_up, host, job, ticket)
        entries = () if host.unit.group is None else host.unit.group.entries
        brought = [id(entry.param) for entry in entries if entry.index in job.spare]
        writes = frozenset([*host.unit.ids(), *brought])
        debt = Deferred(host.unit.name, blocks, work, job, writes)
        self._manager.parts.deferred.add(debt)
        self._jobs[id(host.unit)] = (host.unit, job)  # last: it marks the job as registered

    def abandon(self) -> None:
        """Gives up steps that failed; the others are waited for and completed."""
        for unit, job in list(self._jobs.values()):
            job.wait()
            host = side_of(unit)
            if host is None:
                continue
            if job.computed:
                self._manager.parts.deferred.pay(job.blocks[-1].id)
            else:
                for debt in self._manager.parts.deferred.that_take_up(job):
                    self._manager.parts.deferred.cancel(debt)
                host.give_up(self.runtime, job)
                self._owed.discard(id(unit))
                self._jobs.pop(id(unit), None)

    def close(self) -> None:
        """Ends the thread; no step is in progress."""
        self._pool.shutdown()
        self._manager.closers.remove(self._pool.shutdown)

    def can_begin(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the step of a unit can be begun now, without waiting for a disk.

        Args:
            unit: The unit.
            groups: Settings of the parameter groups.
        """
        host = side_of(unit)
        if host is None or not host.at_rest(self.runtime):
            return False
        return not host.only_exact or host.is_exact(self.runtime, groups)

    def is_begun(self, unit: StepUnit) -> bool:
        """Whether a step of a unit was begun and is still to be completed."""
        return id(unit) in self._jobs

    def retry(self) -> None:
        """Begins failed steps again; an access to their blocks waits for that."""
        with self._manager.lock:
            for unit, job in self._jobs.values():
                host = side_of(unit)
                if host is not None and job.failed():
                    host.begin(self.runtime, job, self._pool)

    def _take_up(self, host: HostSide, job: Job, ticket: object) -> None:
        self._manager.gate.guard()
        if self._jobs.get(id(host.unit), (None, None))[1] is not job:
            return  # it is completed already
        try:
            with outside_inference(), torch.no_grad():
                host.take_up(self.runtime, job, self._state, self._pool)
        except Exception as error:
            for _, other in self._jobs.values():
                other.report()
            left = [u.name for u, j in self._jobs.values() if j is job or not j.computed]
            self._explain(error, left)
            raise
        host.unit.made = ticket
        self._owed.discard(id(host.unit))
        self._jobs.pop(id(host.unit), None)
