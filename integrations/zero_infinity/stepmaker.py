"""Steps with the gradients of a scaled loss, and when they are skipped."""

from __future__ import annotations

import torch

from tiermem import TieredOptimizer

from .clipping import Clipping
from .mapping import Plan
from .scaling import LossScale


class StepMaker:
    """Multiplies losses by the loss scale, and steps with unscaled and clipped gradients.

    Attributes:
        scaler: The loss scale, or None.
        clipping: The clipping of gradients.
        client: The user's own optimizer, which a tiered one replaces, or None.
    """

    def __init__(self, plan: Plan) -> None:
        """Uses the configuration of a plan."""
        self.scaler = LossScale.of(plan.config)
        self.clipping = Clipping(plan)
        self.client: torch.optim.Optimizer | None = None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss times the loss scale."""
        return loss if self.scaler is None else loss.float() * self.scaler.scale

    def make(self, optimizer: TieredOptimizer) -> bool:
        """Performs a step unless a gradient is infinite or NaN; returns whether it did.

        Args:
            optimizer: The optimizer that steps; its gradients are cleared afterwards.

        Raises:
            StepError: If the loss scale can go no lower.
        """
        scale = 1.0 if self.scaler is None else self.scaler.scale
        overflow = self.clipping.unscale_and_clip(optimizer, scale)
        if not overflow:
            optimizer.step()
            if self.client is not None:  # which torch's schedulers look at
                self.client._opt_called = True  # type: ignore[attr-defined]
        optimizer.zero_grad()
        optimizer.__dict__["overflow"] = overflow
        if self.scaler is not None:
            self.scaler.update(overflow)
            self.show_scale(optimizer)
        return not overflow

    def show_scale(self, optimizer: TieredOptimizer | None) -> None:
        """Sets the loss scale as attributes of the optimizer, as DeepSpeed does."""
        if optimizer is not None and self.scaler is not None:
            shown = {"loss_scale": self.scaler.scale, "cur_scale": self.scaler.scale}
            optimizer.__dict__.update(shown)
