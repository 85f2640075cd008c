"""DeepSpeed's 1Cycle schedule of rates and momenta."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from .schedules import Schedule, Value


class OneCycle(Schedule):
    """Up, down, and decay; the momentum goes the other way.

    Args:
        optimizer: Whose groups are written.
        cycle_min_lr: The rate at both ends of the cycle.
        cycle_max_lr: The rate in the middle.
        decay_lr_rate: Decay of the rate after the cycle.
        cycle_first_step_size: Iterations up.
        cycle_second_step_size: Iterations down; by default as many.
        cycle_first_stair_count: Stairs up; 0 for none.
        cycle_second_stair_count: Stairs down; by default as many.
        decay_step_size: Iterations of one decay; 0 for none.
        cycle_momentum: Whether the first of ``betas`` is cycled, too.
        cycle_min_mom: The least momentum.
        cycle_max_mom: The most.
        decay_mom_rate: Decay of the momentum after the cycle.
        last_batch_iteration: The last iteration made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Value,
        cycle_max_lr: Value,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Value = 0.8,
        cycle_max_mom: Value = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size={cycle_first_step_size!r}, cycle_second_step_size="
                f"{second!r}: the first must be more than 0, the second not less than 0"
            )
        self.first, self.second = float(cycle_first_step_size), float(second)
        self.total_size = self.first + self.second
        self.step_ratio = self.first / self.total_size
        up = max(0, cycle_first_stair_count)
        self.stairs = up, up if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self._each(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._each(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and any("betas" not in group for group in optimizer.param_groups):
            warnings.warn(
                f"cycle_momentum has no effect: {type(optimizer).__name__} has no betas",
                stacklevel=2,
            )
            self.cycle_momentum = False
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momenta(self.min_moms)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on to the next iteration, or to the one given, and sets rates and momenta."""
        super().step(last_batch_iteration)
        self._set_momenta(self.get_mom() or [])

    def get_lr(self) -> list[float]:
        """Returns the rates of the last iteration made."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            pairs = zip(self.min_lrs, self.max_lrs, strict=True)
            return [low + (high - low) * scale for low, high in pairs]
        if not self.decay_step_size or not self.decay_lr_rate:
            return self.min_lrs
        return [rate / self._decay(self.decay_lr_rate) for rate in self.min_lrs]

    def get_mom(self) -> list[float] | None:
        """Returns the momenta of the last iteration made, or None where they are not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [high - (high - low) * scale for low, high in pairs]
        if not self.decay_step_size or not self.decay_mom_rate:
            return self.max_moms
        return [momentum * self._decay(self.decay_mom_rate) for momentum in self.max_moms]

    def _decay(self, rate: float) -> float:
        after = self.last_batch_iteration - self.total_size + 1
        return 1 + rate * (after / self.decay_step_size)

    def _scale(self) -> float:
        """Returns how high in the cycle the last iteration is, from 0 to 1."""
        iteration = self.last_batch_iteration + 1
        cycle = math.floor(1 + iteration / self.total_size)
        x = 1.0 + iteration / self.total_size - cycle
        rising = x <= self.step_ratio
        stairs = self.stairs[0 if rising else 1]
        if stairs > 0:
            place = iteration % self.total_size
            height = place / self.first
            if place > self.first:
                height = (self.total_size - place) / self.second
            return math.floor(height * stairs) / stairs
        return x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)

    def _set_momenta(self, momenta: list[float]) -> None:
        if not self.cycle_momentum:
            return
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        for group, momentum in zip(groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)
