"""Places for what streams in a loop, laid out for whole rounds beforehand. Pure.

Blocks that stream come up in the order of their use, each to a place that is given by the layout:
the room that they stream through is gone over from its begin to its end, in *laps*. So what a
round fetches, where to, and what leaves for it follows from the order of use and the sizes alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiermem.core.layouts import Run, layouts

_VISIT = 0.5
"""Share of the room to stream through that may come up between two uses for one fetch."""
_AS_GOOD = 1.01
"""A layout that takes so many times the busier of link and compute is taken at once."""
_HOST = 200e-6
"""Seconds of the host for a use; it runs ahead of the device unless that has nothing to do."""
_PRELUDE = 500e-6
"""Seconds of the host between the begin of a round and its first use."""
_POSTPONED = 1
"""Fetches left to the begin of the next round, where the link is busier than the device."""
_MOST_TRIED = 3
_LEAD = 4
"""Rounds in which a loop has to come to repeat itself."""
_MOST_PLAYED = 1 << 15
"""Uses in the rounds that are played until they repeat, but for the first ones."""


class Visit(NamedTuple):
    """The time a block spends in HBM for one use, or for several that are near each other.

    Attributes:
        block: Its id.
        first: Position in the round of the first of those uses.
        last: Of the last.
        nbytes: Bytes of its place.
    """

    block: int
    first: int
    last: int
    nbytes: int


class Fetch(NamedTuple):
    """A block that comes to a place, and what leaves for it.

    Attributes:
        event: When it begins: 0 as the round begins, else as use ``event - 1`` has been entered.
        block: Id of what comes.
        nbytes: Bytes of its place.
        offset: First byte of it.
        leaves: Ids of the blocks that are evicted for it.
        exchanged: Whether just one leaves, and its place began where this one does.
        use: Position of the use it is for, from the begin of this round.
    """

    event: int
    block: int
    nbytes: int
    offset: int
    leaves: tuple[int, ...]
    exchanged: bool
    use: int

    def same(self) -> tuple[object, ...]:
        """Returns what two fetches have in common that do the same."""
        if self.exchanged:
            return self.event, self.block, self.leaves, self.use
        return self


@dataclass(slots=True)
class Place:
    """Where a block is in HBM.

    Attributes:
        offset: First byte.
        nbytes: Bytes.
        free_at: Event from which on it may leave, counted from the begin of the first round.
    """

    offset: int
    nbytes: int
    free_at: int = -1

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.nbytes


class Missing(NamedTuple):
    """A block that stays from now on and is not in HBM yet.

    Attributes:
        block: Its id.
        first: Position of its first use.
        offset: First byte of its place.
        nbytes: Bytes of it.
    """

    block: int
    first: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Rounds:
    """What is fetched in the rounds of a loop.

    Attributes:
        fetches: Of each round, in order.
        again: The round that comes after the last of them, and so on for good.
    """

    fetches: list[list[Fetch]]
    again: int

    def after(self, number: int) -> int:
        """Returns the round that comes after one."""
        return number + 1 if number + 1 < len(self.fetches) else self.again


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A loop that is laid out.

    Attributes:
        visits: Of a round, by first use.
        layout: See :func:`tiermem.core.layouts.layouts`.
        postponed: How many of the fetches for the next round are left to its begin.
        seconds: How long a round takes by the model of the link.
    """

    visits: list[Visit]
    layout: list[list[int]]
    postponed: int
    seconds: float


