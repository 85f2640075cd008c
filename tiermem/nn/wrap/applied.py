"""``module.to()``, ``half()``, ``share_memory()`` and the like, for tensors not in HBM.

All of them are ``module._apply(fn)``. If ``fn`` changes no tensor, nothing is done, as with a
resident module (trainers call ``model.to(device)`` for any model); anything else is refused,
before any tensor is changed. To find out, ``fn`` is called with small tensors like those of the
module: of the same dtype and device, with the same layout, and at most two elements in each
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tiermem.errors import ParameterError
from tiermem.nn.wrap.scope import Interceptor

Fn = Callable[[torch.Tensor], torch.Tensor]


class ApplyInterceptor(Interceptor):
    """Refuses ``_apply`` if it would change a tensor that lives in the tiers."""

    __slots__ = ()

    method = "_apply"

    def __call__(self, fn: Fn, recurse: bool = True) -> Any:
        """Returns the module if ``fn`` changes nothing that is managed.

        Other tensors (sparse buffers, for example) become the results of ``fn``.

        Raises:
            ParameterError: If it changes a managed tensor; nothing is changed then.
        """
        managed, device = self.scope.wrapped.managed(), self.runtime.manager.parts.device
        tried: set[Any] = set()
        ours = list(self._tensors(recurse))
        for name, _, _, tensor in ours:
            if id(tensor) not in managed:
                continue
            shape, stride = _small(tensor)
            key = shape, stride, tensor.dtype, isinstance(tensor, torch.nn.Parameter)
            if key not in tried:
                tried.add(key)
                _try(fn, name, torch.empty_strided(shape, stride, dtype=key[2], device=device))
        with torch.no_grad():
            for _, holder, own, tensor in ours:
                if id(tensor) in managed:
                    continue
                if isinstance(tensor, torch.nn.Parameter):  # a parameter added after wrap
                    _apply_to(tensor, fn)
                else:
                    holder[own] = fn(tensor)
        return self.module

    def _tensors(self, recurse: bool) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
        """Yields qualified name, dictionary, name there, and tensor."""
        modules = self.module.named_modules() if recurse else [("", self.module)]
        for prefix, module in modules:
            for holder in (module._parameters, module._buffers):
                for own, tensor in list(holder.items()):
                    if tensor is not None:
                        yield f"{prefix}.{own}" if prefix else own, holder, own, tensor


def _apply_to(param: torch.nn.Parameter, fn: Fn) -> None:
    """Does the same as ``nn.Module._apply`` with a parameter that is not managed."""
    param.data = fn(param.data)
    if param.grad is not None:
        grad = fn(param.grad)
        param.grad = grad.requires_grad_(param.grad.requires_grad)


def _small(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns shape and strides of a small tensor with the layout of a large one."""
    shape = tuple(min(size, 2) for size in tensor.shape)
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (tensor.stride(d), tensor.shape[d])):
        stride[dim], step = step, step * max(shape[dim], 1)
    return shape, tuple(stride)


def _try(fn: Fn, name: str, probe: torch.Tensor) -> None:
    """Refuses ``fn`` if it does anything to a tensor.

    Raises:
        ParameterError: If it does.
    """
    probe.zero_()
    before = _looks(probe)
    with torch.no_grad():
        changed = fn(probe)
    if isinstance(changed, torch.Tensor) and _looks(probe) == before:
        same = 5 if _is_to_host(fn) else len(before)
        if _looks(changed)[:same] == before[:same]:
            return
    into = "something else"
    if isinstance(changed, torch.Tensor):
        into = f"{changed.dtype} on {changed.device}"
        if changed.dtype is before[0] and changed.device == before[1]:
            into = "another tensor (another memory format, shared or empty memory, other values)"
    raise ParameterError(
        f"parameter or buffer {name!r} lives in the tiers as {before[0]} on {before[1]}: to(), "
        f"half(), cpu(), share_memory() and the like cannot make it {into}; do that before "
        "tier.wrap, or call tier.unwrap(model) first (with device= for another device)"
    )


def _is_to_host(fn: Fn) -> bool:
    """Whether ``fn`` is that of ``module.to("cpu:0")``.

    On the host torch copies for it, although the tensor is on that device already.
    """
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    cells = getattr(fn, "__closure__", None) or ()
    if "device" not in names or "non_blocking" not in names:  # to_empty() has no `non_blocking`
        return False
    return bool(cells[names.index("device")].cell_contents == torch.device("cpu", 0))


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns everything about a tensor that ``fn`` might change; five are there in a copy, too."""
    return (
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.layout,
        tensor.data_ptr(),
        tensor._version,
        tensor.device.type == "cpu" and tensor.is_shared(),
    )
