"""Which blocks are stepped inside backward, and which in the next forward.

Bytes over the link up and down in the two passes, for each byte of weights W, of gradients G and
of masters and state S (recomputation, everything out of HBM; a step ahead keeps its gradient)::

    stepped             forward up   down     backward up   down
    in backward         W            0        W + S         G + W + S
    in the next forward W + G + S    W + S    W             G
    by the host         W            0        W             G

A pass takes as long as its compute, the busier direction or, in backward, the host. So blocks are
best left to the forward until its copies take as long as its compute. They lie evenly between the
others: HBM has room for the state of a block or two ahead. What the host steps is not chosen here
(:class:`tiermem.optim.host.devicebits.ShareTrial` tries it), only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WORTH = 0.98  # of the time that there would be otherwise, at most


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes that move with one block of weights.

    Attributes:
        weights: Of the weights.
        gradients: Of their gradients.
        kept: Of masters and state.
        host: Seconds that the host takes to step it; None where the device does.
    """

    weights: int
    gradients: int
    kept: int
    host: float | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a loop computes and copies.

    Attributes:
        forward: Seconds that a forward computes.
        backward: The same of a backward.
        up: Bytes per second into HBM.
        down: Bytes per second out of it.
    """

    forward: float
    backward: float
    up: float
    down: float


def best_left(
    loads: Sequence[Load], speed: Speed, now: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Returns which blocks to leave to forward, so that it and backward take the least time.

    Args:
        loads: Of each block, in the order of forward.
        speed: As measured.
        now: The present ones; others are returned only if that is worth it.
    """
    able = [number for number, load in enumerate(loads) if load.host is None]
    choices = [
        frozenset(able[n] for n in _evenly(count, len(able))) for count in range(len(able) + 1)
    ]
    found = min(choices, key=lambda left: (seconds(loads, speed, left), len(left)))
    if now <= set(able) and seconds(loads, speed, found) > _WORTH * seconds(loads, speed, now):
        return now
    return found


def seconds(loads: Sequence[Load], speed: Speed, left: frozenset[int]) -> float:
    """Returns how long forward and backward take, if some of the device's blocks are left."""
    weights = sum(load.weights for load in loads)
    gradients = sum(load.gradients for load in loads)
    waits = [loads[number] for number in left]
    ahead = [load for number, load in enumerate(loads) if number not in left and load.host is None]
    fetched = sum(load.gradients + load.kept for load in waits)
    later = sum(load.weights + load.kept for load in waits)
    stepped = sum(load.host for load in loads if load.host is not None)
    forward = max(speed.forward, (weights + fetched) / speed.up, later / speed.down)
    up = weights + sum(load.kept for load in ahead)
    down = gradients + sum(load.weights + load.kept for load in ahead)
    return forward + max(speed.backward, up / speed.up, down / speed.down, stepped)


def _evenly(count: int, of: int) -> frozenset[int]:
    return frozenset(int((n + 0.5) * of / count) for n in range(count))
