"""``deepspeed.ops.adam``."""

from __future__ import annotations

from ..optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
