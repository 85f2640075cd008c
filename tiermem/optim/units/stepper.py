"""The interface for performing the steps of a unit on the host."""

from __future__ import annotations

from typing import Protocol

import torch


class Stepper(Protocol):
    """Steps a unit elsewhere than on the device."""

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that the plain optimizer gets instead of a parameter."""
        ...
