"""The step of one run of a large parameter, with the run of its gradient if that is separate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.nn.groups.gradunit import GradRun, GradUnit
from tiermem.optim.units.unit import StepUnit, Stored
from tiermem.runtime.memory.slots import Slot


class RunUnit(StepUnit):
    """Steps one run; if the gradient is kept in runs, it fetches its own.

    Attributes:
        run: The run of the gradient; None if the gradient is passed to it.
    """

    run: GradRun | None = None

    def grad_units(self) -> list[GradUnit]:
        """Returns the run of the gradient, if it is a separate block."""
        return [] if self.run is None else [self.run]

    def sees(self, unit: GradUnit) -> bool:
        """Whether the optimizer gets the run of the gradient itself, not a cast of it."""
        return self.own(self.members[0][0]).dtype is unit.block.tensors[0].dtype

    def _gradients_in(
        self, stored: Sequence[Stored], slots: dict[int, Slot], *, owed: bool
    ) -> list[torch.Tensor | None]:
        if self.run is None:
            return super()._gradients_in(stored, slots, owed=owed)
        return [slots[id(self.run.block)].views[0]]
