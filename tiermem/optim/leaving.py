"""Chooses the units whose state becomes late when they are stepped ahead (``overlap="auto"``).

See :mod:`tiermem.optim.units.late`. Units take turns: of those that are stepped in one backward,
the state of about half becomes late, and the others perform two updates, so that each backward
copies the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tiermem.core.block import Block, Tier
from tiermem.errors import REFUSALS
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.plainstep import is_bare
from tiermem.optim.rules.probe import settings_of, way_of
from tiermem.optim.units.late import LateState, SpareGradients
from tiermem.optim.units.undo import Undo
from tiermem.optim.units.unit import StepUnit

IgnoresWeights = Callable[[torch.Tensor, int, dict[str, Any]], bool]
"""Returns whether the update of a parameter's state does not depend on its weights, given the
stepped tensor, the number of its group and the group's settings."""


class LateStates:
    """Chooses the units of one optimizer whose state becomes late.

    Attributes:
        share: The share of the bytes that are stepped ahead whose state is late by turns.
        turn: 0 or 1, alternating, in rounds with steps ahead.
        roomy: Whether DRAM has spare room when all blocks that are stepped ahead have shadows.
    """

    def __init__(
        self, runtime: ModuleRuntime, ignores: IgnoresWeights, is_open: Callable[[], bool]
    ) -> None:
        """Chooses none yet.

        Args:
            runtime: The modules' runtime.
            ignores: Returns whether the state of a parameter is updated without its weights.
            is_open: Returns whether there are steps that may still be dropped; then the state that
                was late before is late again.
        """
        self.share = 1.0
        self.turn = 0
        self.roomy = True
        self._runtime = runtime
        self._ignores = ignores
        self._is_open = is_open
        self._spares = SpareGradients(runtime)
        self._due = 0.0  # bytes that should be late by now, in the current backward
        self._room = 0  # bytes of HBM for a step, beside what a forward may hold
        self._units: list[StepUnit] = []
        self._asked: object = None  # settings that were checked last
        self._ways: list[tuple[tuple[str, Any], ...]] = []
        self._found: dict[int, tuple[Any, bool]] = {}
        runtime.manager.parts.homes.reclaimers.append(self._give_up)

    def extend(self, units: Iterable[StepUnit]) -> None:
        """Adds new units."""
        self._units += units

    def reserve(self, units: Iterable[StepUnit]) -> None:
        """Reserves the blocks that keep the gradients of units whose state may be late."""
        for unit in units if self.share and self.roomy else ():
            gradients = unit.grad_units()
            if unit.block is not None and len(gradients) == 1:
                self._spares.of(gradients[0], new=True)

    def blocks(self) -> list[Block]:
        """Returns the blocks that keep gradients."""
        return self._spares.blocks()

    def uses_of(self, unit: StepUnit) -> list[int]:
        """Returns the ids of blocks that the step of a unit uses because its state is late."""
        return [] if unit.late is None else [unit.late.block.id]

    def leave(
        self, settings: Sequence[dict[str, Any]], unit: StepUnit, numbers: Undo
    ) -> LateState | None:
        """Returns the update that the state of a unit may miss; None if it must not miss it.

        Args:
            settings: The settings of the step that is about to be performed.
            unit: The unit; if its state has missed an update already, it gets both.
            numbers: The values of the state outside the tiers.
        """
        if not self.share or not self.may_leave(unit, settings):
            return None
        (gradients,) = unit.grad_units()
        self._due += self.share / 2 * gradients.nbytes
        if unit.late is not None or self._due < gradients.nbytes / 2:
            return None
        spare = self._spares.of(gradients, new=self.roomy)
        if spare is None:
            return None
        self._due -= gradients.nbytes
        return LateState(unit, self._runtime, settings, numbers, spare)

    def may_leave(self, unit: StepUnit, settings: Sequence[dict[str, Any]]) -> bool:
        """Whether the state of a unit can be late in steps with such settings."""
        return self._can_leave(unit) and self._is_made_without_weights(unit, settings)

    def begin_backward(self) -> None:
        """Called when a backward with steps begins."""
        late = any(unit.late is not None for unit in self._units)
        if not (self.share or late or self._is_open()):
            self._spares.close()  # the units that take turns are chosen for long
        table = self._runtime.manager.parts.table
        room = table.hbm.capacity - table.fixed_nbytes(now=True)
        self._due, self._room = 0.0, room - self._runtime.program.worst_chain

    def take_turns(self) -> None:
        """Called after a round with steps ahead."""
        self.turn = 1 - self.turn

    def catch_up(self) -> None:
        """Brings all state up to date."""
        for unit in self._units:
            unit.catch_up()

    def repair(self) -> None:
        """Restores late state, after an exception in tiermem's code."""
        for unit in self._units:
            if unit.late is not None:
                unit.late.stand()

    def close(self) -> None:
        """Frees its blocks; no state is late any more."""
        reclaimers = self._runtime.manager.parts.homes.reclaimers
        if self._give_up in reclaimers:
            reclaimers.remove(self._give_up)
        self._spares.close()

    # -- inside ----------------------------------------------------------

    def _can_leave(self, unit: StepUnit) -> bool:
        """Whether the state can be late, and the gradients can be kept for it."""
        gradients, block = unit.grad_units(), unit.block
        if block is None or len(gradients) != 1 or unit.handed.given or not unit.plain.is_settled:
            return False
        (found,), parts = gradients, self._runtime.manager.parts
        mine = {id(entry) for entry in unit.entries}
        if found.runs or any(id(entry) not in mine for entry in found.entries):
            return False
        for used in (block, found.block):
            record = parts.table[used.id]
            if record.home is not Tier.DRAM or record.fixed or used.id in parts.evictor.residents:
                return False
        beside = [found.block, *unit.kept_blocks()]  # the weights are held by the call
        if sum(block.nbytes for block in beside) + found.nbytes > self._room:
            return False
        return is_bare(unit.plain.optimizer_for(None))

    def _is_made_without_weights(self, unit: StepUnit, settings: Sequence[dict[str, Any]]) -> bool:
        """Whether the update of a unit's state does not depend on its weights."""
        if self._asked is not settings:  # once for all units
            self._asked = settings
            self._ways = [way_of(settings_of(group)) for group in settings]
        ways = [self._ways[number] for number in unit.plain.numbers]
        known = self._found.get(id(unit))
        if known is None or known[0] != ways:
            found = all(
                _is_told_by_numbers(settings[number])
                and self._ignores(unit.own(param), number, settings_of(settings[number]))
                for param, number in unit.members
            )
            known = self._found[id(unit)] = ways, found
        return known[1]

    def _give_up(self) -> bool:
        """Frees the spare blocks if a home needs room."""
        if self._is_open():
            return False
        try:
            self.catch_up()
        except REFUSALS:
            return False
        self.roomy = False
        return self._spares.close()


def _is_told_by_numbers(group: dict[str, Any]) -> bool:
    """Whether a trial holds for later steps; tensor settings may change in place."""
    return not any(
        isinstance(value, torch.Tensor) and key != "lr" for key, value in settings_of(group).items()
    )