def lay_out(
    order: Sequence[int],
    compute: Sequence[float],
    streams: Mapping[int, int],
    transfer: Mapping[int, float],
    runs: Sequence[Run],
    latency: float,
) -> LaidOut | None:
    """Lays a loop out in the way that takes it the least time; None where none is possible.

    Args:
        order: Ids of the blocks used, one round.
        compute: Seconds of each use.
        streams: Bytes of the blocks that stream, by id.
        transfer: Seconds that each of them takes to arrive, by id.
        runs: The room they stream through, ascending.
        latency: Seconds between a place coming free and the copy to it.
    """
    room = sum(end - begin for begin, end in runs)
    visits = visits_of(order, streams, int(_VISIT * room))
    if not visits:
        return None
    moved, used = sum(transfer[visit.block] for visit in visits), sum(compute)
    count = _POSTPONED if moved > used else 0
    best: LaidOut | None = None
    tried = 0
    for layout in layouts([visit.nbytes for visit in visits], runs):
        rounds = play(visits, layout, len(order), {})
        if rounds is None:
            continue
        late = postponed(rounds, count, len(order))
        seconds = seconds_of(late, order, compute, transfer, latency)
        if best is None or seconds < best.seconds:
            best = LaidOut(visits, layout, count, seconds)
        tried += 1
        if tried == _MOST_TRIED or best.seconds <= _AS_GOOD * max(moved, used):
            break
    return best


def host_seconds(uses: int) -> float:
    """Returns the host's seconds from the begin of a round until it has entered so many uses."""
    return _PRELUDE + uses * _HOST if uses else 0.0


def visits_of(order: Sequence[int], sizes: Mapping[int, int], reach: int) -> list[Visit]:
    """Returns the visits of a round, by first use.

    Args:
        order: Ids of the blocks that are used, one round.
        sizes: Bytes of those that stream, by id.
        reach: Bytes that may be fetched between two uses of a block that are one visit.
    """
    found: list[Visit] = []
    latest: dict[int, tuple[int, int]] = {}
    fetched = 0
    for position, block in enumerate(order):
        nbytes = sizes.get(block)
        if nbytes is None:
            continue
        index, seen = latest.get(block, (-1, 0))
        if index >= 0 and fetched - seen <= reach:
            found[index] = found[index]._replace(last=position)
        else:
            index = len(found)
            found.append(Visit(block, position, position, nbytes))
            fetched += nbytes
        latest[block] = index, fetched
    return found


