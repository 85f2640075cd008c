"""The interface of what steps a unit on the host."""

from __future__ import annotations

from typing import Protocol

import torch


class Stepper(Protocol):
    """Steps a unit somewhere else than on the device."""

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns what the plain optimizer is given in place of a parameter."""
        ...
