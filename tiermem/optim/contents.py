"""What a checkpoint has of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.optim.units.unit import StepUnit


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The parts of an optimizer that a checkpoint has.

    Attributes:
        cls: The class that makes the steps.
        groups: The parameter groups themselves.
        units: What is stepped together.
        state: By parameter, with stand-ins for what is in the tiers.
        master_dtype: Of the masters, or None.
        grad_dtype: Of the gradients, or None for the parameters'.
        grad_factor: What the next step multiplies gradients by, or None.
        backwards: How many there were since the last step (``overlap="backward"``).
    """

    cls: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    units: Sequence[StepUnit]
    state: dict[Any, Any]
    master_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    grad_factor: torch.Tensor | None
    backwards: int