def play(
    visits: Sequence[Visit],
    layout: Sequence[Sequence[int]],
    length: int,
    inside: Mapping[int, Place],
    missing: Sequence[Missing] = (),
) -> Rounds | None:
    """Returns what is fetched in each round, as soon as the places are free.

    A place is free once the use after the last one of the block that has it is entered: the block
    is not in use any more then.

    Args:
        visits: Of one round, by first use.
        layout: See :func:`tiermem.core.layouts.layouts`.
        length: Uses in a round.
        inside: What is in HBM of what streams as the first round begins, by id.
        missing: What stays and is fetched in the first round, by first use.

    Returns:
        The rounds; None where a block would come too late for its use, or no two rounds are alike.
    """
    events, rounds = length + 1, _LEAD + min(2 * len(layout), 2 + _MOST_PLAYED // length)
    found: list[list[Fetch]] = [[] for _ in range(rounds)]
    there = {block: Place(place.offset, place.nbytes) for block, place in inside.items()}
    begins = sorted((place.offset, block) for block, place in there.items())
    now = 0
    late = list(reversed(missing))
    for number in range(rounds):
        begin = number * events
        for visit, offset in zip(visits, layout[number % len(layout)], strict=True):
            while late and late[-1].first <= visit.first:
                found[now // events].append(_of_missing(late.pop(), now % events))
            place = there.get(visit.block)
            if place is not None and place.offset == offset:
                place.free_at = begin + visit.last + 2
                continue
            over = _overlapped(there, begins, visit, offset)
            now = max([now, *(there[block].free_at for block in over)])
            if now > begin + visit.first:
                return None
            exchanged = len(over) == 1 and there[over[0]].offset == offset
            first = now // events
            use = (number - first) * length + visit.first
            block, nbytes = visit.block, visit.nbytes
            found[first].append(
                Fetch(now % events, block, nbytes, offset, tuple(over), exchanged, use)
            )
            for other in over:
                begins.remove((there.pop(other).offset, other))
            there[block] = Place(offset, nbytes, begin + visit.last + 2)
            insort(begins, (offset, block))
        for rest in reversed(late):
            found[0].append(_of_missing(rest, now))
        late = []
        done = _repeated(found[: now // events], len(layout))
        if done is not None:
            return done
    return None


def _overlapped(
    there: Mapping[int, Place], begins: Sequence[tuple[int, int]], visit: Visit, offset: int
) -> list[int]:
    """Returns what has to leave for a block to come to an offset, itself included.

    Args:
        there: What is in HBM, by id.
        begins: The offset and id of each, ascending.
        visit: The block that comes.
        offset: Where to.
    """
    first = max(0, bisect_right(begins, (offset, -1)) - 1)
    if first < len(begins) and there[begins[first][1]].end <= offset:
        first += 1
    found = [block for _, block in begins[first : bisect_left(begins, (offset + visit.nbytes, -1))]]
    if visit.block in there and visit.block not in found:
        found.append(visit.block)
    return found


def _repeated(found: list[list[Fetch]], period: int) -> Rounds | None:
    """Returns the rounds up to where they repeat; None where the last ones do not."""
    for length in {1, period}:
        number = len(found) - 2 * length
        if number < 0:
            continue
        alike = [[fetch.same() for fetch in fetches] for fetches in found[number:]]
        if alike[:length] == alike[length:]:
            return Rounds(found[: number + length], number)
    return None


def postponed(rounds: Rounds, count: int, length: int) -> Rounds:
    """Leaves the last fetches of each round that are for the next one to its begin.

    As a round begins, all room is taken by what comes first in it, and the link has nothing to do
    until some of that has been used; what is left of the round before gives it something.

    Args:
        rounds: See :func:`play`.
        count: How many of them, at the most.
        length: Uses in a round.
    """
    fetches, again = rounds.fetches, rounds.again
    kept = [_split(one, count, length) for one in fetches]
    late = [[f._replace(event=0, use=f.use - length) for f in end] for _, end in kept]
    first = [[fetch.same() for fetch in late[number]] for number in (again - 1, -1)]
    if not again or first[0] != first[1]:  # the first time round is another one
        kept, late = kept + kept[again:], late + late[again:]
        again = len(fetches)
    heads = [[], *late]
    return Rounds([head + body for head, (body, _) in zip(heads, kept, strict=False)], again)


def _split(fetches: list[Fetch], count: int, length: int) -> tuple[list[Fetch], list[Fetch]]:
    """Returns what a round fetches, and apart up to so many of its last fetches for the next."""
    at = len(fetches)
    while at and len(fetches) - at < count and fetches[at - 1].use >= length:
        at -= 1
    return fetches[:at], fetches[at:]


def seconds_of(
    rounds: Rounds,
    order: Sequence[int],
    compute: Sequence[float],
    transfer: Mapping[int, float],
    latency: float,
) -> float:
    """Returns how long a round takes by a model of the link, once rounds are repeated.

    Each round begins with link and device at rest, as where its result is read: the link has then
    nothing to do until the first of what streams has been used.

    Args:
        rounds: What is fetched.
        order: Ids of the blocks used, one round.
        compute: Seconds of each use.
        transfer: Seconds that a block takes to arrive, by id.
        latency: Seconds between a place coming free and the copy to it.
    """
    arrived: dict[int, float] = {}
    free: dict[int, float] = {}  # when the compute of a block's last use so far ends
    device = link = 0.0
    number = rounds.again
    count = len(rounds.fetches) - number
    seconds = 0.0
    for turn in range(2 * count):
        began = device = link = max(device, link)
        waiting = iter(rounds.fetches[number])
        fetch = next(waiting, None)
        for event in range(len(order) + 1):
            host = began + host_seconds(event)
            while fetch is not None and fetch.event == event:
                link = max(
                    [link, host, *(free.get(block, 0.0) + latency for block in fetch.leaves)]
                )
                link += transfer[fetch.block]
                arrived[fetch.block] = link
                fetch = next(waiting, None)
            if event < len(order):
                block = order[event]
                device = max(device, host, arrived.get(block, 0.0)) + compute[event]
                free[block] = device
        number = rounds.after(number)
        if turn >= count:
            seconds += max(device, link) - began
    return seconds / count


def _of_missing(block: Missing, event: int) -> Fetch:
    return Fetch(event, block.block, block.nbytes, block.offset, (), False, block.first)
