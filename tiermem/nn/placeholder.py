"""What a parameter holds while its block is elsewhere: one poisoned element, expanded.

Shape, dtype and device stay right, reading gives NaN (all bits set), and most
writes are refused by torch because the elements share memory. So a use of
weights that are not there shows at once.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from tiermem.nn.quiet import unrecorded

_kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
_shared: WeakValueDictionary[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = (
    WeakValueDictionary()
)


def poison_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a 0-d tensor with every bit set (True for bool)."""
    key = (dtype, device)
    element = _kept.get(key)
    if element is None:
        with unrecorded():
            if dtype is torch.bool:
                element = torch.ones((), dtype=dtype, device=device)
            else:
                raw = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8)
                element = raw.view(dtype).reshape(()).to(device)
        _kept[key] = element
    return element


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor, looked at with its own class aside, is one of these."""
    if not tensor.numel():
        return False
    element = poison_element(tensor.dtype, tensor.device)
    return tensor.data_ptr() == element.data_ptr()


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of this shape that takes one element of memory and reads as poison."""
    with unrecorded():
        return poison_element(dtype, device).expand(shape)


def shared_placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the same, one tensor for all who ask for it.

    Layers are alike, and what was just looked at is in the processor's caches. For who sets
    ``data`` to it, or makes a subclass of it, which both copy what it says of itself.
    """
    key = (shape, dtype, device)
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = placeholder(shape, dtype, device)
    return found
