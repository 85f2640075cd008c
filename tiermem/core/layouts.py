"""Possible layouts of the streaming blocks of a round: slots, laps, own places. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

Run = tuple[int, int]
"""First byte of a run of room, and the first byte behind it."""

_MOST_SIZES = 4
"""How many sizes of blocks (those with the most bytes) get smaller slots."""
_MOST_PLACES = 1 << 20
"""Most visits in all rounds of a layout until it repeats; longer ones are not tried."""
_MORE_LAPS = 2
_BISECTIONS = 24


def layouts(
    blocks: Sequence[int], sizes: Sequence[int], runs: Sequence[Run]
) -> Iterator[list[list[int]]]:
    """Yields different layouts for the streaming blocks of a round.

    If blocks are fetched several times in a round, the first layouts give each a place of its own:
    blocks that end one pass and begin the next (as when backward follows forward) are not copied.

    Args:
        blocks: Ids of the fetched blocks, in the order of use.
        sizes: Bytes of each of them.
        runs: The room, ascending.

    Yields:
        The offset of each fetched block, for each of some rounds, which are then repeated.
    """
    known: list[list[list[int]]] = []
    for layout in _ways(blocks, sizes, runs):
        if layout not in known:  # laps of several lengths may give the same layout
            known.append(layout)
            yield layout


def _ways(
    blocks: Sequence[int], sizes: Sequence[int], runs: Sequence[Run]
) -> Iterator[list[list[int]]]:
    """Yields the layouts of :func:`layouts`, some of them several times."""
    size_of = dict(zip(blocks, sizes, strict=True))
    if len(size_of) < len(blocks):
        for offsets in _staying(list(size_of.values()), runs):
            place_of = dict(zip(size_of, offsets, strict=True))
            yield [[place_of[block] for block in blocks]]
    yield from _moving(sizes, runs)


def _staying(sizes: Sequence[int], runs: Sequence[Run]) -> Iterator[list[int]]:
    """Yields offsets with which each block has one place, for the first use in each round.

    The first layouts have laps as long as possible: if the order is reversed in the next pass, what
    is then in HBM is the last lap and the rest of the one before it.
    """
    longest = _in_laps(sizes, sum(end - begin for begin, end in runs), runs)
    if longest is not None:
        yield longest
    for first, *_ in _moving(sizes, runs):
        yield first


def _moving(sizes: Sequence[int], runs: Sequence[Run]) -> Iterator[list[list[int]]]:
    """Yields layouts in which a block may have a different place each time.

    Either in slots of the size of the largest block, each of which takes as many consecutive blocks
    as fit; the slots take turns, also across rounds. Or, if there are several sizes, in one slot
    for the largest size, and slots of a smaller size in the rest of the room, which take turns
    among themselves. Or in laps over the whole room that are about equally long, where each round
    begins at the begin of the room.

    Args:
        sizes: Bytes of the fetched blocks, in the order of use.
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

    Empty with fewer than two slots, or if the layout repeats too late.
    """
    slot = max(sizes)
    slots = [at for begin, end in runs for at in range(begin, end - slot + 1, slot)]
    if len(slots) < 2:
        return []
    places: list[tuple[int, int]] = []  # number of the slot's filling in the round, offset in it
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
    """Yields the offsets in which the largest blocks have a slot of their own, by round."""
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
    """Returns the number of laps of at most ``bound`` bytes (or of one block that is larger)."""
    laps, filled = 1, 0
    for nbytes in sizes:
        if filled and filled + nbytes > bound:
            laps, filled = laps + 1, 0
        filled += nbytes
    return laps


def _shortest(sizes: Sequence[int], count: int, most: int) -> int:
    """Returns the bytes of the longest lap if ``count`` laps are about equally long."""
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
    """Returns the offset of each block; None if one of them does not fit in its lap.

    Args:
        sizes: Bytes of the blocks, in the order of use.
        bound: Bytes of a lap; if it is all of the room, a lap ends at the end of the runs.
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
