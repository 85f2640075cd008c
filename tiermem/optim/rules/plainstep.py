"""The step of a plain torch optimizer, with what a GradScaler left to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tiermem.nn.compat.outside import outside
from tiermem.optim.rules.adamstep import step_at_once
from tiermem.optim.rules.scaling import Scaling

_AUTOGRAD: Any = torch.autograd
_BASE: Any = torch.optim.Optimizer
_WRAPPER = _BASE.profile_hook_step(lambda self: None).__code__
"""What torch puts around each class's ``step``: it reports it to the profiler, and calls hooks.

If there are few tensors, it costs as much as the step itself.
"""


def run(optimizer: torch.optim.Optimizer) -> None:
    """Does what ``optimizer.step()`` does, without parts that have no effect.

    The class's own ``step`` is called without torch's wrapper if no hook is registered, the
    profiler is off, and ``step`` has not been replaced. Hooks for all optimizers are
    called around the step of the tiered one, as around any; calling them again for each unit would
    be too often.
    """
    if not is_bare(optimizer):
        optimizer.step()
        return
    inner: Callable[[torch.optim.Optimizer], Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    if not step_at_once(optimizer, inner):
        inner(optimizer)


def is_bare(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing observes ``optimizer.step()``, and it is its class's own."""
    return (
        getattr(type(optimizer).step, "__code__", None) is _WRAPPER
        and "step" not in optimizer.__dict__
        and not _AUTOGRAD._profiler_enabled()
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and type(optimizer)._optimizer_step_code is _BASE._optimizer_step_code
    )


def run_unseen(optimizer: torch.optim.Optimizer) -> None:
    """Does what ``optimizer.step()`` does; hooks for the steps of all optimizers are not called.

    Args:
        optimizer: One that is only tried: its step is not part of the user's program.
    """
    step = type(optimizer).step
    if (
        getattr(step, "__code__", None) is not _WRAPPER
        or "step" in optimizer.__dict__
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    ):
        outside(optimizer.step)
        return
    outside(step.__wrapped__, optimizer)  # type: ignore[attr-defined]


def undoes_scale(optimizer: torch.optim.Optimizer, scaling: Scaling | None) -> bool:
    """Whether the class itself undoes a scale of the gradients that it gets."""
    if scaling is None or (scaling.grad_scale is None and scaling.found_inf is None):
        return False
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def run_scaled(
    optimizer: torch.optim.Optimizer,
    scaling: Scaling,
    owns: Sequence[torch.Tensor],
    fresh: Collection[torch.Tensor] = (),
) -> bool:
    """Performs a step with gradients that have a scale.

    Args:
        optimizer: The plain one.
        scaling: The scale, and whether a gradient is not finite.
        owns: The tensors that the optimizer steps.
        fresh: Those whose gradients are not shared: these are written in place.

    Returns:
        Whether it was left to the optimizer, which undoes the scale in the gradients itself.
    """
    if not undoes_scale(optimizer, scaling):
        given = [own.grad for own in owns]
        scaling.unscale(owns, fresh)
        try:
            run(optimizer)
        finally:
            if scaling.is_factor:  # it is the step's alone, also where a gradient is the program's
                for own, gradient in zip(owns, given, strict=True):
                    own.grad = gradient
        return False
    scaling.apply_factor(owns, fresh)
    optimizer.grad_scale = scaling.grad_scale  # type: ignore[attr-defined]
    optimizer.found_inf = scaling.found_inf  # type: ignore[attr-defined]
    try:
        run(optimizer)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return True
