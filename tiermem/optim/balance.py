"""Which blocks are stepped inside backward, and which wait for the next forward.

Bytes over the link up and down in the two passes, for each byte of weights W, of gradients G and
of masters and state S (recomputation, everything out of HBM; a step ahead keeps its gradient)::

    stepped             forward up   down     backward up   down
    in backward         W            0        W + S         G + W + S
    in the next forward W + G + S    W + S    W             G

A pass takes as long as its compute or the busier direction. So blocks are best left to the forward
until its copies take as long as its compute; they lie evenly between the others, as HBM has room to
fetch the state of a block or two ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_WORTH = 0.98  # of the time that there would be otherwise, at most


@dataclass(frozen=True, slots=True)
class Load:
    """What moves with one block of weights, in bytes.

    Attributes:
        weights: Of the weights.
        gradients: Of their gradients.
        kept: Of masters and state.
    """

    weights: int
    gradients: int
    kept: int


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


NOTHING = Load(0, 0, 0)


def left_to_forward(
    loads: Sequence[Load], speed: Speed, now: Collection[int] = (), beside: Load = NOTHING
) -> frozenset[int]:
    """Returns the numbers of the blocks whose steps are best made in the next forward.

    Args:
        loads: Of each block, in the order of forward.
        speed: As measured.
        now: Those that are left to it now; others are returned only if that is worth it.
        beside: Weights and gradients of blocks that are stepped elsewhere.
    """
    found = min(
        (_evenly(count, len(loads)) for count in range(len(loads) + 1)),
        key=lambda chosen: (seconds(loads, speed, chosen, beside), len(chosen)),
    )
    present = frozenset(now)
    if seconds(loads, speed, found, beside) > _WORTH * seconds(loads, speed, present, beside):
        return present
    return found


def seconds(
    loads: Sequence[Load], speed: Speed, left: Collection[int], beside: Load = NOTHING
) -> float:
    """Returns how long forward and backward take with these blocks left to the forward."""
    written = sum(load.weights + load.kept for load in loads)
    weights = sum(load.weights for load in loads) + beside.weights
    gradients = sum(load.gradients for load in loads) + beside.gradients
    waits = [loads[number] for number in left]
    stepped = sum(load.kept for load in loads) - sum(load.kept for load in waits)
    later = sum(load.weights + load.kept for load in waits)
    fetched = sum(load.gradients + load.kept for load in waits)
    forward = max(speed.forward, (weights + fetched) / speed.up, later / speed.down)
    up, down = weights + stepped, gradients + written - later
    return forward + max(speed.backward, up / speed.up, down / speed.down)


def _evenly(count: int, of: int) -> frozenset[int]:
    return frozenset(int((n + 0.5) * of / count) for n in range(count))
