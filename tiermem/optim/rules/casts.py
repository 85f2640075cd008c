"""Gradients in another dtype, in memory that is reused."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

_ALIGNMENT = 64


class Casts(threading.local):
    """Memory for casts on the host, one per thread, as large as its largest use.

    Fresh memory for every cast is mapped and cleared by the kernel page by page: for 16 Mi
    elements that took 40 ms here, the cast itself 2 and AdamW's fused step 8.
    """

    def __init__(self) -> None:
        """Starts without memory."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __call__(
        self, tensors: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor | None]:
        """Casts tensors in host memory; the results are valid until this thread's next call.

        Args:
            tensors: Any shapes; None stays None.
            dtypes: Dtypes of the results.

        Returns:
            The tensors themselves if they have the dtype already, otherwise casts with their
            values; one that is not contiguous gets separate memory.
        """
        places = []
        nbytes = 0
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            if tensor is None or tensor.dtype is dtype or not tensor.is_contiguous():
                places.append(-1)
                continue
            places.append(nbytes)
            size = tensor.numel() * dtype.itemsize
            nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        found: list[torch.Tensor | None] = []
        for tensor, dtype, place in zip(tensors, dtypes, places, strict=True):
            if tensor is None or place < 0:
                found.append(None if tensor is None else tensor.to(dtype))
                continue
            size = tensor.numel() * dtype.itemsize
            target = self._memory[place : place + size].view(dtype).view(tensor.shape)
            found.append(target.copy_(tensor))
        return found


cast = Casts()
"""The instance for all steps on the host."""
