"""Steps inside backward: each block as soon as its gradient is final (``overlap="backward"``).

A gradient is final once autograd has executed the node that accumulates it, in the last backward
before ``step()``. Then its block of weights and the gradient are in HBM, and nothing has to leave:
state and masters are fetched, the step is performed, and the gradient is dropped. If the host steps
the block, the gradient is written home, and the host's thread begins.

A step inside backward must not differ from one by ``optimizer.step()``. So until
``optimizer.step()`` is called, access to the block's weights, state or masters is refused (by
deferred work that raises), and so is every call that would have used the gradient. The first two
steps are performed after backward, and backward is only watched, until one round of the loop has
been seen: a loop that clips, scales, changes settings in between, discards gradients or uses
weights again after their gradients is refused, or handled differently, before any wrong step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tiermem.errors import CapacityError, StepError, StorageError
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.quiet import quiet, uncompiled
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.host.steps import HostSteps
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.stepping import FirstSteps, SteppedBackward
from tiermem.optim.units.finality import accumulates, grad_of, is_nested, is_own
from tiermem.optim.units.unit import State, StepUnit
from tiermem.optim.used import ELSE, TO_CLIP, ClosedBlocks, UsedGradients


class InBackward:
    """Performs the steps of one optimizer inside backward.

    Attributes:
        revocable: Whether its steps can be undone.
        made: Units stepped since the last ``step()``, or begun on the host, by id.
        total: How many units were stepped inside backward so far.
        ticket: Given to every unit that is stepped for the same ``step()``.
        failure: The error that the class raised in a step, to be raised by ``step()``, or None.
        count: How many backwards there were since the last step.
    """

    revocable = False
    listens = True

    def __init__(self, runtime: ModuleRuntime, take_in: Callable[[], None]) -> None:
        """Watches the backwards of ``runtime``; ``take_in`` copies users' edits of the state."""
        self._take_in = take_in
        self.made: dict[int, StepUnit] = {}
        self.total = 0
        self.ticket = object()
        self.failure: Exception | None = None
        self._runtime = runtime
        self._micro_batches = 1
        self.count = 0
        self._backward = SteppedBackward(runtime)
        self._first_steps = FirstSteps()
        self._used = UsedGradients(runtime, self._backward.entries)
        self._closed = ClosedBlocks(runtime.manager)
        self._state: State = {}
        self._host: HostSteps | None = None
        self._late: set[int] = set()  # ids of groups that are left to step()
        runtime.backward.watchers.append(self)
        runtime.grads.watchers.append(self)

    def extend(
        self,
        units: Iterable[StepUnit],
        groups: Sequence[dict[str, Any]],
        state: State,
        host: HostSteps | None = None,
    ) -> None:
        """Adds units; the next steps are watched, and performed after backward.

        Args:
            units: The new units.
            groups: All parameter groups, with the settings that a step uses.
            state: The tiered optimizer's state, to be kept up to date.
            host: Performs the steps on the host, if there are any.
        """
        self._state, self._host = state, host
        self._first_steps.restart()
        self._backward.extend(units, groups)

    def close(self) -> None:
        """Stops watching backwards."""
        self._runtime.backward.watchers.remove(self)
        self._runtime.grads.watchers.remove(self)

    def leave_to_others(self, units: Iterable[StepUnit]) -> None:
        """Leaves blocks to ``step()`` from now on, as another optimizer steps them, too."""
        self._late.update(id(unit.group) for unit in units)

    # -- what the user calls ---------------------------------------------

    def accumulate(self, micro_batches: int) -> None:
        """Sets the number of backwards after which gradients are final.

        Raises:
            StepError: If blocks have been stepped already.
        """
        self.refuse("accumulate()")
        self._micro_batches = micro_batches

    def refuse(self, what: str) -> None:
        """Refuses a call between a backward that stepped blocks and ``step()``.

        Raises:
            StepError: If blocks were stepped.
        """
        self._account()
        if self.made:
            raise StepError(
                f"{what} between backward and optimizer.step(): {len(self.made)} units are "
                "stepped already (overlap='backward'), and their gradients are gone; call "
                f"optimizer.step() first, {ELSE}"
            )

    def refuse_clipping(self, what: str) -> None:
        """Refuses a call that needs all gradients before the first is used.

        Raises:
            StepError: Always.
        """
        raise StepError(
            f"{what}: with overlap='backward' blocks are stepped before all gradients are known; "
            f"{TO_CLIP} to clip{self._damage()}"
        )

    def before_step(self, scaling: Scaling | None) -> None:
        """Checks that the steps inside backward are those that ``step()`` would perform now.

        Raises:
            StepError: If they are not, or would not be the next time.
        """
        self._account()
        if scaling is not None:
            raise StepError(
                "a GradScaler says only after backward whether a step is made, and by what its "
                "gradients are to be divided; make the optimizer with overlap='forward'"
                + self._damage()
            )
        if (self.made or self._first_steps.watched) and self._backward.has_changed():
            raise StepError(
                "the settings of the parameter groups (lr, ...) were changed between backward and "
                "optimizer.step(); with overlap='backward' steps use those of backward: change "
                f"them after optimizer.step(), {ELSE}{self._damage()}"
            )
        self._check_gradients()
        self.settle()
        if self._host is not None:
            self._host.retry()

    def after_step(self) -> None:
        """Restarts the count of backwards, after the step was performed or deferred.

        It may be called again after an interrupt.
        """
        self._first_steps.after_step()
        self.count = 0
        self.failure = None
        self.made.clear()
        self._used.after_step()
        self._first_steps.final.clear()
        self.ticket = object()

    def forgotten(self, *, set_to_none: bool) -> None:
        """Called when gradients are cleared or set to zero, those already used included.

        Args:
            set_to_none: Whether they are cleared.
        """
        self.count = 0
        self.failure = None
        self._first_steps.thrown_away()
        if not set_to_none:
            self._used.zero()
        self._first_steps.final.clear()
        self._used.edited.clear()

    def settle(self) -> None:
        """Permits access to all blocks again."""
        self._closed.permit_access()

    def repair(self) -> None:
        """Called after an exception in tiermem's code: blocks that were stepped stay stepped."""

    # -- what backward calls ---------------------------------------------

    def foresees(self, order: Sequence[int]) -> Sequence[int]:
        """Returns the order unchanged, as the first steps are performed after backward."""
        return order

    def begins(self) -> bool:
        """Called when a backward begins; returns whether steps are likely in it."""
        self._account()
        self._backward.begins()
        self._first_steps.watches = False
        return self._first_steps.are_over and self.count + 1 == self._micro_batches

    def ends(self) -> None:
        """Called as a backward ends."""
        self._backward.ends()
        if self._first_steps.end_backward():
            self.settle()

    def arriving(self, entry: Entry) -> bool:
        """Called before a gradient is accumulated, or caught by ``autograd.grad``.

        Returns:
            Whether to leave ``param.grad`` unchanged.

        Raises:
            StepError: If the gradient to which it would be added is gone.
        """
        now, param = self._backward, id(entry.param)
        if param not in now.entries:
            return False
        used = self._used.is_gone(entry)
        here = now.is_here()
        if now.counted and here and not used and param not in self._used.consumed:
            return False
        if not accumulates(entry):
            return used
        if here and not now.counted and not is_nested():
            self._first()
        elif not here or not now.counted:
            self._late.add(id(entry.group))  # a backward inside another one: more may follow
        if used or param in self._used.consumed:
            raise self._another(entry)
        return False

    def arrived(self, entries: Sequence[Entry]) -> None:
        """Called when gradients are in the tiers; steps their block if all have arrived."""
        now, group = self._backward, entries[0].group
        if not (now.steps or self._first_steps.watches) or not now.is_here():
            return
        if id(group) in self._late or not now.has_all(entries):
            return
        if now.steps:
            self._step(group)
            return
        found = [e for u in now.units[id(group)] for e in u.entries if e.has_grad]
        self._first_steps.final += found
        late = partial(self._late.add, id(group))  # called if the weights are used again
        self._closed.watch(group.block.name, [group.block.id], late)

    def edited(self, entry: Entry) -> None:
        """Called when other code has written a gradient."""
        self._used.edited.add(id(entry.param))

    def has_used(self, entry: Entry) -> bool:
        """Whether an existing gradient was used and may stay: never."""
        return False

    # -- inside ----------------------------------------------------------

    def _first(self) -> None:
        """Decides, at the first gradient of a backward, whether steps are performed in it."""
        now = self._backward
        added = self._used.added_to()
        if added is not None:
            raise self._another(added)
        if self.count >= self._micro_batches:
            if any(grad_of(entry) is not None for entry in now.entries.values()):
                raise StepError(
                    f"this is backward {self.count + 1} before optimizer.step(), and with "
                    "overlap='backward' blocks are stepped in backward "
                    f"{self._micro_batches}: say optimizer.accumulate(n) for n backwards per "
                    f"step, {ELSE}; nothing of this backward was taken"
                )
            self.count = 0  # the program has set them to None
        now.counted = True
        self.count += 1
        if self.count == self._micro_batches:
            self._first_steps.look_at(now.entries.values())
            now.steps = self._first_steps.are_over
            self._first_steps.watches = not now.steps
            now.note_settings()
            now.prepare()
            self._used.edited.clear()
            if now.steps:
                self._take_in()

    def _step(self, group: Group) -> None:
        """Steps the units of a block whose gradients are final.

        If that fails here (a disk error, no room), it is left to ``step()``, which tries again and
        raises the error.
        """
        units = self._backward.final_units(group)
        for unit in units:
            if not unit.can_wait(self._runtime):
                return
        on_host = any(unit.host is not None for unit in units)
        work = uncompiled(InBackward._begin if on_host else InBackward._make)
        manager = self._runtime.manager
        with manager.lock, quiet(manager.parts.device):
            work(self, group, units)

    def _make(self, group: Group, units: Sequence[StepUnit]) -> None:
        """Performs the steps of a block."""
        now, timeline = self._backward, self._runtime.manager.parts.timeline
        try:
            for unit in units:
                began = time.perf_counter_ns()
                write = now.pipeline.write if id(group) not in now.held_back else None
                unit.step(self._runtime, now.settings, self._state, ticket=self.ticket, write=write)
                timeline.add("optimizer", unit.name, began, time.perf_counter_ns())
        except (StorageError, CapacityError):
            pass
        except Exception as error:
            if OUTSIDE not in error.__dict__:
                raise  # from a signal handler, or out of memory, in tiermem's code
            self.failure = error
            now.steps = False
        finally:
            made = [unit for unit in units if unit.made is self.ticket]
            for unit in made:
                self._account_for(unit)
            if made:
                self._close_off(group, made)

    def _close_off(self, group: Group, made: Sequence[StepUnit]) -> None:
        """Refuses access to a block that was stepped, and writes it home in time."""
        blocks = [group.block, *(block for unit in made for block in unit.kept_blocks())]
        self._closed.refuse(group, [block.id for block in blocks])
        self._backward.write(group, blocks)

    def _account(self) -> None:
        """Finds units that were stepped but not noted (Ctrl-C at that moment)."""
        for units in self._backward.units.values():
            for unit in units:
                if unit.made is self.ticket and id(unit) not in self.made:
                    self._account_for(unit)

    def _account_for(self, unit: StepUnit) -> None:
        """Notes that a unit was stepped, and clears its gradients; may be called again."""
        if id(unit) not in self.made:
            if unit.host is None:
                self._used.spend(unit)
            self.made[id(unit)] = unit
            self.total += 1

    def _begin(self, group: Group, units: Sequence[StepUnit]) -> None:
        """Begins the steps of a block on the host, if the host steps all of its units.

        The gradients stay until they have been used. Steps that cannot be begun here (a tensor has
        an alias, a file has to be written first) are left to ``step()``.
        """
        host = self._host
        settings = self._backward.settings
        if host is None or not all(host.can_begin(u, settings) for u in units):
            return
        try:
            host.begin(units, settings, None, self.ticket)
        except (StorageError, CapacityError, StepError):
            pass
        finally:
            begun = [unit for unit in units if host.is_begun(unit)]
            self.made.update((id(unit), unit) for unit in begun)
            self.total += len(begun)
            self._used.consume(e for unit in begun for e in unit.entries if e.has_grad)
            ids = [block.id for unit in begun for block in unit.blocks()]
            if begun:
                self._closed.refuse(group, ids, first=True)

    def _another(self, entry: Entry) -> StepError:
        return StepError(
            f"another gradient of parameter {entry.name!r} arrives, and the one that it adds to "
            "was used up by a step inside backward (overlap='backward'): call "
            "optimizer.step() and zero_grad() before the next backward, say "
            f"optimizer.accumulate(n) for n backwards per step, {ELSE}"
        )

    def _check_gradients(self) -> None:
        """Refuses a step whose gradients are not those of backward."""
        used = self._used
        wrong = [e for e in self._first_steps.final if id(e.param) in used.edited or not is_own(e)]
        wrong = [e for e in wrong if id(e.group) not in self._late]
        for unit in self.made.values():
            wrong += [entry for entry in unit.entries if not used.is_as_left(unit, entry)]
        if wrong:
            raise StepError(
                f"the gradient of parameter {wrong[0].name!r} was changed or replaced after it "
                "was final (by GradScaler.unscale_, clipping, a hook, ...); with "
                f"overlap='backward' the step uses it before that: {TO_CLIP}{self._damage()}"
            )
        used.refuse_left()

    def _damage(self) -> str:
        if not self.made:
            return "; nothing has been stepped yet"
        return f"; {len(self.made)} units are stepped already, load a checkpoint"
