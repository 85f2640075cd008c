"""The factor of a clipping, copied to the host: the thread that steps there waits for it."""

from __future__ import annotations

import torch

from tiermem.runtime.base.functorch import outside_inference


class Factor:
    """A factor for gradients, which the device may still have to compute.

    Its copy to the host is submitted immediately, so that later work does not delay it, and the
    submitting thread does not wait.

    Attributes:
        dtype: Dtype of the factor.
    """

    __slots__ = ("_event", "_here", "dtype")

    def __init__(self, by: torch.Tensor) -> None:
        """Submits the copy of a factor.

        Args:
            by: One element, computed in the current stream.
        """
        self.dtype = by.dtype
        self._event: torch.cuda.Event | None = None
        with outside_inference(), torch.no_grad():
            on_cuda = by.device.type == "cuda"
            self._here = torch.empty(1, dtype=by.dtype, pin_memory=on_cuda, device="cpu")
            self._here.copy_(by.reshape(1), non_blocking=on_cuda)
            if on_cuda:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(by.device))

    def value(self) -> float:
        """Returns the factor; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._here)
