"""The parts of an optimizer that are in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.optim.units.unit import StepUnit


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The parts of an optimizer that are in a checkpoint.

    Attributes:
        cls: The class that performs the steps.
        groups: The parameter groups themselves.
        units: The optimizer's units.
        state: The state by parameter, with stand-ins for tensors in the tiers.
        master_dtype: The dtype of the masters, or None.
        grad_dtype: The dtype of the gradients, or None for the parameters'.
        grad_factor: The factor by which the next step multiplies gradients, or None.
        backwards: How many backwards there were since the last step (``overlap="backward"``).
    """

    cls: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    units: Sequence[StepUnit]
    state: dict[Any, Any]
    master_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    grad_factor: torch.Tensor | None
    backwards: int
