"""``deepspeed.ops.lamb``."""

from __future__ import annotations

from ..optimizers import FusedLamb

__all__ = ["FusedLamb"]
