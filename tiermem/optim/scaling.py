"""What a GradScaler leaves to the step of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scaling:
    """A scale that gradients still have, and whether one of them is not finite.

    Attributes:
        grad_scale: What they were multiplied by, 0-d; None where that is undone already.
        found_inf: 1.0 if a gradient has an infinity or a NaN, 0-d; None where nobody looked.
    """

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    @classmethod
    def of(cls, optimizer: object) -> Scaling | None:
        """Returns what a GradScaler has put on an optimizer for the step under way."""
        scale = getattr(optimizer, "grad_scale", None)
        found = getattr(optimizer, "found_inf", None)
        return None if scale is None and found is None else cls(scale, found)

    def frozen(self) -> Scaling:
        """Returns the same with tensors of its own; the scaler writes its scale in place."""
        copies = [None if t is None else t.clone() for t in (self.grad_scale, self.found_inf)]
        return Scaling(*copies)

    @property
    def skips(self) -> bool:
        """Whether the step is left out; waits for the device."""
        return self.found_inf is not None and bool(self.found_inf.item())

    def unscale(self, params: Sequence[torch.Tensor]) -> None:
        """Divides gradients by the scale, with the factor that ``GradScaler.unscale_`` uses."""
        if self.grad_scale is None:
            return
        factor = self.grad_scale.double().reciprocal().float()
        for param in params:
            if param.grad is not None:
                param.grad = param.grad * factor.to(param.grad.device)
