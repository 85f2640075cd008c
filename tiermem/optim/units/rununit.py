"""The step of one run of a large parameter, with the run of the gradient if that has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.nn.groups.gradunit import GradRun, GradUnit
from tiermem.optim.units.unit import StepUnit, Stored
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

    def _gradients_in(
        self, stored: Sequence[Stored], slots: dict[int, Slot], *, owed: bool
    ) -> list[torch.Tensor | None]:
        if self.run is None:
            return super()._gradients_in(stored, slots, owed=owed)
        return [slots[id(self.run.block)].views[0]]
