"""Comparing steps bit for bit."""

from __future__ import annotations

import torch

SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 3.4e38)
"""Values for which two kernels may give different bits, for trials."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as one run."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
