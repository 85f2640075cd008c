"""What stays in HBM for good while a loop streams the rest past it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiermem.core.cost import refetched, streaming_time

_MOST_CLASSES = 256
_MOST_BITS = 1 << 20
_MOST_BITS_IN_ALL = 1 << 27
_SLOTS = (2, 3, 4, 6, 8, 12, 16)
_AS_GOOD = 1.002
_COMMON = 0.9


def choose_residents(order: Sequence[int], sizes: Mapping[int, int], room: int) -> frozenset[int]:
    """Chooses blocks to keep: as many bytes as fit, spread evenly over the order of use.

    Every byte kept is a byte not moved each round, whichever block it is in. So the most bytes
    that fit are kept, which is a subset-sum problem; blocks of one size are alike, so it is
    solved exactly, size by size, in the bits of one integer. (Where there are more than 256
    sizes, or more than a million steps of room, it is solved in coarser steps, and what they
    leave over is filled in order.) Spread evenly, the compute of the kept blocks hides the
    transfer of those between them; side by side, they would leave the link idle in one half of
    the round and be waited for in the other.

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
        return simple  # as full, and spread over all sizes together
    return full


def _filled(
    blocks: Sequence[int], sizes: Mapping[int, int], room: int, kept: set[int]
) -> frozenset[int]:
    """Adds what rounding left room for, in order."""
    used = sum(sizes[block] for block in kept)
    for block in blocks:
        if block not in kept and used + sizes[block] <= room:
            kept.add(block)
            used += sizes[block]
    return frozenset(kept)


def _fullest(members: Mapping[int, int], room: int) -> dict[int, int]:
    """Returns how many blocks of each size to keep so that the most bytes are kept.

    Bit ``n`` of ``reach`` says whether ``n`` steps of room can be filled exactly. Of all fillings
    that are as full, one is taken in which every size has about its share.
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
    """Takes of each size as many as were chosen, evenly over the order."""
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


@dataclass(frozen=True, slots=True)
class Plan:
    """How HBM is shared between what stays and what streams.

    Attributes:
        residents: Blocks that stay.
        reserve: Bytes through which the others stream, in use or fetched ahead.
        slot: Bytes of the pieces that reserve is used in; 0 where nothing streams through it.
    """

    residents: frozenset[int]
    reserve: int
    slot: int = 0


def largest_beside(sizes: Mapping[int, int], kept: Collection[int]) -> int:
    """Returns the bytes of the largest block that is not kept; 0 where there is none."""
    return max((size for block, size in sizes.items() if block not in kept), default=0)


def occupied(size: int, slot: int) -> int:
    """Returns the bytes a block takes up of slots that hold whole blocks only.

    Args:
        size: Of the block.
        slot: Of a slot, at least as large.
    """
    return slot // (slot // size)


def share_hbm(
    order: Sequence[int],
    sizes: Mapping[int, int],
    room: int,
    compute: Sequence[float],
    transfer: Mapping[int, float],
    latency: float,
    behind: Mapping[int, float] | None = None,
) -> Plan:
    """Chooses how much HBM to stream through, and keeps blocks in the rest.

    What the stream needs depends on the times: where compute is long, two slots hide
    everything; where the link decides, more slots keep it busy while a resident computes, but
    each costs bytes that could have stayed. So reserves of a few blocks are tried against a
    model of the link. Of those within 0.2% of the fastest the largest is taken: where the link
    decides they differ, and where it does not, room forgives what the model does not know.

    Args:
        order: Ids of blocks in order of use, a few rounds of a loop that only reads.
        sizes: Bytes by id.
        room: Bytes of HBM for these blocks.
        compute: Seconds of each use.
        transfer: Seconds a block takes to arrive, by id.
        latency: Seconds between a slot coming free and the next copy into it.
        behind: Seconds that a disk takes for a block, by id, where it reads ahead into memory of
            its own and so is not held up by slots.
    """
    if sum(sizes.values()) <= room:
        return Plan(frozenset(sizes), 0)
    found: list[tuple[float, int, frozenset[int]]] = []
    for pinned in _oversize(sizes, room):
        rest = {block: size for block, size in sizes.items() if block not in pinned}
        largest = sorted(rest.values(), reverse=True)
        free = room - sum(sizes[block] for block in pinned)
        for slots in _SLOTS:
            reserve = min(free, sum(largest[:slots]))
            if slots > _SLOTS[0] and reserve > room // 2:
                break
            some = choose_residents([b for b in order if b in rest], rest, free - reserve)
            kept = some | pinned
            # a block that stays is fetched once, whichever plan it is: left out of the comparison
            slot = largest_beside(sizes, kept) or 1
            taken = {b: s if b in kept else occupied(s, slot) for b, s in sizes.items()}
            fetched = refetched(order, taken, kept, reserve, kept)
            arrive = [transfer[b] if f else 0.0 for b, f in zip(order, fetched, strict=True)]
            streamed = [taken[b] if f else 0 for b, f in zip(order, fetched, strict=True)]
            seconds = streaming_time(compute, arrive, streamed, reserve, latency)
            if behind is not None:
                missing = (b for b, f in zip(order, fetched, strict=True) if f)
                seconds = max(seconds, sum(behind.get(b, 0.0) for b in missing))
            found.append((seconds, reserve, kept))
    best = min(seconds for seconds, _, _ in found)
    good = [entry for entry in found if entry[0] <= best * _AS_GOOD]
    _, reserve, kept = max(good, key=lambda entry: entry[1])
    return Plan(kept, reserve, largest_beside(sizes, kept))


def _oversize(sizes: Mapping[int, int], room: int) -> list[frozenset[int]]:
    """Returns sets of blocks to keep in any case: none, and those far larger than the others.

    A slot for an embedding is room that several layers could have.
    """
    total = sum(sizes.values())
    common = passed = 0
    for size in sorted(sizes.values()):
        passed += size
        common = size
        if passed >= total * _COMMON:
            break
    large = frozenset(block for block, size in sizes.items() if size > common)
    slots = common * _SLOTS[0]
    if not large or sum(sizes[block] for block in large) + slots > room:
        return [frozenset()]
    return [frozenset(), large]
