"""A call of ``step()``, until all of its units are stepped or deferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermem.optim.rules.groups import frozen_settings
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.unit import StepUnit


@dataclass(slots=True, eq=False)
class Round:
    """The work of one call of ``step()``; the next call finishes one that was interrupted.

    Attributes:
        ticket: Given to every unit that is stepped, so that none is stepped twice.
        units: The units to be stepped.
        groups: Settings of the parameter groups.
        scaling: The scale that a GradScaler left to the step, or None.
        loss: The result of the closure.
        error: The error of a step inside backward, raised first, or None.
        failed: What interrupted it, for messages.
    """

    ticket: object
    units: list[StepUnit]
    groups: Sequence[dict[str, Any]]
    scaling: Scaling | None
    loss: Any = None
    error: BaseException | None = None
    failed: str = ""
    _frozen: bool = field(default=False)

    def left(self) -> list[StepUnit]:
        """Returns the units that are not stepped."""
        return [unit for unit in self.units if unit.made is not self.ticket]

    def cut_short(self, error: BaseException) -> None:
        """Notes why it could not be finished; freezes the present settings and scale."""
        left = self.left()
        self.failed = f"{type(error).__name__} at {left[0].name!r}" if left else ""
        if not self._frozen:
            self.groups = frozen_settings(self.groups)
            self.scaling = None if self.scaling is None else self.scaling.frozen()
            self._frozen = True
