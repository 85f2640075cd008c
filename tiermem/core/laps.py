"""Places for what streams in a loop, laid out for whole rounds beforehand. Pure.

Blocks that stream come up in the order of their use, each to a place that is given by the layout:
the room that they stream through is gone over from its begin to its end, in *laps*. So what a
round fetches, where to, and what leaves for it follows from the order of use and the sizes alone.
A round is one pass, or several: forward and then backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from tiermem.core.layouts import Run, layouts

_VISIT = 0.5
"""Share of the room to stream through that may come up between two uses for one fetch."""
_AS_GOOD = 1.01
"""A layout that takes so many times the busier of link and compute is taken at once."""
_AS_GOOD_SEVERAL = 1.03
"""The same in rounds of several passes, each of which waits for its first place."""
_AS_FEW = 1.01
"""One that moves so many times the fewest bytes is taken at once, too."""
_FEWER = 1.001
"""Factor from which on one moves fewer bytes than another."""
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
        event: When it begins: 0 as its pass begins, else as use ``event - 1`` of that has been
            entered.
        block: Id of what comes.
        nbytes: Bytes of its place.
        offset: First byte of it.
        leaves: Ids of the blocks that are evicted for it.
        exchanged: Whether just one leaves, and its place began where this one does.
        use: Position of the use it is for, from the begin of its pass.
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
    """What is fetched in the rounds of a loop, pass by pass.

    Attributes:
        fetches: Of each pass, in order.
        again: The pass that comes after the last of them, and so on for good.
    """

    fetches: list[list[Fetch]]
    again: int

    def after(self, number: int) -> int:
        """Returns the pass that comes after one."""
        return number + 1 if number + 1 < len(self.fetches) else self.again


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A loop that is laid out.

    Attributes:
        visits: Of a round, by first use.
        layout: See :func:`tiermem.core.layouts.layouts`.
        postponed: How many of a pass's fetches for the next one are left to the begin of that.
        moved: Seconds in which a round's copies are made.
        seconds: How long a round takes by the model of the link.
    """

    visits: list[Visit]
    layout: list[list[int]]
    postponed: int
    moved: float
    seconds: float

    def is_better(self, other: LaidOut) -> bool:
        """Whether it takes less time than another; of two that take as long, moves less."""
        if _FEWER * self.moved <= other.moved:
            return self.seconds <= _AS_GOOD * other.seconds
        if _FEWER * other.moved <= self.moved:
            return _AS_GOOD * self.seconds < other.seconds
        return self.seconds < other.seconds


class Round:
    """The events of a round: the begin of each of its passes, and each use as it is entered.

    Attributes:
        lengths: Uses of each pass.
        uses: How many there are in all.
        count: How many events there are.
        entered: The event of each use.
        freed: The event from which on the block of each use may leave, if that was its last one.
    """

    def __init__(
        self, lengths: Sequence[int], lags: Sequence[int] = (), counted: Sequence[bool] = ()
    ) -> None:
        """Counts the events.

        Args:
            lengths: Uses of each pass.
            lags: Of each pass, how many further uses have begun before a block is let go; none
                where that is left out.
            counted: Of each use, whether it counts for that; all do where it is left out.
        """
        self.lengths = lengths
        self._firsts = [0, *accumulate(lengths)]
        self._begins = [use + number for number, use in enumerate(self._firsts)]
        self.uses, self.count = self._firsts[-1], self._begins[-1]
        self.entered: list[int] = []
        self.freed: list[int] = []
        for number, (first, end) in enumerate(pairwise(self._firsts)):
            lag = lags[number] if lags else 0
            self.entered += [number + use + 1 for use in range(first, end)]
            later = [use for use in range(first, end) if not counted or counted[use]]
            for use in range(first, end):
                at = bisect_right(later, use) + lag - 1
                last = use if not lag else later[at] if at < len(later) else end - 1
                self.freed.append(number + last + 2)

    def find(self, event: int) -> tuple[int, int, int]:
        """Returns which pass an event is in, which event of that, and the uses before the pass.

        Args:
            event: Counted from the begin of the first round, as passes and uses are.
        """
        turn, event = divmod(event, self.count)
        number = bisect_right(self._begins, event) - 1
        first = turn * self.uses + self._firsts[number]
        return turn * len(self.lengths) + number, event - self._begins[number], first


