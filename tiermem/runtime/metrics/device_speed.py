"""The speed of a device, from its properties: for plans before anything is measured."""

from __future__ import annotations

import torch

_PER_CYCLE = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 2048}
"""Operations per cycle and multiprocessor on matrices of two-byte elements, by major compute
capability: NVIDIA's white papers of V100, A100, H100, B200 and RTX 50."""
_SMALL = {(8, 6): 1024, (8, 7): 1024, (8, 9): 1024, (7, 5): 512}
"""Exceptions for minor versions: consumer and embedded devices."""
_CLOCK = 1.5e6
"""Clock in kilohertz if a device does not report it."""
_REACHED = 0.6
"""The fraction of it that matrices of usual sizes reach."""


def flops_of(device: torch.device) -> float:
    """Returns the bf16 operations per second to expect of a device; 0 if unknown."""
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.get_device_properties(device)
    per_cycle = _SMALL.get((found.major, found.minor)) or _PER_CYCLE.get(found.major, 0)
    clock = getattr(found, "clock_rate", 0) or _CLOCK
    return float(_REACHED * per_cycle * found.multi_processor_count * clock * 1e3)
