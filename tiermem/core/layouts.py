"""Where what streams in a round may lie: slots that take turns, laps, own places. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

Run = tuple[int, int]
"""First byte of some room, and the first behind it."""

_MOST_SIZES = 4
"""Sizes of blocks, those with the most bytes, that smaller slots are made for."""
_MOST_PLACES = 1 << 20
"""Visits of all rounds of a layout: one that takes longer to come round is not tried."""
_MORE_LAPS = 2
_BISECTIONS = 24


def layouts(
    blocks: Sequence[int], sizes: Sequence[int], runs: Sequence[Run]
) -> Iterator[list[list[int]]]:
    """Yields ways to lay out what streams in a round, no two of them alike.

    Where blocks come several times in a round, each to a place of its own first: what closes one
    pass and opens the next, as where backward follows forward, does not move then.

    Args:
        blocks: Ids of what comes up, in the order of use.
        sizes: Bytes of each of them.
        runs: The room, ascending.

    Yields:
        The offset of each of them, for each of some rounds after which the first is repeated.
    """
    known: list[list[list[int]]] = []
    for layout in _ways(blocks, sizes, runs):
        if layout not in known:  # laps of several lengths may come to the same
            known.append(layout)
            yield layout


def _ways(
    blocks: Sequence[int], sizes: Sequence[int], runs: Sequence[Run]
) -> Iterator[list[list[int]]]:
    """Yields what :func:`layouts` does, some of it several times."""
    size_of = dict(zip(blocks, sizes, strict=True))
    if len(size_of) < len(blocks):
        for offsets in _staying(list(size_of.values()), runs):
            place_of = dict(zip(size_of, offsets, strict=True))
            yield [[place_of[block] for block in blocks]]
    yield from _moving(sizes, runs)


def _staying(sizes: Sequence[int], runs: Sequence[Run]) -> Iterator[list[int]]:
    """Yields the offsets of blocks that have a place each, for the first use in each round.

    In laps that are as long as can be first: where an order is turned, the last lap and what is
    left of the one before it are all that fits.
    """
    longest = _in_laps(sizes, sum(end - begin for begin, end in runs), runs)
    if longest is not None:
        yield longest
    for first, *_ in _moving(sizes, runs):
        yield first


def _moving(sizes: Sequence[int], runs: Sequence[Run]) -> Iterator[list[list[int]]]:
    """Yields ways to lay out what comes up, wherever it was before.

    In slots of the size of the largest, each of which takes as many blocks that come one after the
    other as fit; the slots take turns, however many slotfuls come in a round. Or, where there are
    several sizes, in one slot of the largest and the rest of the room in slots of a smaller size,
    which take turns among themselves; or in laps over the whole room that are about as long, where
    each round begins at the begin of the room.

    Args:
        sizes: Bytes of what comes up, in the order of use.
        runs: The room, ascending.

    Yields:
        As :func:`layouts`.
    """
    turning = _in_slots(sizes, runs)
    if turning:
        yield turning
    if len(set(sizes)) == 1:
        return
    yield from _in_two_sizes(sizes, runs)
    room = sum(end - begin for begin, end in runs)
    least = _laps(sizes, room)
    for count in range(least, least + _MORE_LAPS + 1):
        offsets = _in_laps(sizes, _shortest(sizes, count, room), runs)
        if offsets is not None:
            yield [offsets]


def _in_slots(sizes: Sequence[int], runs: Sequence[Run]) -> list[list[int]]:
    """Returns the offsets in slots that take turns, by round.

    None with fewer than two slots, or where they come round too late.
    """
    slot = max(sizes)
    slots = [at for begin, end in runs for at in range(begin, end - slot + 1, slot)]
    if len(slots) < 2:
        return []
    places: list[tuple[int, int]] = []  # which slotful of the round, and how far into it
    number = filled = 0
    for nbytes in sizes:
        if filled + nbytes > slot:
            number, filled = number + 1, 0
        places.append((number, filled))
        filled += nbytes
    rounds = len(slots) // math.gcd(number + 1, len(slots))
    if rounds * len(sizes) > _MOST_PLACES:
        return []
    return [
        [slots[(turn * (number + 1) + at) % len(slots)] + inside for at, inside in places]
        for turn in range(rounds)
    ]


def _in_two_sizes(sizes: Sequence[int], runs: Sequence[Run]) -> Iterator[list[list[int]]]:
    """Yields the offsets where the largest blocks have a slot to themselves, by round."""
    large = max(sizes)
    begin, end = max(runs, key=lambda run: run[1] - run[0])
    smaller: Counter[int] = Counter()
    for nbytes in sizes:
        smaller[nbytes] += nbytes
    for small, _ in smaller.most_common(_MOST_SIZES):
        slots = list(range(begin + large, end - small + 1, small))
        if small == large or len(slots) < 2:
            continue
        count = sum(nbytes <= small for nbytes in sizes)
        rounds = len(slots) // math.gcd(count, len(slots))
        if rounds * len(sizes) > _MOST_PLACES:
            continue
        found = []
        for number in range(rounds):
            turn = number * count
            offsets = []
            for nbytes in sizes:
                if nbytes > small:
                    offsets.append(begin)
                else:
                    offsets.append(slots[turn % len(slots)])
                    turn += 1
            found.append(offsets)
        yield found


def _laps(sizes: Sequence[int], bound: int) -> int:
    """Returns how many laps there are, none of them longer than ``bound`` but by one block."""
    laps, filled = 1, 0
    for nbytes in sizes:
        if filled and filled + nbytes > bound:
            laps, filled = laps + 1, 0
        filled += nbytes
    return laps


def _shortest(sizes: Sequence[int], count: int, most: int) -> int:
    """Returns the bytes of the longest lap where so many laps are about as long."""
    least = max(max(sizes), sum(sizes) // count)
    most = max(most, least)
    for _ in range(_BISECTIONS):
        middle = (least + most) // 2
        if _laps(sizes, middle) <= count:
            most = middle
        else:
            least = middle + 1
        if least >= most:
            break
    return most


def _in_laps(sizes: Sequence[int], bound: int, runs: Sequence[Run]) -> list[int] | None:
    """Returns the offset of each block; None where one of them has no room in its lap.

    Args:
        sizes: Bytes of the blocks, in the order of use.
        bound: Bytes of a lap; where it is all of the room, a lap ends where the runs do.
        runs: The room, ascending.
    """
    room = sum(end - begin for begin, end in runs)
    offsets: list[int] = []
    run, at, filled = 0, runs[0][0], 0
    for nbytes in sizes:
        if filled and filled + nbytes > bound:
            run, at, filled = 0, runs[0][0], 0
        while at + nbytes > runs[run][1]:
            run += 1
            if run == len(runs):
                if not filled or bound < room:
                    return None
                run, filled = 0, 0
            at = runs[run][0]
        offsets.append(at)
        at += nbytes
        filled += nbytes
    return offsets