def lay_out(
    order: Sequence[int],
    one: Round,
    compute: Sequence[float],
    streams: Mapping[int, int],
    transfer: Mapping[int, float],
    runs: Sequence[Run],
    latency: float,
) -> LaidOut | None:
    """Lays a loop out in the way that takes it the least time; None where none is possible.

    Args:
        order: Ids of the blocks used, one round.
        one: The events of a round.
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
    used, most = sum(compute), sum(transfer[visit.block] for visit in visits)
    count = _POSTPONED if most > used else 0
    enough = _AS_GOOD if len(one.lengths) == 1 else _AS_GOOD_SEVERAL
    best: LaidOut | None = None
    tried = 0
    blocks, sizes = [visit.block for visit in visits], [visit.nbytes for visit in visits]
    several = len(set(blocks)) < len(blocks)
    fewest = _fewest(order, one.lengths, streams, transfer, room) if several else most
    tries = _MOST_TRIED * (1 + several)  # there are more kinds
    for layout in layouts(blocks, sizes, runs):
        rounds = play(visits, layout, one, {})
        if rounds is None:
            continue
        passes = _busy(rounds, one.lengths, compute, transfer)
        moved, least = sum(copies for copies, _ in passes), sum(map(max, passes))
        late = postponed(rounds, count, one.lengths)
        seconds = seconds_of(late, order, one.lengths, compute, transfer, latency)
        found = LaidOut(visits, layout, count, moved, seconds)
        if best is None or found.is_better(best):
            best = found
        tried += 1
        good = seconds <= enough * least and moved <= _AS_FEW * fewest
        if tried == tries or good:
            break
    return best


def _fewest(
    order: Sequence[int],
    lengths: Sequence[int],
    streams: Mapping[int, int],
    transfer: Mapping[int, float],
    room: int,
) -> float:
    """Returns seconds of copies of a round each pass of which finds the room full of its blocks."""
    found, first = 0.0, 0
    for length in lengths:
        used = set(order[first : first + length]) & streams.keys()
        copies, nbytes = sum(map(transfer.__getitem__, used)), sum(map(streams.__getitem__, used))
        found += copies * max(0.0, 1.0 - room / max(1, nbytes))
        first += length
    return found


def _busy(
    rounds: Rounds,
    lengths: Sequence[int],
    compute: Sequence[float],
    transfer: Mapping[int, float],
) -> list[tuple[float, float]]:
    """Returns the seconds of copies, and of compute, in each pass of a round."""
    passes, again = len(lengths), rounds.fetches[rounds.again :]
    found, first = [], 0
    for number, length in enumerate(lengths):
        copies = sum(transfer[fetch.block] for one in again[number::passes] for fetch in one)
        found.append((copies * passes / len(again), sum(compute[first : first + length])))
        first += length
    return found


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
    one: Round,
    inside: Mapping[int, Place],
    missing: Sequence[Missing] = (),
) -> Rounds | None:
    """Returns what is fetched in each pass, as soon as the places are free.

    A place is free once the use after the last one of the block that has it is entered, or the
    pass after it begins: the block is not in use any more then. Backward lets go of it later.

    Args:
        visits: Of one round, by first use.
        layout: See :func:`tiermem.core.layouts.layouts`.
        one: The events of a round.
        inside: What is in HBM of what streams as the first round begins, by id.
        missing: What stays and is fetched in the first round, by first use.

    Returns:
        The rounds; None where a block would come too late for its use, or no two rounds are alike.
    """
    passes, count = len(one.lengths), _LEAD + min(2 * len(layout), 2 + _MOST_PLAYED // one.uses)
    found: list[list[Fetch]] = [[] for _ in range(count * passes)]
    there = {block: Place(place.offset, place.nbytes) for block, place in inside.items()}
    begins = sorted((place.offset, block) for block, place in there.items())
    now = 0
    late = list(reversed(missing))
    for number in range(count):
        begin = number * one.count
        for visit, offset in zip(visits, layout[number % len(layout)], strict=True):
            while late and late[-1].first <= visit.first:
                _enter_missing(found, late.pop(), one.find(now))
            free_at = begin + one.freed[visit.last]
            place = there.get(visit.block)
            if place is not None and place.offset == offset:
                place.free_at = free_at
                continue
            over = _overlapped(there, begins, visit, offset)
            now = max([now, *(there[block].free_at for block in over)])
            if now >= begin + one.entered[visit.first]:
                return None
            exchanged = len(over) == 1 and there[over[0]].offset == offset
            at, event, before = one.find(now)
            use = number * one.uses + visit.first - before
            block, nbytes = visit.block, visit.nbytes
            found[at].append(Fetch(event, block, nbytes, offset, tuple(over), exchanged, use))
            for other in over:
                begins.remove((there.pop(other).offset, other))
            there[block] = Place(offset, nbytes, free_at)
            insort(begins, (offset, block))
        while late:
            _enter_missing(found, late.pop(), one.find(now))
        whole = now // one.count * passes
        done = _repeated(found[:whole], passes, len(layout) * passes)
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


def _repeated(found: list[list[Fetch]], *periods: int) -> Rounds | None:
    """Returns the passes up to where they repeat after one of some numbers; None where none do."""
    for length in periods:
        number = len(found) - 2 * length
        if number < 0:
            continue
        alike = [[fetch.same() for fetch in fetches] for fetches in found[number:]]
        if alike[:length] == alike[length:]:
            return Rounds(found[: number + length], number)
    return None


def postponed(rounds: Rounds, count: int, lengths: Sequence[int]) -> Rounds:
    """Leaves the last fetches of each pass that are for the next one to the begin of that.

    As a pass begins, all room is taken by what comes first in it, and the link has nothing to do
    until some of that has been used; what is left of the pass before gives it something.

    Args:
        rounds: See :func:`play`.
        count: How many of them, at the most.
        lengths: Uses of each pass of a round.
    """
    fetches, again = rounds.fetches, rounds.again
    uses = [lengths[number % len(lengths)] for number in range(len(fetches))]
    kept = [_split(one, count, length) for one, length in zip(fetches, uses, strict=True)]
    late = [
        [f._replace(event=0, use=f.use - length) for f in end]
        for (_, end), length in zip(kept, uses, strict=True)
    ]
    first = [[fetch.same() for fetch in late[number]] for number in (again - 1, -1)]
    if not again or first[0] != first[1]:  # the first time round is another one
        kept, late = kept + kept[again:], late + late[again:]
        again = len(fetches)
    heads = [[], *late]
    return Rounds([head + body for head, (body, _) in zip(heads, kept, strict=False)], again)


def _split(fetches: list[Fetch], count: int, length: int) -> tuple[list[Fetch], list[Fetch]]:
    """Returns what a pass fetches, and apart up to so many of its last fetches for the next."""
    at = len(fetches)
    while at and len(fetches) - at < count and fetches[at - 1].use >= length:
        at -= 1
    return fetches[:at], fetches[at:]


def seconds_of(
    rounds: Rounds,
    order: Sequence[int],
    lengths: Sequence[int],
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
        lengths: Uses of each pass of it.
        compute: Seconds of each use.
        transfer: Seconds that a block takes to arrive, by id.
        latency: Seconds between a place coming free and the copy to it.
    """
    arrived: dict[int, float] = {}
    free: dict[int, float] = {}  # when the compute of a block's last use so far ends
    device = link = 0.0
    events = _by_event(rounds, lengths)
    count = (len(rounds.fetches) - rounds.again) // len(lengths)
    seconds = 0.0
    for turn in range(2 * count):
        began = device = link = max(device, link)
        for event, (fetches, use) in enumerate(islice(events, sum(lengths) + len(lengths))):
            host = began + (_PRELUDE + event * _HOST if event else 0.0)
            for fetch in fetches:
                link = max(
                    [link, host, *(free.get(block, 0.0) + latency for block in fetch.leaves)]
                )
                link += transfer[fetch.block]
                arrived[fetch.block] = link
            if use >= 0:
                block = order[use]
                device = max(device, host, arrived.get(block, 0.0)) + compute[use]
                free[block] = device
        if turn >= count:
            seconds += max(device, link) - began
    return seconds / count


def _by_event(rounds: Rounds, lengths: Sequence[int]) -> Iterator[tuple[list[Fetch], int]]:
    """Yields what begins at each event from the first round that repeats on, for good.

    Yields:
        The fetches, and the use that is entered next; -1 as a pass ends.
    """
    number = rounds.again
    while True:
        use = 0
        for length in lengths:
            fetches = iter(rounds.fetches[number])
            fetch = next(fetches, None)
            for event in range(length + 1):
                due = []
                while fetch is not None and fetch.event == event:
                    due.append(fetch)
                    fetch = next(fetches, None)
                yield due, use + event if event < length else -1
            use += length
            number = rounds.after(number)


def _enter_missing(found: list[list[Fetch]], block: Missing, when: tuple[int, int, int]) -> None:
    """Enters the fetch of a block that stays from now on.

    Args:
        found: What is fetched in each pass.
        block: The block.
        when: See :meth:`Round.find`.
    """
    at, event, before = when
    place, use = block.offset, block.first - before
    found[at].append(Fetch(event, block.block, block.nbytes, place, (), False, use))
