"""Changes that a step first applies to gradients: a GradScaler's scale, a factor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from tiermem.errors import StepError


@dataclass(frozen=True, slots=True)
class Scaling:
    """A scale that gradients still have, and whether one of them is not finite.

    Attributes:
        grad_scale: Their factor, 0-d; None if it has already been undone.
        found_inf: 1.0 if a gradient has an infinity or a NaN, 0-d; None if that is unknown.
        factor: A factor still to be applied to gradients, 0-d, or None.
    """

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    factor: torch.Tensor | None = None

    @classmethod
    def of(cls, optimizer: object) -> Scaling | None:
        """Returns the scale set as attributes of an optimizer for the step under way.

        Raises:
            StepError: If the factor is no 0-d tensor.
        """
        given = getattr(optimizer, "grad_factor", None)
        if given is not None and not (isinstance(given, torch.Tensor) and given.dim() == 0):
            raise StepError(f"optimizer.grad_factor={given!r}: it must be None or a 0-d tensor")
        names = ("grad_scale", "found_inf", "grad_factor")
        put = [getattr(optimizer, name, None) for name in names]
        # a scaler that has seen no gradient sets an empty sum, which is not a tensor
        put = [value if isinstance(value, torch.Tensor) else None for value in put]
        return None if all(value is None for value in put) else cls(*put)

    def frozen(self) -> Scaling:
        """Returns a copy with its own tensors; the scaler writes its scale in place."""
        put = (self.grad_scale, self.found_inf, self.factor)
        return Scaling(*(None if t is None else t.clone() for t in put))

    def on_host(self) -> Scaling:
        """Returns a copy in host memory, for the host's steps."""
        scale, factor = (None if t is None else t.cpu() for t in (self.grad_scale, self.factor))
        return Scaling(scale, None, factor)

    @property
    def is_factor(self) -> bool:
        """Whether there is only a factor, which does not come from a GradScaler."""
        return self.grad_scale is None and self.found_inf is None

    @property
    def changes_nothing(self) -> bool:
        """Whether it is only a factor of one; waits for the device."""
        return self.is_factor and self.factor is not None and bool(self.factor == 1)

    @property
    def skips(self) -> bool:
        """Whether the step is skipped; waits for the device."""
        return self.found_inf is not None and bool(self.found_inf.item())

    def unscale(self, params: Sequence[torch.Tensor], fresh: Collection[torch.Tensor] = ()) -> None:
        """Divides gradients by the scale, as ``GradScaler.unscale_`` does; then the factor.

        Args:
            params: The parameters with these gradients.
            fresh: Those whose gradients are not shared: these are written in place.
        """
        if self.grad_scale is not None:
            _multiply(params, self.grad_scale.double().reciprocal().float(), fresh)
        self.apply_factor(params, fresh)

    def apply_factor(
        self, params: Sequence[torch.Tensor], fresh: Collection[torch.Tensor] = ()
    ) -> None:
        """Multiplies gradients by the factor; arguments as for :meth:`unscale`."""
        if self.factor is not None:
            _multiply(params, self.factor, fresh)


def _multiply(
    params: Sequence[torch.Tensor], factor: torch.Tensor, fresh: Collection[torch.Tensor]
) -> None:
    alone = {id(param) for param in fresh}
    together: list[torch.Tensor] = []
    for param in params:
        if param.grad is None:
            continue
        by = factor.to(param.grad.device)
        if id(param) not in alone:
            param.grad = param.grad * by
        elif param.grad.dtype is by.dtype and by.device == factor.device:
            together.append(param.grad)
        else:
            param.grad.mul_(by)
    if together:
        torch._foreach_mul_(together, factor)
