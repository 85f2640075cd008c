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
    """What one call of ``step()`` has to do; the next call finishes one that was cut short.

    Attributes:
        ticket: Given to every unit that is stepped, so that none is stepped twice.
        units: To be stepped.
        groups: Settings of the parameter groups.
        scaling: What a GradScaler left to the step, or None.
        loss: What the closure returned.
        error: Raised first of all: a step inside backward failed with it.
        failed: What cut it short, for messages.
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
