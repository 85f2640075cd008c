"""What copies cost: how far ahead to fetch, and the price of evicting a block. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from tiermem.core.schedule import NEVER


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


class Timetable:
    """When the fetches of a schedule have to begin, in time of its compute.

    This time stands still while the compute waits: use ``p`` is at ``C(p)``, the compute time of
    all uses before it. Fetches over one link end in the order in which they begin. So, from the
    last to the first, each has to begin by ``S(p) = min(C(p), S(next over this link)) - T(p)``. If
    all begin by then, compute waits for none, if that is possible at all. Fetches begin only at
    uses; one that has to begin before the next use is due at this one. For equal blocks of which
    one is missing, that is ``k* = ceil(T / C)`` uses ahead.
    """

    __slots__ = ("_clock", "_start_by")

    def __init__(
        self,
        compute: Sequence[float | None],
        fetches: Sequence[tuple[str, float] | None],
        *,
        margin: float = 1.0,
        latency: float = 0.0,
    ) -> None:
        """Computes the times of all positions, from the last to the first.

        Args:
            compute: Seconds of each use. From the first None on the times are unknown, and this
                rule makes no fetch due.
            fetches: Link and seconds of the fetch that each use needs; None if its block is in HBM
                by then.
            margin: Factor on the seconds of a fetch, as they vary.
            latency: Seconds by which every fetch begins earlier.
        """
        clock = [0.0]
        for seconds in compute:
            if seconds is None:
                break
            clock.append(clock[-1] + seconds)
        self._clock = clock
        self._start_by = start_by = [math.inf] * len(fetches)
        next_start: dict[str, float] = {}
        earliest = math.inf
        for position in range(len(clock) - 2, -1, -1):
            fetch = fetches[position]
            if fetch is not None:
                link, seconds = fetch
                latest = min(clock[position], next_start.get(link, math.inf)) - margin * seconds
                next_start[link] = latest
                earliest = min(earliest, latest - latency)
            start_by[position] = earliest

    def knows(self, position: int) -> bool:
        """Whether the times of a position are known."""
        return position + 1 < len(self._clock)

    def due(self, position: int, cursor: int) -> bool:
        """Whether this fetch, or one after it, would be late if it began only at the next use.

        Args:
            position: Position of the use that needs it.
            cursor: Position of the use after the one that begins now.
        """
        if cursor >= len(self._clock) or position >= len(self._start_by):
            return False
        return self._start_by[position] < self._clock[cursor]


def refetched(
    order: Sequence[int],
    sizes: Mapping[int, int],
    residents: Collection[int],
    room: int,
    inside: Collection[int],
) -> list[bool]:
    """Returns which uses will have to fetch their block.

    A block stays from one use to the next if everything that is used in between fits beside it.
    Blocks that are used twice in between count twice, so the result is rather too many than too
    few.

    Args:
        order: Ids of blocks in order of use; those without a size are ignored.
        sizes: Bytes by id.
        residents: Blocks that stay once they are in HBM.
        room: Bytes for the others.
        inside: Blocks that are in HBM before the first use.
    """
    passed = 0
    last: dict[int, int] = {}
    found = []
    for block in order:
        size = sizes.get(block)
        if size is None:
            found.append(False)
            continue
        before = last.get(block)
        if block in residents:
            found.append(before is None and block not in inside)
        else:
            passed += size
            if before is None:
                found.append(block not in inside)
            else:
                found.append(passed - before > room)
        last[block] = passed
    return found


def streaming_time(
    compute: Sequence[float],
    transfer: Sequence[float],
    streamed: Sequence[int],
    reserve: int,
    latency: float = 0.0,
) -> float:
    """Returns the seconds that a sequence of uses takes, with fetches as early as possible.

    Args:
        compute: Seconds of each use.
        transfer: Seconds of the fetch each use needs; 0 for none.
        streamed: Bytes that the fetch needs, from its begin to the end of the use.
        reserve: Bytes for all of them at once.
        latency: Seconds between bytes becoming free and a copy into them.
    """
    now = link = freed = 0.0
    taken = 0
    held: deque[tuple[float, int]] = deque()
    for seconds, fetch, nbytes in zip(compute, transfer, streamed, strict=True):
        if nbytes:
            while held and taken + nbytes > reserve:
                ended, size = held.popleft()
                freed = max(freed, ended)
                taken -= size
            # the first fetch replaces nothing, so it need not wait for anything to become free
            link = max(link, freed + latency if freed else 0.0) + fetch
            now = max(now, link)
        now += seconds
        if nbytes:
            taken += nbytes
            held.append((now, nbytes))
    return now
