"""Slots of equal size: their places, what fits beside others, how long two take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def slots_in(base: int, border: int, slot: int) -> list[tuple[int, int]]:
    """Returns first byte and end of adjacent slots of equal size; the last one includes the rest.

    Args:
        base: First byte that they may have.
        border: First byte behind them.
        slot: Bytes of each; 0 for none.

    Returns:
        Bounds; empty if there is no room for one.
    """
    if slot == 0 or border - base < slot:
        return []
    begins = range(base, border - slot + 1, slot)
    return [*((begin, begin + slot) for begin in begins[:-1]), (begins[-1], border)]


def all_fit(sizes: Iterable[int], runs: Iterable[int]) -> bool:
    """Whether blocks fit into runs of bytes by best fit, the largest first.

    Args:
        sizes: Bytes of the blocks.
        runs: Bytes of each run.
    """
    left = list(runs)
    for size in sorted(sizes, reverse=True):
        fitting = [run for run in left if run >= size]
        if not fitting:
            return False
        left.remove(min(fitting))
        left.append(min(fitting) - size)
    return True


def one_ahead_time(
    moving: Sequence[bool], compute: Sequence[float], transfer: Sequence[float], latency: float
) -> float:
    """Returns the seconds one pass takes with two slots: one block in use, one prefetched.

    Args:
        moving: Which uses need a fetch.
        compute: Seconds of each use.
        transfer: Seconds of the fetch each use needs, if any.
        latency: Seconds between the end of the compute before a use and the copy begun at it.
    """
    positions = [position for position, moves in enumerate(moving) if moves]
    now = link = there = 0.0  # the first block is there already
    used = 0
    for position, seconds in enumerate(compute):
        if used < len(positions) and positions[used] == position:
            used += 1
            arrived, asked_at = there, now
            following = positions[used % len(positions)]
            link = there = max(link, asked_at + latency) + transfer[following]
            now = max(now, arrived)
        now += seconds
    return max(now, link)
