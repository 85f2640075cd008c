"""Placeholders: a parameter's data while its block is not in HBM; they cannot be read.

Shape, dtype and device are correct. Any access to the bytes raises an error of torch
(:mod:`tiermem.nn.compat.refusing`). A placeholder has the memory of one element, with all bits set,
which is NaN: on a torch without that switch, a use that was not intercepted is at least visible.
The same holds while torch's profiler records shapes, as it asks every operand of every operation
for its address (:mod:`tiermem.nn.tensors.profiled`).

Placeholders of members of blocks have the strides of the weight as well. C++ code uses them: a
``DistributedDataParallel`` compares them between processes, where other blocks may be in HBM, and
its reducer uses them to lay out gradients and to copy them back.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.compat.refusing import OURS, permit, refuse

_TEXT = (
    OURS + " {what} of shape {shape} and dtype {dtype} were asked for while they were not "
    "in HBM: it belongs to a wrapped model, and code that torch does not show to tiermem has kept "
    "the tensor itself. Call that code inside `with tier.materialize(module)`, where parameters "
    "are ordinary tensors, or give it a clone"
)
_Stride = tuple[int, ...]
_Key = tuple[torch.Size, torch.dtype, torch.device, _Stride | None]
_shared: WeakValueDictionary[_Key, torch.Tensor] = WeakValueDictionary()
_storages: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""The shared placeholders by the address of their storage."""
_readable = False


def poison_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a new 0-d tensor with every bit set (True for bool)."""
    with unrecorded():
        if dtype is torch.bool:
            return torch.ones((), dtype=dtype, device=device)
        # created there: a copy from ordinary host memory would wait for the device
        raw = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        return raw.view(dtype).reshape(())


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a placeholder, regardless of its class.

    Args:
        tensor: Any tensor, on any device; its bytes are not read.
    """
    if not tensor.numel():
        return False
    storage = tensor.untyped_storage()
    try:
        storage.data_ptr()
    except RuntimeError:  # reading is refused
        return True
    return storage._cdata in _storages  # on a torch that cannot, and while they can be read


def placeholder(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, stride: _Stride | None = None
) -> torch.Tensor:
    """Returns a tensor of this shape that takes one element of memory and cannot be read.

    Args:
        shape: Its sizes.
        dtype: Its dtype.
        device: The device that it shows.
        stride: Its strides; None if nothing uses them. On a torch that cannot
            refuse they are 0, since it would read beyond the element.
    """
    with unrecorded():
        found = poison_element(dtype, device).expand(shape)
        if _refuse(found) and stride is not None:
            found = torch.ops.aten._reshape_alias(found, shape, stride)
    return found


def _refuse(found: torch.Tensor) -> bool:
    """Refuses reads of a placeholder; returns whether this torch can do that."""
    if not found.numel():
        return True  # an empty one has no bytes to read
    shape, dtype = tuple(found.shape), found.dtype
    return refuse(found, _TEXT.format(what="parameter or gradient", shape=shape, dtype=dtype))


def shared_placeholder(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, stride: _Stride | None = None
) -> torch.Tensor:
    """Returns a placeholder that all callers share; arguments as for :func:`placeholder`.

    Layers are alike, and a shared object is in the processor's caches. Callers set
    ``data`` to it, or create a subclass of it; both copy its metadata.
    """
    key = (shape, dtype, device, stride)
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = placeholder(shape, dtype, device, stride)
        _storages[found.untyped_storage()._cdata] = found
        if _readable:
            permit(found)
    return found


def let_be_read(readable: bool) -> None:
    """Permits or refuses reads of shared placeholders, as NaN, including future ones."""
    global _readable
    _readable = readable
    for found in list(_shared.values()):
        (permit if readable else _refuse)(found)
