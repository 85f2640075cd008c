"""What moving costs: how far ahead to fetch, and what evicting a block is worth. Pure."""

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
    """When the fetches of a schedule have to begin, on the clock of its compute.

    That clock stands still while the compute waits: use ``p`` is at ``C(p)``, the compute of all
    uses before it. Fetches over one link end in the order in which they begin, so counted from
    the last, each has to begin by ``S(p) = min(C(p), S(next over this link)) - T(p)``; begun by
    then, none is waited for, if that can be had at all. Fetches are begun at uses only, and one
    whose time comes before the next use is due at this one: for equal blocks with one missing
    that is ``k* = ceil(T / C)`` uses ahead.
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
        """Looks at every position once, from the last to the first.

        Args:
            compute: Seconds of each use. From the first None on nothing is known, and nothing is
                due by this rule.
            fetches: Link and seconds of the fetch that each use needs; None where the block is
                in HBM by then.
            margin: Factor on the seconds of a fetch, for what differs from time to time.
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
        """Whether this rule has an answer for a position."""
        return position + 1 < len(self._clock)

    def due(self, position: int, cursor: int) -> bool:
        """Whether this fetch, or one after it, would come too late from the next use on.

        Args:
            position: Of the use that needs it.
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
    """Tells which uses will have to fetch their block.

    A block stays from one use to the next where all that is used in between fits beside it;
    what is used twice in between counts twice, so rather too many are expected than too few.

    Args:
        order: Ids of blocks in order of use; those without a size are passed over.
        sizes: Bytes by id.
        residents: Blocks that stay once they have come.
        room: Bytes that the others have.
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
    """Returns the seconds a sequence of uses takes over one link, each fetch as early as it can.

    Args:
        compute: Seconds of each use.
        transfer: Seconds of the fetch each use needs; 0 for none.
        streamed: Bytes that fetch needs, from its begin to the end of the use.
        reserve: Bytes there are for all of them at once.
        latency: Seconds between bytes coming free and a copy into them.
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
            # nothing was there before the first: no time passes between it and the begin
            link = max(link, freed + latency if freed else 0.0) + fetch
            now = max(now, link)
        now += seconds
        if nbytes:
            taken += nbytes
            held.append((now, nbytes))
    return now
