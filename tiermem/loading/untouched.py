"""Parameters that take no memory until something is written to them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiermem.core.block import align_up

_EACH = 64
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Mappings not counted as memory in use until touched; named in Python from 3.11 on."""
_building = threading.Lock()


@contextmanager
def parameters_on_meta(**attributes: Any) -> Iterator[None]:
    """Modules created inside have their parameters on the meta device; buffers are real.

    Only one thread may use it at a time: it changes ``nn.Module``.

    Args:
        **attributes: Attributes to set on each parameter.
    """
    with _building:
        register = nn.Module.register_parameter

        def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(self, name, param)
            made = self._parameters.get(name)
            if made is not None and not made.is_meta:
                on = self._parameters[name] = _like(made, made.detach().to("meta"))
                on.__dict__.update(attributes)

        nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _like(tensor: torch.Tensor, data: torch.Tensor) -> Any:
    """Returns a parameter or buffer of the same kind with other data."""
    if not isinstance(tensor, nn.Parameter):
        return data
    made = type(tensor)(data, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


class Untouched:
    """Gives a model's meta tensors addresses of memory that was never touched.

    Args:
        model: Its meta parameters and buffers are replaced, tied ones by one tensor; :meth:`undo`
            restores them.
        dtypes: Dtypes that parameters get instead of their own, by id.
    """

    def __init__(self, model: nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                named = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
                self._places += [(tensors, name, t) for name, t in named if t.is_meta]
        unique = {id(tensor): tensor for _, _, tensor in self._places}
        made = _placed(unique, {key: dtypes.get(key, t.dtype) for key, t in unique.items()})
        for tensors, name, tensor in self._places:
            tensors[name] = made[id(tensor)]
        for param in model.parameters():
            dtype = dtypes.get(id(param), param.dtype)
            if dtype is not param.dtype:
                self._data.append((param, param.data))
                param.data = param.data.to(dtype)

    def undo(self) -> None:
        """Restores everything."""
        for tensors, name, tensor in self._places:
            tensors[name] = tensor
        for param, data in self._data:
            param.data = data


def _placed(
    tensors: Mapping[int, torch.Tensor], dtypes: Mapping[int, torch.dtype]
) -> dict[int, Any]:
    """Returns tensors like some on the meta device, with dtypes given by the same keys."""
    total, offsets = 0, {}
    for key, tensor in tensors.items():
        offsets[key] = total
        total = align_up(total + max(1, tensor.numel()) * dtypes[key].itemsize, _EACH)
    if not total:
        return {}
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, total, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    made = {}
    for key, tensor in tensors.items():
        count = max(1, tensor.numel())
        flat = torch.frombuffer(memory, dtype=dtypes[key], count=count, offset=offsets[key])
        data = flat[: tensor.numel()].as_strided(tensor.shape, tensor.stride())
        made[key] = _like(tensor, data)
    return made
