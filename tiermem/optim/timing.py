"""When the steps of one optimizer are performed (``overlap``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from tiermem.errors import ConfigError, StepError
from tiermem.optim.ahead import StepsAhead
from tiermem.optim.auto import AutoOverlap
from tiermem.optim.backward import InBackward
from tiermem.optim.hostpart import HostPart
from tiermem.optim.parts import OptimizerParts
from tiermem.optim.putoff import PutOff
from tiermem.optim.rounds import Round
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.rules.separable import settings_of
from tiermem.optim.units.gradients import wanted
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.services.sweep import BlockSweep

Overlap = bool | Literal["auto", "forward", "backward"]
_ELSEWHERE = (
    "another thread is at it (threads that train under one manager take turns: one lock around "
    "forward, backward and step()), or it was cut short between two lines"
)


def check_overlap(overlap: Overlap) -> None:
    """Checks the option ``overlap``.

    Raises:
        ConfigError: If it has no such value.
    """
    if overlap not in (False, True, "auto", "forward", "backward"):
        raise ConfigError(
            f"overlap={overlap!r}: it is 'auto', False, True, 'forward' or 'backward'"
        )


class StepTiming:
    """Performs the steps of one optimizer in ``step()``, in backward, or at the blocks' next use.

    Attributes:
        rounds: The unfinished call of ``step()``, if any.
        waits: Whether all steps are deferred to the next use of their block.
        auto: Chooses the deferred steps (``overlap="auto"``), else None.
        inside: Performs steps inside backward (``overlap="backward"``), else None.
        ahead: Performs them there provisionally (``overlap="auto"``), else None.
        put_off: The deferred steps.
    """

    def __init__(
        self,
        parts: OptimizerParts,
        host: HostPart,
        overlap: Overlap,
        take_in: Callable[[], None],
    ) -> None:
        """Watches backwards, if steps may be performed in them.

        Args:
            parts: The parts of the optimizer.
            host: The host's part.
            overlap: When steps are performed.
            take_in: Copies users' edits of the state.
        """
        runtime, tried, units = parts.runtime, parts.tried, parts.units
        self._runtime, self._tried, self._units = runtime, tried, units
        self._number = parts.number
        self._host = host
        self.rounds: list[Round] = []
        self.waits = overlap not in (False, "auto")
        self.auto = AutoOverlap(runtime, tried.cls) if overlap == "auto" else None
        self.inside = InBackward(runtime, take_in) if overlap == "backward" else None
        self.put_off = PutOff(runtime, units.owed, units.state, units.explain_deferred, self.auto)
        self.ahead: StepsAhead | None = None
        if self.auto is not None:
            args = self.auto, units.owed, self._is_begun, self._may_step_ahead
            self.ahead = StepsAhead(runtime, *args, host.as_movable(), tried.ignores_weights)

    def begin(self) -> None:
        """Begins to watch accesses to the state; no user has seen it yet."""
        if self.auto is not None:
            self.auto.begin(self._units.state, self.finish)

    def extend(self, planned: Sequence[StepUnit], groups: Sequence[dict[str, Any]]) -> None:
        """Adds new units; other optimizers leave their blocks to ``step()``.

        Args:
            planned: The new units.
            groups: All parameter groups.
        """
        self.tell_others(planned)
        args = planned, groups, self._units.state, self._host.steps
        if self.inside is not None:
            self.inside.extend(*args)
        if self.ahead is not None:
            self.ahead.extend(*args)

    def close(self) -> None:
        """Stops watching backwards."""
        if self.auto is not None:
            self.auto.close()
        if self.inside is not None:
            self.inside.close()
        if self.ahead is not None:
            self.ahead.close()

    @property
    def total(self) -> int:
        """How many units were stepped inside backward so far and confirmed by ``step()``."""
        if self.ahead is not None:
            return self.ahead.provisional.total
        return 0 if self.inside is None else self.inside.total

    @property
    def left(self) -> int:
        """How many times a unit's state was late so far."""
        return 0 if self.ahead is None else self.ahead.provisional.left

    @property
    def backwards(self) -> int:
        """How many backwards there were since the last step (for ``overlap="backward"``)."""
        return 0 if self.inside is None else self.inside.count

    @backwards.setter
    def backwards(self, count: int) -> None:
        if self.inside is not None:
            self.inside.count = count

    @property
    def has_made(self) -> bool:
        """Whether units were stepped inside backward and ``step()`` was not called yet."""
        return self.inside is not None and bool(self.inside.made)

    # -- a step ----------------------------------------------------------

    def before_step(self, scaling: Scaling | None) -> Scaling | None:
        """Checks steps made inside backward against what ``step()`` would make now.

        Args:
            scaling: What a GradScaler or a factor left to the step, or None.

        Returns:
            The same, or None where it is a factor of one and steps made ahead are confirmed.

        Raises:
            StepError: If they differ and cannot be dropped.
        """
        if self.inside is not None:
            self.inside.before_step(scaling)
        return scaling if self.ahead is None else self.ahead.before_step(scaling)

    def begin_round(
        self, groups: Sequence[dict[str, Any]], scaling: Scaling | None, loss: Any
    ) -> None:
        """Begins a step: collects the units that are not stepped yet.

        Args:
            groups: Settings of the parameter groups.
            scaling: The scale that a GradScaler left to the step, or None.
            loss: The result of the closure of ``step()``.
        """
        inside, ahead = self.inside, self.ahead
        units = wanted([unit for unit in self._units if self._is_left(unit)], self._runtime)
        self.tell_others(units)
        self._tried.counts.note(self._units, set() if inside is None else set(inside.made))
        ticket = object() if inside is None else inside.ticket
        if ahead is not None and ahead.provisional.whole:
            ticket = ahead.provisional.ticket
        units = [unit for unit in units if unit.made is not ticket]
        for unit in units:
            if unit.group is not None and unit.group.freed:
                unit.refuse_freed()  # before a step begins that could never be finished
        error = None if inside is None else inside.failure
        self.rounds.append(Round(ticket, units, groups, scaling, loss, error))

    def make(self, current: Round) -> None:
        """Performs the rest of a step, or defers it to the next use of the blocks."""
        self._confirm_ahead()
        if current.error is not None:
            error, current.error = current.error, None
            raise error
        if self.auto is not None:
            self._choose(self.auto, current)
        units = self._host.begin(current)
        waiting = [unit for unit in units if self._may_wait(unit)]
        if waiting:
            now = {id(unit) for unit in self.put_off.owe(waiting, current)}
            units = [u for u in units if id(u) in now or not self._may_wait(u)]
        self._step(units, current)
        self._finish_but_waiting(current)
        if self.auto is not None:
            self.auto.made(current.units, current.groups)
        if self.inside is not None:
            self.inside.after_step()
        if self.ahead is not None:
            self.ahead.prepare(may_begin=self._may_begin_ahead())

    def _step(self, units: Sequence[StepUnit], current: Round) -> None:
        """Steps units now."""
        manager = self._runtime.manager
        used = [unit.blocks() for unit in units]
        groups = [settings_of(group) for group in current.groups]
        guess = [block.id for blocks in used for block in blocks]
        began = time.perf_counter_ns()
        if units or not self._units.owed:
            manager.begin_pass(("optimizer", self._number), guess)
        pipeline = BlockSweep(manager)
        try:
            with torch.no_grad(), pipeline.sweeping():
                for number, (unit, blocks) in enumerate(zip(units, used, strict=True), 1):
                    ahead = units[number].begins_with(used[number]) if used[number:] else []
                    if id(unit) in self.put_off.deferred:
                        self.put_off.cancel(unit)
                    unit.step(
                        self._runtime,
                        groups,
                        self._units.state,
                        current.scaling,
                        ticket=current.ticket,
                        meanwhile=partial(pipeline.fetch, ahead),
                        write=pipeline.write,
                    )
                    pipeline.write([block for block in blocks if block not in ahead])
        except BaseException as error:
            left = [unit for unit in units if unit.made is not current.ticket]
            self._units.explain(error, [unit.name for unit in left])
            raise
        self._runtime.busy("optimizer", began)

    def catch_up(self) -> None:
        """Brings late state up to date."""
        if self.ahead is not None:
            self.ahead.late.catch_up()

    def finish(self) -> None:
        """Performs the rest of the last step, as an access to its blocks would."""
        unfinished, manager = self._unfinished(), self._runtime.manager
        with manager.lock:
            for unit in self._units if unfinished else ():
                if id(unit) in unfinished and unit.group is not None:
                    manager.parts.deferred.pay(unit.group.block.id)

    def _finish_but_waiting(self, current: Round) -> None:
        """Performs the rest of a step that must not be deferred: the host's, if not ahead."""
        owed, manager = self._units.owed, self._runtime.manager
        if self.waits or not owed:
            return
        with manager.lock:
            for unit in self._units:
                left = id(unit) in owed and unit.made is not current.ticket
                if left and unit.group is not None and not self._may_wait(unit):
                    manager.parts.deferred.pay(unit.group.block.id)

    def abandon(self) -> None:
        """Gives up the rest of an interrupted step.

        Raises:
            StorageError: If a block cannot be restored because its disk fails.
        """
        self._confirm_ahead()
        cut_short = self.rounds or self.put_off.failed  # else deferred steps can be performed
        with self._runtime.manager.lock, torch.no_grad():
            for unit in self._units:
                unit.abandon()
                if cut_short and self.put_off.cancel(unit):
                    unit.clear_forgotten(self._runtime)
            self.put_off.failed = False
            self._host.abandon()
        if self.inside is not None:
            self.inside.settle()
            self.inside.after_step()
        self.rounds.clear()

    # -- which units -----------------------------------------------------

    def tell_others(self, units: Sequence[StepUnit]) -> None:
        """Tells other optimizers not to step blocks inside backward that this one steps, too."""
        for other in self._runtime.backward.watchers:
            own = other is self.inside or other is self.ahead
            if isinstance(other, InBackward | StepsAhead) and not own:
                other.leave_to_others(units)

    def _is_begun(self, ticket: object) -> bool:
        """Whether a step with some ticket has begun, so that steps ahead for it count."""
        return any(current.ticket is ticket for current in self.rounds)

    def _may_step_ahead(self) -> bool:
        """Whether steps may be performed before ``step()`` is called."""
        return not self.rounds and self._may_begin_ahead()

    def _may_begin_ahead(self) -> bool:
        """Whether they may be, once no step is in progress."""
        if self.auto is None or self._runtime.backward.reduced.active:
            return False
        looked_into, draws = self._units.looked_into, self._tried.draws
        return self.auto.may_begin(looked_into=looked_into, draws=draws)

    def _is_left(self, unit: StepUnit) -> bool:
        """Whether no step inside backward has used the gradients of a unit."""
        inside = self.inside
        return inside is None or not (id(unit) in inside.made or unit.made is inside.ticket)

    def _choose(self, auto: AutoOverlap, current: Round) -> None:
        auto.choose(
            current.left(),
            current.groups,
            self._units.state,
            looked_into=self._units.looked_into,
            draws=self._tried.draws,
        )

    def _may_wait(self, unit: StepUnit) -> bool:
        """Whether a step may be deferred to the next use of its block."""
        return self.waits or (self.auto is not None and id(unit) in self.auto.waiting)

    def _unfinished(self) -> set[int]:
        """Returns the ids of units whose step is still deferred."""
        owed = self._units.owed
        return owed if self.inside is None else owed - self.inside.made.keys()

    # -- what comes in between -------------------------------------------

    def before_forward(self) -> None:
        """Drops steps ahead, and performs those that cannot be deferred into this forward."""
        self.drop_ahead()
        if self.auto is not None and self.auto.has_failed:
            self.finish()  # here, not in the middle of the forward, where it might have no room

    def finish_before(self, what: str, *, drop: bool = True) -> None:
        """Performs the rest of the last step, before a call that depends on it.

        Args:
            what: The call, for messages.
            drop: Whether steps ahead are dropped, and late state is brought up to date.

        Raises:
            StepError: If units were stepped inside backward and ``step()`` was not called yet.
        """
        self.refuse_if_made(what)
        if drop:
            self.drop_ahead()
            self.catch_up()
        self.finish()

    def refuse_clipping(self, what: str) -> None:
        """Refuses a call that needs all gradients, if steps are performed before that.

        Raises:
            StepError: If they are.
        """
        if self.inside is not None:
            self.inside.refuse_clipping(what)

    def refuse_if_made(self, what: str) -> None:
        """Refuses a call after units were stepped inside backward and before ``step()``.

        Raises:
            StepError: If there are such units.
        """
        if self.inside is not None:
            self.inside.refuse(what)

    def refuse_if_pending(self, what: str) -> None:
        """Refuses a call while a step is unfinished; if only its end is missing, ends it.

        Raises:
            StepError: If one is.
        """
        if not self.rounds:
            return
        current = self.rounds[-1]
        left = [unit for unit in current.left() if id(unit) not in self._units.owed]
        if left or current.error is not None:
            why = f"it was cut short by {current.failed}" if current.failed else _ELSEWHERE
            raise StepError(
                f"{what} while an optimizer step is unfinished: {why}, with {len(left)} of "
                f"{len(self._units)} units to go; call optimizer.step() again, it goes on where it "
                "stopped, or optimizer.abandon_step() to leave them unstepped"
            )
        self._confirm_ahead()
        if self.inside is not None:  # all is performed or deferred, only the end is missing
            self.inside.after_step()
        self.rounds.clear()

    def drop_ahead(self) -> None:
        """Drops the steps ahead."""
        if self.ahead is not None:
            self.ahead.settle()

    def _confirm_ahead(self) -> None:
        """Confirms the steps ahead of the step that has begun."""
        if self.ahead is not None:
            self.ahead.provisional.confirm()

    def before_clearing(self) -> None:
        """Drops the steps ahead, as their gradients will be cleared."""
        if self.ahead is not None:
            self.ahead.thrown_away()

    def after_clearing(self, *, set_to_none: bool) -> None:
        """Notes that gradients were cleared, or set to zero."""
        if self.inside is not None:
            self.inside.forgotten(set_to_none=set_to_none)

    def accumulate(self, micro_batches: int) -> None:
        """Sets how many backwards there are for each step (``overlap="backward"``).

        Raises:
            ConfigError: If it is not such a number.
            StepError: If blocks were stepped in backward and ``step()`` was not called yet.
        """
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
            raise ConfigError(f"accumulate() takes a number of backwards, not {micro_batches!r}")
        if micro_batches < 1:
            raise ConfigError(f"accumulate() takes at least 1 backward, not {micro_batches}")
        if self.inside is not None:
            self.inside.accumulate(micro_batches)
