"""What a unit knows of who steps it elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch


class Stepper(Protocol):
    """Steps a unit somewhere else than on the device."""

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns what the plain optimizer is given in place of a parameter."""
        ...
