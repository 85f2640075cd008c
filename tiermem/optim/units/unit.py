"""One unit of an optimizer step: some parameters of one block, their gradients and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch

from tiermem.core.alike import all_are, all_none, any_none, without_none
from tiermem.core.block import Block
from tiermem.errors import StepError
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.quiet import quiet
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.plainstep import run, run_scaled, undoes_scale
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.rules.separable import Make
from tiermem.optim.rules.torchsteps import states_of
from tiermem.optim.units.attempt import Attempt
from tiermem.optim.units.counted import CountedSteps
from tiermem.optim.units.direct import DirectSteps
from tiermem.optim.units.foreign import ForeignWrites
from tiermem.optim.units.gradients import UnitGradients
from tiermem.optim.units.handed import HandedGradients
from tiermem.optim.units.held import Held
from tiermem.optim.units.late import Ahead, LateState, update_now
from tiermem.optim.units.master import Masters
from tiermem.optim.units.onecall import writes_in_one_call
from tiermem.optim.units.plainopt import PlainOptimizer
from tiermem.optim.units.stepper import Stepper
from tiermem.optim.units.undo import Undo
from tiermem.runtime.memory.slots import Slot

State = dict[Any, Any]
Stored = tuple[int, Entry, GradUnit]
"""Number of a member, its entry, and the unit with its gradient in the tiers."""
Shown = tuple[torch.Tensor | None, torch.Tensor]
"""The stand-in of a tensor, and the tensor."""

_second, _third = itemgetter(1), itemgetter(2)
_unit, _unit_index, _lazy = attrgetter("unit"), attrgetter("unit_index"), attrgetter("lazy")
_has_grad, _materialized = attrgetter("has_grad"), attrgetter("materialized")
_kept = attrgetter("_kept")


class StepUnit(UnitGradients):
    """Parameters of one block that one optimizer steps together.

    Attributes:
        name: For messages.
        members: Parameters and the number of their parameter group, in order.
        entries: The managed ones among them, in the same order; empty for ordinary parameters.
        entry_of: The entry of each member, None for an ordinary parameter.
        group: The group of weights they are from, or None.
        foreign: Detects writes of the weights by other code.
        counted: Counts its steps as writes in torch's version counters.
        block: The block of their state, or None.
        masters: Their masters, or None if the parameters themselves are stepped.
        host: Steps it on the host; None if the device does.
        plain: Its plain optimizer, and the state between steps.
        handed: The gradients that the plain optimizer gets.
        direct: Performs steps by a kernel on the blocks, without the plain optimizer.
        made: The ticket of the last step that was completed.
        attempt: The current step, or one that could not be undone yet.
        late: The update that its state has missed, if a step has left the state unchanged.
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
        managed = {id(entry.param): entry for entry in entries}
        self.entry_of = [managed.get(id(param)) for param, _ in members]
        self.group: Group | None = entries[0].group if entries else None
        self.foreign = ForeignWrites(self.group, self.entries)
        self.counted = CountedSteps()
        self.block: Block | None = None
        self.masters: Masters | None = None
        self.host: Stepper | None = None
        self.made: object = None
        self.attempt: Attempt | None = None
        self.late: LateState | None = None
        self.plain = PlainOptimizer(self, make)
        self.handed = HandedGradients()
        self.direct = DirectSteps(self)

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns what the plain optimizer gets for a parameter: itself, or its master."""
        if self.host is not None:
            return self.host.own(param)
        return param if self.masters is None else self.masters.own(param)

    def has_master(self, param: torch.Tensor) -> bool:
        """Whether a parameter is the cast of a master."""
        return self.masters is not None and self.masters.own(param) is not param

    def ids(self) -> list[int]:
        """Returns the ids of the parameters, by which loaded state is found."""
        return [id(param) for param, _ in self.members]

    def blocks(self) -> list[Block]:
        """Returns the blocks that a step uses, in the order of use."""
        found = [self.group.block] if self.group is not None else []
        for unit in self.grad_units():
            found += unit.blocks if unit.runs else [unit.block]
        return found + self.kept_blocks()

    def kept_blocks(self) -> list[Block]:
        """Returns the blocks of state and masters."""
        found = [] if self.block is None else [self.block]
        if self.masters is not None and self.masters.block is not None:
            found.append(self.masters.block)
        return found

    def state_shapes(self) -> Iterator[tuple[torch.Tensor, str, str, tuple[int, ...]]]:
        """Yields what its state has in the tiers: parameter, key, name and shape."""
        for place in self.plain.places:
            yield place.param, place.key, place.name, place.shape

    def begins_with(self, blocks: list[Block]) -> list[Block]:
        """Returns the blocks that a step uses first, of all :meth:`blocks` that it uses."""
        return blocks

    def at_once(self) -> list[Block]:
        """Returns the blocks that are in HBM at the same time in a step, at most."""
        return self.blocks()

    # -- the step --------------------------------------------------------

    def step(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        state: State,
        scaling: Scaling | None = None,
        *,
        ticket: object,
        owed: bool = False,
        meanwhile: Callable[[], None] | None = None,
        write: Callable[[Sequence[Block]], None] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Steps the unit: fetches everything first, and performs the step completely or not.

        Args:
            runtime: The modules' runtime.
            groups: Settings of the parameter groups.
            state: The tiered optimizer's state, to be updated.
            scaling: What a GradScaler left to the step, or None.
            ticket: Identifies the requested step; with the same ticket it is performed once.
            owed: Whether the step was deferred: then it uses the gradients that
                existed then, and leaves the present ``param.grad`` unchanged.
            meanwhile: Called once everything is in HBM.
            write: Called with blocks that the rest of a step does not use, if it has parts.
            ahead: What to do with the state in a step that the caller can undo, completed or
                interrupted; the caller has checked that the gradients are its own
                (:meth:`can_wait`).
                Then the state before the step is not kept here, and users' changes of gradients
                are not looked for. None for a step that cannot be undone.
        """
        self.recover()
        self.catch_up()
        if self.made is not ticket:
            if self.group is not None and self.group.freed:
                self.refuse_freed()
            optimizer = self.plain.optimizer_for(groups)
            if not owed and ahead is None:
                runtime.grads.sync_all(self.entries)
            self.flush()
            self._try(runtime, optimizer, state, scaling, ticket, meanwhile, ahead, owed=owed)
        if owed:
            self.clear_forgotten(runtime)

    def abandon(self) -> None:
        """Ends a failed step: restores the state before it if possible, else leaves it as it is.

        Raises:
            StorageError: If the disk with its bytes fails.
        """
        try:
            self.recover()
        except StepError:
            if self.attempt is not None:
                self.attempt.leave_as_is()

    def recover(self) -> None:
        """Undoes what could not be undone when it failed.

        Raises:
            StorageError: If the disk with its bytes still fails.
            StepError: If it can never be undone.
        """
        if self.attempt is not None:
            self.attempt.end()

    def _try(
        self,
        runtime: ModuleRuntime,
        optimizer: torch.optim.Optimizer,
        state: State,
        scaling: Scaling | None,
        ticket: object,
        meanwhile: Callable[[], None] | None,
        ahead: Ahead | None,
        *,
        owed: bool,
    ) -> None:
        """Performs the step, or leaves the unit unchanged."""
        stored = self._stored()
        holding = self.held(runtime, ahead=ahead)
        attempt = self.attempt = Attempt(self, runtime, holding, owed=owed)
        try:
            slots = attempt.holding.open()
            if meanwhile is not None:
                meanwhile()
            if ahead is not None:
                ahead.keep(self.kept_blocks())
            unscales = scaling is not None and undoes_scale(optimizer, scaling)
            one_call = not unscales and writes_in_one_call(optimizer)
            complete = partial(self._complete, runtime, stored, slots, state)
            done = partial(self._carry_out, attempt, complete, ticket) if one_call else None
            if ahead is None:
                spoils = self.handed.spoils or unscales
                attempt.keep(optimizer, slots, state, spoils=spoils, complete=done)
            elif ahead.late is not None:
                ahead.late.make(slots)
            self._carry_out(
                attempt,
                partial(self._update, runtime, optimizer, stored, slots, state, scaling, owed=owed),
                ticket,
            )
            attempt.end()
        except BaseException:
            attempt.end()
            raise

    def _stored(self) -> list[Stored]:
        """Returns the members whose gradients are in the tiers, in order."""
        entries, units = self.entries, [*map(_unit, self.entries)]
        alike = len(entries) == len(self.members) and all(map(_has_grad, entries))
        if alike and not (any(map(_materialized, entries)) or any_none(units)):
            return [*zip(range(len(units)), entries, units, strict=True)]
        return [
            (number, entry, entry.unit)
            for number, entry in enumerate(self.entry_of)
            if entry is not None and entry.has_grad and not entry.materialized and entry.unit
        ]

    def _carry_out(self, attempt: Attempt, make: Callable[[], list[Shown]], ticket: object) -> None:
        """Performs a step, or the rest of it, and marks it as completed."""
        if self.counted.ticket is ticket:
            with self.counted.unchanged(self):
                shown = make()
        else:
            shown = make()
        attempt.shown, attempt.made, self.made = shown, True, ticket

    def refuse_freed(self) -> None:
        """Raises the error for weights that are no longer in the tiers.

        Raises:
            StepError: Always.
        """
        raise StepError(
            f"{self.name!r}: the model was taken out of the tiers with tier.unwrap; make a new "
            "optimizer over it (this one's state_dict() can be loaded there)"
        )

    def step_on(self, host: Stepper | None, make: Make) -> None:
        """Assigns the unit to the host, or to the device, before its first step there."""
        self.host, self.plain.make = host, make

    def move(self, host: Stepper | None, make: Make) -> None:
        """Moves the unit to host or device from the next step on; its state is moved, too.

        Args:
            host: Steps it on the host; None for the device.
            make: Creates the plain optimizer there.
        """
        self.catch_up()
        self.plain.carry()
        self.step_on(host, make)

    def _update(
        self,
        runtime: ModuleRuntime,
        optimizer: torch.optim.Optimizer,
        stored: Sequence[Stored],
        slots: dict[int, Slot],
        state: State,
        scaling: Scaling | None,
        *,
        owed: bool,
    ) -> list[Shown]:
        """Steps what is held.

        Returns:
            The stand-ins of the tensors that were written, and their values.
        """
        if scaling is None and outside(self.direct.make, optimizer, stored, slots):
            return []
        gradients = self._gradients_in(stored, slots, owed=owed)
        slot = slots.get(id(self.block))
        cast = self.handed.hand_over(self.members, self.plain.owns(), gradients)
        self.plain.attach(slot)
        self._run(optimizer, scaling, cast)
        return self._complete(runtime, stored, slots, state)

    def _gradients_in(
        self, stored: Sequence[Stored], slots: dict[int, Slot], *, owed: bool
    ) -> list[torch.Tensor | None]:
        """Returns the gradient of each member: in the held blocks, otherwise the program's own."""
        gradients: list[torch.Tensor | None] = [None] * len(self.members)
        if stored and len(stored) == len(gradients) and all_are(map(_third, stored), stored[0][2]):
            views = slots[id(stored[0][2].block)].views
            return [*map(views.__getitem__, map(_unit_index, map(_second, stored)))]
        if not owed:
            gradients = [param.grad for param, _ in self.members]
        of: GradUnit | None = None
        for number, entry, unit in stored:
            if unit is not of:
                of, views = unit, slots[id(unit.block)].views
            gradients[number] = views[entry.unit_index]
        return gradients

    def _complete(
        self,
        runtime: ModuleRuntime,
        stored: Sequence[Stored],
        slots: dict[int, Slot],
        state: State,
    ) -> list[Shown]:
        """Completes the step after the plain optimizer's; if interrupted, may be called again."""
        shown = self.plain.take_in(runtime, slots.get(id(self.block)), state)
        if self.masters is not None:
            self.masters.derive()
        stand_ins = without_none([*map(_lazy, map(_second, stored))])
        for _, entry, unit in () if all_none(map(_kept, stand_ins)) else stored:
            stand_in: Any = entry.lazy
            if stand_in is not None and stand_in._kept is not None:
                shown.append((stand_in, slots[id(unit.block)].views[entry.unit_index]))
        return shown

    def prepare_ahead(self, groups: Sequence[dict[str, Any]]) -> None:
        """Creates what a step ahead needs, if it does not exist.

        Args:
            groups: Settings of the parameter groups.
        """
        self.plain.optimizer_for(groups)

    def can_be_taken_back(self) -> bool:
        """Whether a step can be undone by restoring the former bytes of its blocks, and numbers."""
        masters = self.masters
        return not (self.handed.spoils or self.plain.private or self.attempt is not None) and (
            masters is None or (masters.made and not masters.loose())
        )

    def keep_numbers(self, state: State) -> Undo:
        """Keeps the state's values outside the tiers, and which parameters have any.

        Args:
            state: The tiered optimizer's.
        """
        numbers, kept, owns = Undo(), self.plain.optimizer_for(None).state, self.plain.owns()
        numbers.keep_entries(kept, owns)
        stateless = zip(self.members, states_of(kept, owns), strict=True)
        numbers.keep_shown(state, [param for (param, _), own in stateless if own is None])
        return numbers

    def can_wait(self, runtime: ModuleRuntime) -> bool:
        """Whether no program could observe that the step is performed later than requested.

        That is so if every access to the bytes goes through the manager, which performs the step
        first: not if there is a view of them, or a gradient is an ordinary tensor.
        """
        group = self.group
        if group is None or group.holds or group.freed:
            return False
        slot = runtime.manager.parts.slots.current.get(group.block.id)
        if slot is not None and slot.aliased:
            return False
        if any(map(_materialized, self.entries)):
            return False
        return self.has_own_gradients() and not self.is_viewed()

    def is_viewed(self) -> bool:
        """Whether users may have a view of the state."""
        return self.plain.is_viewed()

    def flush(self) -> None:
        """Stores what was written through views of the state."""
        self.plain.flush()

    def catch_up(self) -> None:
        """Updates the state, if a step has left it unchanged.

        Raises:
            CapacityError: If HBM cannot hold what the update needs.
            StorageError: If its bytes cannot be read.
        """
        if self.late is None:
            return
        manager = self.late.runtime.manager
        with manager.lock, quiet(manager.parts.device), torch.no_grad():
            self.recover()
            for block in self.blocks():  # what waits for one of them may make the update itself
                if block.id in manager.parts.deferred:
                    manager.parts.deferred.pay(block.id)
            update_now(self)

    def _run(
        self,
        optimizer: torch.optim.Optimizer,
        scaling: Scaling | None,
        cast: Sequence[torch.Tensor],
    ) -> None:
        seen = None if self.attempt is None else self.attempt.one_call
        with nullcontext() if seen is None else seen:
            if scaling is None:
                outside(run, optimizer)  # the attempt undoes what an error leaves
                return
            owns = [self.own(param) for param, _ in self.members]
            self.handed.scaled = True  # this is assumed if the step fails
            self.handed.scaled = outside(run_scaled, optimizer, scaling, owns, cast)

    def held(self, runtime: ModuleRuntime, *, ahead: Ahead | None = None) -> Held:
        """Returns a context that holds weights, gradients, state and masters."""
        return Held(self, runtime, ahead=ahead)

    def sees(self, unit: GradUnit) -> bool:
        """Whether the optimizer gets the gradients of a block themselves, not casts of them."""
        for entry, spec in zip(unit.entries, unit.block.tensors, strict=True):
            if self.own(entry.param).dtype is spec.dtype:
                return True
        return False

    def store_first_state(
        self, runtime: ModuleRuntime, groups: Sequence[dict[str, Any]], state: State
    ) -> None:
        """Stores the state that the class creates before any step."""
        with torch.no_grad(), self.held(runtime) as slots:
            self.plain.optimizer_for(groups)
            self.plain.detach(runtime, slots.get(id(self.block)), state)

    def apply(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        state: State,
        use: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """Applies a call of the plain optimizer other than a step to weights and state.

        Args:
            runtime: The modules' runtime.
            groups: Settings of the parameter groups.
            state: The tiered optimizer's state, to be updated.
            use: Called with the plain optimizer, whose tensors are in HBM.
        """
        if self.group is not None and self.group.freed:
            self.refuse_freed()
        self.catch_up()
        self.flush()
        with torch.no_grad(), self.held(runtime) as slots:
            optimizer = self.plain.optimizer_for(groups)
            slot = slots.get(id(self.block))
            self.plain.attach(slot)
            try:
                outside(use, optimizer)
            finally:
                self.plain.detach(runtime, slot, state)
            if self.masters is not None:
                self.masters.derive(every=True)
