"""Chooses the blocks that stay in HBM while the others of a loop stream. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

_MOST_CLASSES = 256
_MOST_BITS = 1 << 20
_MOST_BITS_IN_ALL = 1 << 27


def choose_residents(order: Sequence[int], sizes: Mapping[int, int], room: int) -> frozenset[int]:
    """Chooses blocks to keep: as many bytes as fit, spread evenly over the order of use.

    Every byte kept saves a byte of copies each round, whichever block it is in. So as many bytes
    as fit are kept, which is a subset-sum problem. Blocks of one size are interchangeable, so it is
    solved exactly, size by size, in the bits of one integer. (With more than 256 sizes, or more
    than a million steps of room, it is solved in coarser steps, and the remaining room is filled
    in order.) If kept blocks are spread evenly, their compute hides the transfers of the blocks
    between them. If they were adjacent, the link would be idle in one part of the round, and
    compute would wait for it in the other.

    Args:
        order: Ids of blocks in order of use; repeats count once.
        sizes: Bytes by id.
        room: Bytes that may be kept.

    Returns:
        The ids of the blocks to keep; their sizes add up to at most ``room``.
    """
    blocks = list(dict.fromkeys(order))
    total = sum(sizes[block] for block in blocks)
    if total <= room:
        return frozenset(blocks)
    if room <= 0:
        return frozenset()
    members = Counter(sizes[block] for block in blocks)
    simple = _filled(blocks, sizes, room, _by_share(blocks, sizes, room, room / total))
    if len(members) > _MOST_CLASSES:
        return simple
    full = _filled(blocks, sizes, room, _spread(blocks, sizes, members, _fullest(members, room)))
    if len(members) > 1 and sum(map(sizes.__getitem__, simple)) >= sum(
        map(sizes.__getitem__, full)
    ):
        return simple  # as many bytes, and spread over all sizes together
    return full


def adjust_residents(
    kept: Sequence[int],
    there: Sequence[int],
    order: Sequence[int],
    sizes: Mapping[int, int],
    room: int,
) -> frozenset[int]:
    """Changes the residents as little as possible for another size of room.

    Args:
        kept: Ids of blocks that stay so far; if some have to leave, the first ones do.
        there: Ids of blocks that are added before others if there is more room.
        order: Ids of blocks in order of use.
        sizes: Bytes by id.
        room: Bytes that may be kept.

    Returns:
        The ids of the blocks to keep; their sizes add up to at most ``room``.
    """
    stay = [block for block in kept if block in sizes]
    over = sum(sizes[block] for block in stay) - room
    while over > 0:
        goes = _who_goes(stay, sizes, over)
        stay.remove(goes)
        over -= sizes[goes]
    for block in there:
        if sizes[block] <= -over and block not in stay:
            stay.append(block)
            over += sizes[block]
    known = set(stay)
    others = [block for block in order if block in sizes and block not in known]
    return frozenset(known) | choose_residents(others, sizes, -over)


def _who_goes(stay: Sequence[int], sizes: Mapping[int, int], over: int) -> int:
    """Returns the first block that frees enough room, or else the first that frees some of it.

    Blocks more than twice as large as the excess do not count, as other blocks would have to be
    fetched to use the room that they free. If all are that large, the smallest leaves.
    """
    enough = [block for block in stay if over <= sizes[block] <= 2 * over]
    some = enough or [block for block in stay if sizes[block] < over]
    return some[0] if some else min(stay, key=lambda block: sizes[block])


def keep_largest(
    order: Sequence[int], sizes: Mapping[int, int], room: int, large: int
) -> frozenset[int]:
    """Chooses blocks to keep, the largest ones first, so that the large ones stream one by one.

    Then few bytes stream, and the reserve for them is small. It may keep fewer bytes than
    :func:`choose_residents`.

    Of adjacent large blocks at least the first one streams: its slot becomes free, and is
    fetched into, while the others compute. Of the last group it is the last one, since the link has
    little to do during the compute after the last streaming block.

    Args:
        order: Ids of blocks in order of use; repeats count once.
        sizes: Bytes by id.
        room: Bytes that may be kept.
        large: Size of the large ones. Every other size is spread evenly over the order.

    Returns:
        The ids of the blocks to keep; their sizes add up to at most ``room``.
    """
    blocks = list(dict.fromkeys(order))
    members = Counter(sizes[block] for block in blocks)
    kept, left = set(blocks), max(0, room)
    for size in sorted(members, reverse=True):
        alike = [block for block in blocks if sizes[block] == size]
        ranks = _ranks(blocks, sizes, large) if size == large else [alike]
        goes = max(len(alike) - left // size, len(ranks[0]) if size == large else 0)
        left -= (len(alike) - goes) * size
        for rank in ranks:
            kept -= _ends(rank, min(goes, len(rank)))
            goes -= min(goes, len(rank))
    return frozenset(kept)


def _ranks(blocks: Sequence[int], sizes: Mapping[int, int], large: int) -> list[list[int]]:
    """Returns the large blocks that are first in their group, then the second ones, and so on."""
    rows: list[list[int]] = [[]]
    for block in blocks:
        if sizes[block] == large:
            rows[-1].append(block)
        elif rows[-1]:
            rows.append([])
    rows = [row for row in rows if row]
    if rows:
        rows[-1].reverse()
    return [[row[n] for row in rows if n < len(row)] for n in range(max(map(len, rows), default=0))]


def _ends(blocks: Sequence[int], count: int) -> set[int]:
    """Returns ``count`` of some blocks, spread evenly from the first to the last."""
    steps = max(1, count - 1)
    return {blocks[(2 * n * (len(blocks) - 1) + steps) // (2 * steps)] for n in range(count)}


def _filled(
    blocks: Sequence[int], sizes: Mapping[int, int], room: int, kept: set[int]
) -> frozenset[int]:
    """Adds blocks, in order, for which rounding has left room."""
    used = sum(sizes[block] for block in kept)
    for block in blocks:
        if block not in kept and used + sizes[block] <= room:
            kept.add(block)
            used += sizes[block]
    return frozenset(kept)


def _fullest(members: Mapping[int, int], room: int) -> dict[int, int]:
    """Returns how many blocks of each size to keep so that the most bytes are kept.

    Bit ``n`` of ``reach`` says whether ``n`` steps of room can be filled exactly. Of all equally
    full fillings, one is chosen in which every size has about its share.
    """
    most = min(_MOST_BITS, _MOST_BITS_IN_ALL // len(members))
    step = math.gcd(*members)
    if room // step > most:
        step = -(-room // most)
    end = room // step
    mask = (1 << (end + 1)) - 1
    steps = {size: -(-size // step) for size in members}
    reach, before = 1, []
    for size, count in members.items():
        before.append(reach.to_bytes(end // 8 + 1, "little"))
        batch = 1
        while count and batch * steps[size] <= end:
            batch = min(batch, count)
            reach |= (reach << (batch * steps[size])) & mask
            count -= batch
            batch *= 2
    left = reach.bit_length() - 1
    share = room / sum(size * count for size, count in members.items())
    chosen = {}
    for size, bits in zip(reversed(members), reversed(before), strict=True):
        for count in _around(round(share * members[size]), members[size]):
            rest = left - count * steps[size]
            if rest >= 0 and bits[rest >> 3] >> (rest & 7) & 1:
                chosen[size], left = count, rest
                break
    return chosen


def _around(middle: int, end: int) -> Iterator[int]:
    """Yields the numbers from 0 to ``end``, those near ``middle`` first."""
    yield middle
    for away in range(1, end + 1):
        if middle - away >= 0:
            yield middle - away
        if middle + away <= end:
            yield middle + away


def _spread(
    blocks: Sequence[int],
    sizes: Mapping[int, int],
    members: Mapping[int, int],
    chosen: Mapping[int, int],
) -> set[int]:
    """Selects the chosen number of blocks of each size, spread evenly over the order."""
    kept: set[int] = set()
    seen: Counter[int] = Counter()
    for block in blocks:
        size = sizes[block]
        wanted, count, before = chosen[size], members[size], seen[size]
        if (before + 1) * wanted // count > before * wanted // count:
            kept.add(block)
        seen[size] += 1
    return kept


def _by_share(blocks: Sequence[int], sizes: Mapping[int, int], room: int, share: float) -> set[int]:
    """Keeps a block whenever the share of the bytes passed so far covers it."""
    kept: set[int] = set()
    credit, used = 0.0, 0
    for block in blocks:
        size = sizes[block]
        credit += share * size
        if credit >= size and used + size <= room:
            kept.add(block)
            used += size
            credit -= size
    return kept
