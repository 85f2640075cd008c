"""What is done to gradients before a step: they are unscaled and clipped."""

from __future__ import annotations

import math

import torch

from tiermem import TieredOptimizer

from . import mapping
from .mapping import Plan


class Clipping:
    """Clips the norm of the gradients as DeepSpeed does.

    Attributes:
        limit: The most that the norm may be; 0 for no limit.
        norm: The norm in the last step, 0-d; None if it was not needed.
    """

    def __init__(self, plan: Plan) -> None:
        """Uses the configuration of a plan."""
        self.limit = float(plan.config["gradient_clipping"])
        self.norm: torch.Tensor | None = None
        self._needed = mapping.needs_norm(plan.config)
        self._plain = plan.dtype is None

    def unscale_and_clip(self, optimizer: TieredOptimizer, scale: float) -> bool:
        """Unscales and clips the gradients; returns whether one is infinite or NaN.

        If there are masters, norm and factor are float32, as if the masters' gradients were
        clipped.

        Args:
            optimizer: The optimizer of the gradients.
            scale: The scale of the loss.
        """
        self.norm = None
        if not self.limit > 0 and not self._needed:
            return False
        if self._plain:
            self.norm = optimizer.clip_grad_norm_(self.limit)
            return False
        norm = optimizer.grad_norm(dtype=torch.float32)
        self.norm = norm = norm if scale == 1.0 else norm / scale
        if self._needed and not math.isfinite(found := float(norm)):
            return True
        if self.limit > 0:
            factor = torch.clamp(self.limit / (norm + 1e-6), max=1.0)
            clips = not self._needed or found * 1.00001 + 1e-5 > self.limit
            if scale != 1.0 or clips:  # a factor of 1 need not be applied
                optimizer.grad_factor = factor / scale
        elif scale != 1.0:
            optimizer.grad_factor = torch.full_like(norm, 1.0 / scale)
        return False
