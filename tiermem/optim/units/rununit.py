"""The step of one run of a large parameter, with the run of the gradient if that has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.nn.groups.gradunit import GradRun, GradUnit
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.unit import Shown, State, StepUnit, Stored
from tiermem.runtime.memory.slots import Slot


class RunUnit(StepUnit):
    """Steps one run; where the gradient is kept in runs, it brings that of its own.

    Attributes:
        run: Of the gradient; None where that is given.
    """

    run: GradRun | None = None

    def grad_units(self) -> list[GradUnit]:
        """Returns the run of the gradient, if it is in a block of its own."""
        return [] if self.run is None else [self.run]

    def sees(self, unit: GradUnit) -> bool:
        """Whether the optimizer is given the run of the gradient itself, not a cast of it."""
        return self.own(self.members[0][0]).dtype is unit.block.tensors[0].dtype

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
        if self.run is None:
            return super()._update(runtime, optimizer, stored, slots, state, scaling, owed=owed)
        self.handed.given = {id(self.members[0][0]): slots[id(self.run.block)].views[0]}
        try:
            return super()._update(runtime, optimizer, stored, slots, state, scaling, owed=owed)
        finally:
            self.handed.given = {}
