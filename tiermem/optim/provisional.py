"""Provisional steps: performed before ``step()`` is called, which confirms or drops them.

Such a step writes to shadows of its blocks (:mod:`tiermem.runtime.services.shadows`), so that their
homes keep the former bytes. Until ``step()`` confirms it, every block that it uses has deferred
work that drops all of these steps. So an access sees the block as it was before, and ``step()``
then performs the steps as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tiermem.core.block import Block
from tiermem.core.residency import Record
from tiermem.core.residency import State as Residency
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.units.late import LateState
from tiermem.optim.units.undo import Undo
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.services.shadows import Shadows
from tiermem.runtime.transfers.deferred import Deferred

_AT_HOME = Residency.VALID

Leave = Callable[[StepUnit, Undo], LateState | None]
"""Returns the update that the state of a unit may miss in its step, given the values of the state
outside the tiers; None if it must not miss it."""


class Elsewhere(Protocol):
    """A step of a unit that runs in another thread."""

    def failed(self) -> bool:
        """Whether it is known to have failed."""
        ...

    def confirm(self) -> None:
        """Makes it final; may be called again."""
        ...

    def take_back(self) -> None:
        """Ends it, complete or not, so that its blocks are not in use; may be called again."""
        ...


Begin = Callable[[Callable[[Elsewhere], None], Callable[[Sequence[Block]], None]], None]
"""Begins the steps of units in another thread; its arguments are functions that note each step, and
that give lent blocks their shadows."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A unit that was stepped, or is being stepped.

    Attributes:
        unit: The unit.
        ticket: The ticket of its previous step.
        numbers: The former values of its state outside the tiers.
        late: The update that its state had missed before.
        leaves: The update that its state misses in this step.
    """

    unit: StepUnit
    ticket: object
    numbers: Undo
    late: LateState | None = None
    leaves: LateState | None = None

    def forget_state(self) -> None:
        """Drops the HBM copy of state that a step has updated there but that becomes late."""
        if self.leaves is not None:
            self.leaves.forget_copy()

    def put_late_back(self) -> None:
        """Makes the state late as it was before; may be called again."""
        if self.late is not None:
            self.unit.late = self.late
            self.late.stand()

    def leave(self) -> None:
        """Makes the state late by the update that it misses, once confirmed; repeatable."""
        if self.leaves is not None:
            self.unit.late = self.leaves
            self.leaves.stand()
        if self.late is not None:
            self.late.free()


Step = Callable[[StepUnit, Made, Callable[[Sequence[Block]], None]], None]
"""Performs the step of a unit; calls its last argument with blocks in HBM before it writes them."""


class Provisional:
    """Provisional steps of one optimizer.

    Attributes:
        ticket: Given to every unit that is stepped; replaced after they are confirmed or dropped.
        drops: How often steps were dropped.
        total: How many units were confirmed.
        left: How many of them have late state, to be updated in the next step.
    """

    def __init__(self, runtime: ModuleRuntime, is_begun: Callable[[object], bool]) -> None:
        """Starts without steps.

        Args:
            runtime: The modules' runtime.
            is_begun: Returns whether a ``step()`` with some ticket has begun, which confirms it.
        """
        self.ticket = object()
        self.drops = self.total = self.left = 0
        self._manager = runtime.manager
        self._is_begun = is_begun
        self._made: dict[int, Made] = {}
        self._used: set[Entry] = set()
        self._elsewhere: list[Elsewhere] = []
        self._debts: list[Deferred] = []
        self._making = False
        self._broken = False  # not all could be dropped, since some blocks were in use
        self._shadows = Shadows(runtime.manager, self._give_up)

    def __bool__(self) -> bool:
        return bool(self._made or self._debts)

    def __contains__(self, unit: StepUnit) -> bool:
        return id(unit) in self._made

    @property
    def whole(self) -> bool:
        """Whether there are provisional steps, and all of them can be confirmed."""
        return bool(self._made) and not self._broken

    @property
    def failed(self) -> bool:
        """Whether one of them is known to have failed in another thread."""
        return any(step.failed() for step in self._elsewhere)

    def touches(self, block: Block) -> bool:
        """Whether one of the steps writes a block."""
        return block in self._shadows

    @property
    def units(self) -> list[StepUnit]:
        """Returns the units that are stepped."""
        return [made.unit for made in self._made.values()]

    def can_have(self, group: Group, units: Sequence[StepUnit]) -> bool:
        """Whether the blocks that steps of a block write can have shadows, if there is room."""
        return self._shadows.can_have(*self._written(group, units))

    def reserve(self, group: Group, units: Sequence[StepUnit]) -> bool:
        """Reserves the shadows of a block that is likely to be stepped, and can have them.

        Returns:
            Whether there was room.
        """
        return self._shadows.reserve([record.block for record in self._written(group, units)])

    def has_room(self, group: Group, units: Sequence[StepUnit]) -> bool:
        """Whether the steps of all units of a block can be provisional."""
        weights, *kept = self._written(group, units)
        if not self._shadows.can_have(weights, *kept):
            return False
        # state that stays in HBM, and is newer there, need not be moved now
        for record in kept:
            if record.at_home is not _AT_HOME:
                return False
        if not self._made:  # once per round, for all of them
            self._shadows.forget_removed()
        return self._shadows.reserve([record.block for record in (weights, *kept)])

    def make(
        self, group: Group, units: Sequence[StepUnit], state: State, step: Step, leave: Leave
    ) -> bool:
        """Steps units of a block, under the manager's lock.

        Args:
            group: The group of their weights.
            units: Units for which :meth:`has_room` was true.
            state: The tiered optimizer's state.
            step: Performs the step of one, with :attr:`ticket`; it may raise, or not perform it.
            leave: Chooses the units whose state becomes late.

        Returns:
            Whether all were performed.
        """
        ticket = self.ticket
        blocks = [group.block]
        self._making = True
        try:
            for unit in units:
                blocks += unit.kept_blocks()
                numbers, late = unit.keep_numbers(state), unit.late
                leaves = leave(unit, numbers)
                made = self._made[id(unit)] = Made(unit, unit.made, numbers, late, leaves)
                unit.counted.later(ticket)
                if late is not None:
                    unit.late = None
                    late.strike()
                step(unit, made, partial(self._keep, group, made))
                made.forget_state()
        finally:
            self._making = False
            done = self.ticket is ticket and all(u.made is ticket for u in units)
            if done:
                for unit in units:
                    self._used.update(unit.entries)
                blocks += [grads.block for unit in units for grads in unit.grad_units()]
                self._owe(group.block, blocks)
            elif self.ticket is ticket and not any(block in self._shadows for block in blocks):
                for unit in units:  # nothing was written
                    begun = self._made.get(id(unit))
                    if begun is not None:
                        unit.counted.not_made(ticket)  # step() has the same ticket
                        begun.put_late_back()
                        del self._made[id(unit)]
            else:
                self.drop()
        return done

    def begin(self, group: Group, units: Sequence[StepUnit], state: State, begin: Begin) -> None:
        """Begins the steps of a block's units in another thread, under the manager's lock.

        Args:
            group: The group of their weights.
            units: Units for which :meth:`has_room` was true.
            state: The tiered optimizer's state.
            begin: Lends their blocks and begins them, with :attr:`ticket`.
        """
        ticket = self.ticket
        kept = [block for unit in units for block in unit.kept_blocks()]
        found = [grads.block for unit in units for grads in unit.grad_units()]
        self._making = True
        done = False
        try:
            for unit in units:
                self._made[id(unit)] = Made(unit, unit.made, unit.keep_numbers(state))
                unit.counted.later(ticket)
            begin(self._elsewhere.append, self._shadows.turn_lent)
            for unit in units:
                unit.made = ticket
            for unit in units:
                self._used.update(unit.entries)
            self._owe(group.block, [group.block, *kept, *found])
            done = True
        finally:
            self._making = False
            if not done:
                self.drop()

    def drop(self) -> None:
        """Undoes the steps; may be called again after an interrupt.

        A step that is in progress is undone once it has released its blocks.
        """
        if not self:
            return
        manager = self._manager
        with manager.lock:
            if self._is_begun(self.ticket) and not self._broken:
                self.confirm()
                return
            for step in self._elsewhere:
                step.take_back()
            manager.parts.copy.synchronize()
            for made in self._made.values():
                made.numbers.take_back()
                made.unit.foreign.forget()
                made.unit.made = made.ticket
            self._shadows.put_back()
            for made in self._made.values():
                made.forget_state()
                made.put_late_back()
            if self._shadows.in_use:
                self._broken, self.ticket = True, object()
                return
            self._end()
            self.drops += 1

    def confirm(self) -> None:
        """Makes the steps final if ``step()`` has begun; may be called again."""
        if not self or self._broken or not self._is_begun(self.ticket):
            return
        with self._manager.lock:
            for made in self._made.values():
                made.unit.counted.confirm(made.unit, self.ticket)
                made.leave()
            for step in self._elsewhere:  # these have deferred work from now on
                step.confirm()
            self._shadows.confirm()
            self.total += len(self._made)
            self.left += sum(made.leaves is not None for made in self._made.values())
            self._end()

    def repair(self) -> None:
        """Drops all steps, after an exception in tiermem's code; their blocks have no leases."""
        self._making = False
        self.drop()

    def has_used(self, entry: Entry) -> bool:
        """Whether one of the steps has used the gradient of a parameter."""
        return entry in self._used

    def close(self) -> None:
        """Frees the shadows."""
        self.drop()
        self._shadows.close()

    # -- inside ----------------------------------------------------------

    def _keep(self, group: Group, made: Made, blocks: Sequence[Block]) -> None:
        """Keeps the former bytes of the weights and other blocks before a step writes them."""
        left = made.unit.block if made.leaves is not None else None
        self._shadows.turn([group.block, *[block for block in blocks if block is not left]])
        if left is not None:
            # the home keeps its bytes: a copy to it that was submitted but has not run yet must not
            # copy what is written from now on
            transfers = self._manager.parts.transfers
            transfers.copy.use(transfers.home_ready.get(left.id))

    def _written(self, group: Group, units: Sequence[StepUnit]) -> list[Record]:
        """Returns the blocks that a step of a block writes."""
        record_of = self._manager.parts.table.of
        kept = [record_of(block.id) for unit in units for block in unit.kept_blocks()]
        return [record_of(group.block.id), *kept]

    def _owe(self, block: Block, blocks: Sequence[Block]) -> None:
        ids = [b.id for b in blocks]
        debt = Deferred(block.name, ids, partial(self._is_looked_at, ids))
        self._debts.append(debt)
        self._manager.parts.deferred.add(debt)

    def _is_looked_at(self, blocks: Sequence[int]) -> None:
        confirmed = self._is_begun(self.ticket) and not self._broken
        self.drop()
        for block_id in blocks if confirmed else ():  # another thread may still use them
            self._manager.parts.deferred.pay(block_id)

    def _end(self) -> None:
        while self._debts:
            self._manager.parts.deferred.cancel(self._debts[-1])
            self._debts.pop()
        self._used.clear()
        self._elsewhere.clear()
        # in one line: without its units, a ticket would be taken for that of the next round
        self._made, self._broken, self.ticket = {}, False, object()

    def _give_up(self) -> bool:
        """Frees the shadows, and drops their steps, if a home needs room."""
        if self._making:
            return False
        self.drop()
        return self._shadows.release()
