"""What loops ask an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem import ConfigError, TieredOptimizer

from .mapping import Plan
from .scaling import LossScale


class Queries(nn.Module):
    """The part of an engine that only answers.

    Attributes:
        plan: What the configuration became.
        optimizer: In the tiers, or None.
        scaler: Of the loss, or None.
    """

    plan: Plan
    optimizer: TieredOptimizer | None
    scaler: LossScale | None
    _norm: torch.Tensor | None
    _step_applied: bool
    _clip: float

    def gradient_accumulation_steps(self) -> int:
        """Returns the backwards of a step."""
        return self.plan.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the samples of a backward."""
        return self.plan.micro

    def train_batch_size(self) -> int:
        """Returns the samples of a step."""
        return self.plan.batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples of a step, by the number of backwards.

        Raises:
            ConfigError: If it is no multiple of a backward's.
        """
        if train_batch_size % self.plan.micro:
            raise ConfigError(
                f"train_batch_size={train_batch_size}: it must be a multiple of "
                f"train_micro_batch_size_per_gpu={self.plan.micro}"
            )
        self.plan.batch = train_batch_size
        self.plan.accumulation = train_batch_size // self.plan.micro

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the last step's gradients before clipping; None if not taken."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Returns betas, or the momentum, of each group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def _of_groups(self, key: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(key, 0.0) for group in groups]

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the weights."""
        return self._step_applied

    def loss_scale(self) -> float:
        """Returns the loss scale; 1 where there is none."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def gradient_clipping(self) -> float:
        """Returns the most that the norm may be; 0 for any."""
        return self._clip

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage of the configuration."""
        return self.plan.stage

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is more than 0."""
        return self.plan.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether weights are float16."""
        return self.plan.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bfloat16."""
        return self.plan.dtype is torch.bfloat16
