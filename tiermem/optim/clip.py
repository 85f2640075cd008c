"""Clipping of gradients in the tiers, with torch's own arithmetic and order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from tiermem.nn.compat.outside import on_purpose
from tiermem.nn.groups.gradunit import Change, Measure
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.norms import Kind, measure_of
from tiermem.optim.units.unit import StepUnit


def total_norm(
    norms: Sequence[torch.Tensor], like: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """Returns the norm of all gradients together, from the norm of each.

    Args:
        norms: One per gradient, 0-d, in the order of the parameters.
        like: Tensors with the gradients' devices and dtypes, in the same order; torch sums by
            device and dtype, and the last bit of a sum depends on its order.
        norm_type: Which norm.
    """
    if not norms:
        return torch.tensor(0.0)
    grouped = _group_tensors_by_device_and_dtype([list(like)], with_indices=True)
    order = [index for _, indices in grouped.values() for index in indices]
    first = norms[0].device
    stacked = torch.stack([norms[i].to(first) for i in order])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total


def scale(tensors: Sequence[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiplies gradients in place, by the kernels that ``clip_grad_norm_`` would use."""
    grouped = _group_tensors_by_device_and_dtype([list(tensors)])
    for (device, _), ([found], _) in grouped.items():
        alike = [tensor for tensor in found if tensor is not None]
        moved = factor.to(device)
        if (foreach is None and _has_foreach_support(alike, device)) or (
            foreach and _device_has_foreach_support(device)
        ):
            torch._foreach_mul_(alike, moved)
            continue
        for tensor in alike:
            tensor.mul_(moved)


def clamp(tensors: Sequence[torch.Tensor], limit: float) -> None:
    """Clamps gradients in place to ``[-limit, limit]``."""
    for tensor in tensors:
        tensor.clamp_(-limit, limit)


def change_all(runtime: ModuleRuntime, units: Sequence[StepUnit], change: Change) -> None:
    """Changes all gradients of some units, or, if interrupted, none of those in the tiers.

    Ordinary ones come last, and all together: a ``foreach`` kernel changes all or none.
    """
    try:
        for unit in units:
            unit.change_stored(runtime, change)
        loose = [gradient for unit in units for gradient in unit.loose()]
        if loose:
            change(loose)
    except BaseException:
        for unit in units:
            unit.unchange(change)
        raise


@cache
def _like(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor without elements, with a device and dtype."""
    return torch.empty(0, dtype=dtype, device=device)


class Norms:
    """The norms of one optimizer's gradients, and clipping by them.

    Once a kind of norm has been needed, it is computed for every gradient that arrives in the
    tiers, on the device, while the gradient is in HBM. If another micro-batch is added to the
    gradient, the norm is computed again; if other code writes it, the norm is dropped. So clipping
    need not fetch all gradients.

    Attributes:
        measure: The function that computes the last kind of norm, or None.
        taken: How many norms of the last total were known from backward.
        swept: How many had to be computed in a sweep.
    """

    def __init__(self, runtime: ModuleRuntime, number: int) -> None:
        """Handles the norms of the optimizer with this number."""
        self._runtime = runtime
        self._number = number
        self.measure: Measure | None = None
        self.taken = self.swept = 0
        runtime.grads.norms.add(self)

    def close(self, units: Sequence[StepUnit]) -> None:
        """Ends this optimizer's norms, except those that another optimizer needs, too."""
        self._runtime.grads.norms.remove(self, [e for unit in units for e in unit.entries])

    def forget(self, units: Sequence[StepUnit]) -> None:
        """Forgets the measured norms."""
        self._runtime.grads.norms.invalidate([e for unit in units for e in unit.entries])

    def clip(
        self,
        units: Sequence[StepUnit],
        params: Sequence[torch.Tensor],
        max_norm: float,
        kind: Kind,
        *,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """Clips the norm of all gradients together; the factor is applied when next in HBM.

        Args:
            units: The units of the gradients.
            params: Their parameters, in torch's order.
            max_norm: The most that the norm may be.
            kind: The kind of norm.
            error_if_nonfinite: Whether to raise if it is not finite.

        Returns:
            The norm before clipping, 0-d.

        Raises:
            RuntimeError: If it is not finite and ``error_if_nonfinite``; nothing is changed.
        """
        total = self.total(units, params, kind)
        if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
            error = RuntimeError(
                f"The total norm of order {kind[0]} for gradients is non-finite, so it "
                "cannot be clipped; call it with error_if_nonfinite=False to go on"
            )
            raise on_purpose(error)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        used = any(self._runtime.grads.is_used(e) for unit in units for e in unit.entries)
        if used and bool(factor == 1):  # on CUDA the host waits for it
            return total
        change_all(self._runtime, units, partial(scale, factor=factor, foreach=kind[1]))
        return total

    def total(
        self, units: Sequence[StepUnit], params: Sequence[torch.Tensor], kind: Kind
    ) -> torch.Tensor:
        """Returns the norm of all gradients together, 0-d.

        Args:
            units: The units of the gradients.
            params: Their parameters, in torch's order.
            kind: The kind of norm.
        """
        grads = self._runtime.grads
        measure = self._measure_for(units, kind)
        norms: dict[int, torch.Tensor] = {}
        dtypes: dict[int, torch.dtype] = {}

        def sweep(param: torch.Tensor, gradient: torch.Tensor) -> None:
            norms[id(param)] = measure(gradient)
            dtypes[id(param)] = gradient.dtype

        for unit in units:
            unit.sync(self._runtime)
        known = {
            id(e) for u in units for e in u.entries if grads.norms.known(e, measure) is not None
        }
        if any(e.has_grad and id(e) not in known for u in units for e in u.entries):
            self._runtime.manager.begin_pass(("clip", self._number), [])
        for unit in units:
            for entry in unit.entries:
                norm = grads.norms.known(entry, measure)
                if norm is not None and entry.unit is not None:
                    norms[id(entry.param)] = norm
                    spec = entry.unit.block.tensors[entry.unit_index]
                    dtypes[id(entry.param)] = spec.dtype  # type: ignore[assignment]
            unit.each_gradient(self._runtime, sweep, but=known)
        self.taken, self.swept = len(known), len(norms) - len(known)
        found = [p for p in params if id(p) in norms]
        like = [_like(kind[2] or dtypes[id(p)], p.device) for p in found]
        return total_norm([norms[id(p)] for p in found], like, kind[0])

    def _measure_for(self, units: Sequence[StepUnit], kind: Kind) -> Measure:
        """Returns the function that computes a norm, and registers it for further gradients."""
        self.measure = measure_of(kind)
        self._runtime.grads.norms.ask((e for u in units for e in u.entries), self.measure)
        return self.measure
