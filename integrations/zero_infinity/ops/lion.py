"""``deepspeed.ops.lion``."""

from __future__ import annotations

from ..optimizers import FusedLion

DeepSpeedCPULion = FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
