"""What the layout needs to know of a torch tensor."""

from __future__ import annotations

import torch

from tiermem.core.layout import TensorShape


def shape_of(name: str, tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> TensorShape:
    """Describes a tensor for packing.

    Args:
        name: For messages.
        tensor: Its shape, strides and dtype are used, not its bytes.
        stride: Strides to use instead of the tensor's own.
    """
    return TensorShape(
        name,
        tuple(tensor.shape),
        tuple(tensor.stride()) if stride is None else stride,
        tensor.dtype,
        tensor.dtype.itemsize,
    )
