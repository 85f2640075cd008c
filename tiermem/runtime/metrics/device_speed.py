"""How fast a device computes, by what it says of itself: for plans before anything is measured."""

from __future__ import annotations

import torch

_PER_CYCLE = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 2048}
"""Operations a cycle and multiprocessor on matrices of two bytes an element, by major compute
capability: NVIDIA's white papers of V100, A100, H100, B200 and RTX 50."""
_SMALL = {(8, 6): 1024, (8, 7): 1024, (8, 9): 1024, (7, 5): 512}
"""Where it is another number for the minor one: consumer and embedded devices."""
_CLOCK = 1.5e6
"""Kilohertz where a device does not say."""
_REACHED = 0.6
"""What matrices of usual sizes reach of it."""


def flops_of(device: torch.device) -> float:
    """Returns operations a second to expect of a device for bf16; 0 where nothing is known."""
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.get_device_properties(device)
    per_cycle = _SMALL.get((found.major, found.minor)) or _PER_CYCLE.get(found.major, 0)
    clock = getattr(found, "clock_rate", 0) or _CLOCK
    return float(_REACHED * per_cycle * found.multi_processor_count * clock * 1e3)
