"""Which blocks are stepped inside backward, in the next forward, or by the host during that.

Bytes over the link up and down in the two passes, for each byte of weights W, of gradients G and
of masters and state S (recomputation, everything out of HBM; a step ahead keeps its gradient)::

    stepped             forward up   down     backward up   down
    in backward         W            0        W + S         G + W + S
    in the next forward W + G + S    W + S    W             G
    by the host         W            0        W             G

A pass takes as long as its compute, the busier direction or, in forward, the host. So blocks are
best left to the forward until its copies take as long as its compute, and to the host as many as
it steps meanwhile. They lie evenly between the others: HBM has room for the state of a block or
two ahead, and forward waits for no block of the host's that has its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WORTH = 0.98  # of the time that there would be otherwise, at most


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes that move with one block of weights.

    Attributes:
        weights: Of the weights.
        gradients: Of their gradients.
        kept: Of masters and state.
        elements: How many are stepped.
    """

    weights: int
    gradients: int
    kept: int
    elements: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a loop computes and copies.

    Attributes:
        forward: Seconds that a forward computes.
        backward: The same of a backward.
        up: Bytes per second into HBM.
        down: Bytes per second out of it.
        host: Seconds per element that the host steps.
    """

    forward: float
    backward: float
    up: float
    down: float
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Which steps are not made inside backward, by the number of the block.

    Attributes:
        left: Blocks whose steps wait for the next forward.
        host: What the host steps.
    """

    left: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()


def best_shares(
    loads: Sequence[Load], speed: Speed, hosted: Sequence[int] = (), now: Shares | None = None
) -> Shares:
    """Returns the shares with which forward and backward take the least time.

    Args:
        loads: Of each block, in the order of forward.
        speed: As measured.
        hosted: What the host could step.
        now: The present shares; others are returned only if that is worth it.
    """
    found = min(
        _choices(len(loads), hosted),
        key=lambda shares: (seconds(loads, speed, shares), len(shares.left) + len(shares.host)),
    )
    if now is not None and seconds(loads, speed, found) > _WORTH * seconds(loads, speed, now):
        return now
    return found


def seconds(loads: Sequence[Load], speed: Speed, shares: Shares) -> float:
    """Returns how long forward and backward take."""
    weights = sum(load.weights for load in loads)
    gradients = sum(load.gradients for load in loads)
    waits = [loads[number] for number in shares.left]
    others = shares.left | shares.host
    ahead = [load for number, load in enumerate(loads) if number not in others]
    fetched = sum(load.gradients + load.kept for load in waits)
    later = sum(load.weights + load.kept for load in waits)
    stepped = speed.host * sum(loads[number].elements for number in shares.host)
    forward = max(speed.forward, (weights + fetched) / speed.up, later / speed.down, stepped)
    up = weights + sum(load.kept for load in ahead)
    down = gradients + sum(load.weights + load.kept for load in ahead)
    return forward + max(speed.backward, up / speed.up, down / speed.down)


def _choices(blocks: int, hosted: Sequence[int]) -> Iterator[Shares]:
    for on_host in range(len(hosted) + 1):
        host = frozenset(hosted[n] for n in _evenly(on_host, len(hosted)))
        rest = [number for number in range(blocks) if number not in host]
        for count in range(len(rest) + 1):
            yield Shares(frozenset(rest[n] for n in _evenly(count, len(rest))), host)


def _evenly(count: int, of: int) -> frozenset[int]:
    return frozenset(int((n + 0.5) * of / count) for n in range(count))
