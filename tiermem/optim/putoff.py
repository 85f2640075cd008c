"""Steps that are deferred to the next use of their weights (``overlap``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tiermem.nn.compat.quiet import quiet, uncompiled
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.auto import AutoOverlap
from tiermem.optim.rounds import Round
from tiermem.optim.rules.groups import frozen_settings
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.runtime.transfers.deferred import Deferred


class PutOff:
    """Registers steps as deferred work of their blocks, performed before the blocks' next use.

    Attributes:
        failed: Whether one of the deferred steps failed when it was performed.
        deferred: The deferred steps, by the id of their unit.
    """

    def __init__(
        self,
        runtime: ModuleRuntime,
        owed: set[int],
        state: State,
        explain: Callable[[BaseException], None],
        auto: AutoOverlap | None = None,
    ) -> None:
        """Starts without deferred steps.

        Args:
            runtime: The modules' runtime.
            owed: Ids of the units whose step is deferred; kept up to date.
            state: The tiered optimizer's state, to be kept up to date.
            explain: Adds to an error how far the step has come.
            auto: Notified of the outcome of deferred steps; None for no notification.
        """
        self._runtime = runtime
        self._manager = runtime.manager
        self._owed = owed
        self._state = state
        self._explain = explain
        self._auto = auto
        self.deferred: dict[int, list[Deferred]] = {}
        self.failed = False

    def owe(self, units: Sequence[StepUnit], current: Round) -> list[StepUnit]:
        """Defers the step of every unit if possible, with present settings; returns the others."""
        settings = frozen_settings(current.groups)
        scaling = None if current.scaling is None else current.scaling.frozen()
        now = []
        pipeline = BlockSweep(self._manager)
        with self._manager.lock:
            for unit in units:
                for gradients in unit.grad_units():  # another optimizer may clear them
                    self._runtime.grads.pay(gradients)
                if unit.made is current.ticket:
                    continue  # it was deferred already, and has been performed
                if unit.group is None or not unit.can_wait(self._runtime):
                    now.append(unit)
                    continue
                unit.group.unpoint()
                blocks = [block.id for block in unit.blocks()]
                work = partial(self._pay, unit, settings, scaling, current.ticket, pipeline)
                debt = Deferred(unit.name, blocks, work)
                self.cancel(unit)
                unit.counted.ahead(unit, current.ticket)
                self.deferred[id(unit)] = [debt]
                self._manager.parts.deferred.add(debt)
                self._owed.add(id(unit))
        return now

    def cancel(self, unit: StepUnit) -> bool:
        """Cancels the deferred step of a unit: it is performed now, deferred again, or abandoned.

        Returns:
            Whether it was deferred.
        """
        found = self.deferred.get(id(unit), ())
        for debt in found:
            self._manager.parts.deferred.cancel(debt)
            self._owed.discard(id(unit))
        self.deferred.pop(id(unit), None)
        return bool(found)

    def _pay(
        self,
        unit: StepUnit,
        settings: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        ticket: object,
        pipeline: BlockSweep,
    ) -> None:
        """Performs a deferred step, from within any call."""
        began = time.perf_counter_ns()
        with quiet(self._manager.parts.device), pipeline.sweeping():
            step = uncompiled(type(unit).step)  # the call around it may be compiled
            try:
                step(unit, self._runtime, settings, self._state, scaling, ticket=ticket, owed=True)
            except BaseException as error:
                self._explain(error)
                self.failed = isinstance(error, Exception)
                if self._auto is not None:
                    self._auto.note_failure(error)
                raise
        self._owed.discard(id(unit))
        self.deferred.pop(id(unit), None)
        self.failed = self.failed and bool(self.deferred)
        if self._auto is not None:
            self._auto.paid()
        pipeline.write(unit.kept_blocks())
        self._manager.parts.timeline.add("optimizer", unit.name, began, time.perf_counter_ns())
