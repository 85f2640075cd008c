"""DeepSpeed's learning-rate schedulers, with its formulas.

Each sets the learning rates of an optimizer's groups when it is made and at every ``step()``, the
first of which is iteration 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

Value = float | Sequence[float]
"""One for all parameter groups, or one for each."""


class Schedule:
    """What the schedulers have in common.

    Args:
        optimizer: Whose groups are written.
        last_batch_iteration: The last iteration made; -1 before the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    def get_lr(self) -> list[float]:
        """Returns the rates of the last iteration made."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Returns the rates that were set last."""
        if self._last_lr is None:
            raise RuntimeError("no rate was set yet; call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on to the next iteration, or to the one given, and sets its rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the iteration of a saved state; the optimizer's state has its rates."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _set(self, rates: Sequence[float]) -> None:
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in groups]

    def _each(self, value: Value, name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if isinstance(value, int | float):
            return [value] * count
        if len(value) != count:
            raise ValueError(f"{name}: {len(value)} values for {count} parameter groups")
        return list(value)


class _Warmup(Schedule):
    """What begins with a warm-up."""

    def _configure(self, steps: int, kind: str) -> None:
        if isinstance(steps, bool) or steps < 0 or steps != int(steps):
            raise ValueError(f"warmup_num_steps={steps!r}: it must be a whole number, 0 or more")
        if kind not in ("log", "linear"):
            warnings.warn(f"warmup_type={kind!r} is not known; it is 'log'", stacklevel=4)
            kind = "log"
        self.warmup_num_steps = max(2, int(steps))
        self.warmup_type = kind

    def _warm(self) -> float:
        """Returns how far the warm-up is, from 0 to 1."""
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        inverse = 1.0 / math.log(self.warmup_num_steps)
        return inverse * math.log(self.last_batch_iteration + 1)


class WarmupLR(_Warmup):
    """From a least rate to the full one, and constant from there.

    Args:
        optimizer: Whose groups are written.
        warmup_min_lr: The first rate.
        warmup_max_lr: The last rate; by default that of each group.
        warmup_num_steps: Iterations of the warm-up, 2 at least.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: The last iteration made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Value = 0.0,
        warmup_max_lr: Value | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._configure(warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(warmup_max_lr, "warmup_max_lr")
        self.delta_lrs = [b - a for a, b in zip(self.min_lrs, self.max_lrs, strict=True)]
        if last_batch_iteration == -1:
            self._set(self.min_lrs)

    def get_lr(self) -> list[float]:
        """Returns the rates of the last iteration made."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [a + d * gamma for a, d in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _gamma(self) -> float:
        return self._warm() if self.last_batch_iteration < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """A warm-up, then down to 0 in a straight line.

    Args:
        optimizer: Whose groups are written.
        total_num_steps: Iterations of the whole.
        warmup_min_lr: The first rate.
        warmup_max_lr: The highest rate.
        warmup_num_steps: Iterations of the warm-up, 2 at least.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: The last iteration made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Value = 0.0,
        warmup_max_lr: Value | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._warm()
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """A warm-up to each group's own rate, then down by a cosine.

    Args:
        optimizer: Whose groups are written, and have the full rates.
        total_num_steps: Iterations of the whole.
        warmup_min_ratio: The first share of the rates.
        warmup_num_steps: Iterations of the warm-up, 2 at least.
        cos_min_ratio: The last share of the rates.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: The last iteration made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._configure(warmup_num_steps, warmup_type)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """Returns the rates of the last iteration made."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Returns the share of the full rates."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._warm() * (1.0 - self.warmup_min_ratio)
        made = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, made / max(1, self.total_num_steps - self.warmup_num_steps))
        share = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * share)


class LRRangeTest(Schedule):
    """A rate that grows at a constant pace, to find the largest that works.

    Args:
        optimizer: Whose groups are written.
        lr_range_test_min_lr: The first rate.
        lr_range_test_step_size: Iterations of one increase.
        lr_range_test_step_rate: How much of the first rate one increase is.
        lr_range_test_staircase: In stairs, not continuously.
        last_batch_iteration: The last iteration made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Value = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size <= 0:
            raise ValueError(
                f"lr_range_test_step_size={lr_range_test_step_size!r}: it must be more than 0"
            )
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        """Returns the rates of the last iteration made."""
        interval = float(self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        increase = 1 + self.step_rate * interval
        return [rate * increase for rate in self.min_lr]
