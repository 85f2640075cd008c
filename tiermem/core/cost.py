"""What moving costs: how far ahead to fetch, and what evicting a block is worth."""

from __future__ import annotations

import math

from tiermem.core.schedule import NEVER


def prefetch_depth(transfer: float, compute: float) -> int:
    """Returns how many blocks ahead a fetch must begin to be hidden.

    ``k* = max(1, ceil(T_transfer / T_compute))``, as derived in "Offloading:
    Extending Memory Beyond the GPU".

    Args:
        transfer: Seconds one block takes to arrive.
        compute: Seconds of compute per block.
    """
    if transfer <= 0:
        return 1
    if compute <= transfer / 64:
        return 64
    return max(1, min(64, math.ceil(transfer / compute)))


def eviction_cost(nbytes: int, distance: int, *, dirty: bool) -> float:
    """Returns the price of evicting a block: bytes that must move again, per use until then.

    For blocks of one size this orders them by next use, the farthest first,
    which is Belady's rule; a dirty one costs a write as well.

    Args:
        nbytes: Size of the block.
        distance: Uses of other blocks until it is next used, or ``NEVER``.
        dirty: Whether it has to be written back first.
    """
    write = nbytes if dirty else 0
    if distance == NEVER:
        return write * 1e-6
    return (nbytes + write) / (distance + 1)
