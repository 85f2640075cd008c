"""What stays in HBM for good while a loop streams the rest past it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose_residents(order: Sequence[int], sizes: Mapping[int, int], room: int) -> frozenset[int]:
    """Chooses blocks to keep, spread evenly over the order of use.

    Every byte kept is a byte not moved each round, whichever block it is in. Spread evenly, the
    compute of the kept blocks hides the transfer of those between them; side by side, they would
    leave the link idle in one half of the round and be waited for in the other.

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
    share = room / total
    kept: set[int] = set()
    credit, used = 0.0, 0
    for block in blocks:
        size = sizes[block]
        credit += share * size
        if credit >= size and used + size <= room:
            kept.add(block)
            used += size
            credit -= size
    for block in blocks:  # what rounding left over
        if block not in kept and used + sizes[block] <= room:
            kept.add(block)
            used += sizes[block]
    return frozenset(kept)
