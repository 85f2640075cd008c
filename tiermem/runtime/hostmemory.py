"""How much host memory this process can still take."""

from __future__ import annotations

import psutil


def available_host_memory() -> int:
    """Returns the bytes of host memory that can be taken without swapping."""
    return int(psutil.virtual_memory().available)
