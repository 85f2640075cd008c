"""Lays out the places in HBM of streaming blocks beforehand, for whole rounds of a loop. Pure.

Streaming blocks are fetched in the order of their use, each to a place that the layout gives it:
the room that they stream through is filled from its begin to its end, in *laps*. So the order of
use and the sizes alone determine what a round fetches, to which address, and which blocks leave
for it. A round is one pass, or several: forward and then backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import NamedTuple

from tiermem.core.layouts import Run, layouts
from tiermem.core.rounds import Fetch, Round, Rounds, busy_in, postponed, seconds_of

_VISIT = 0.5
"""Share of the streaming room that may be fetched between two uses that share one fetch."""
_THROUGHOUT = 0.5
"""A block stays if this share of all uses lies between its first and its last use."""
_AS_GOOD = 1.01
"""A layout is taken at once if it takes at most this many times the busier of link and compute."""
_AS_GOOD_SEVERAL = 1.03
"""The same in rounds of several passes, each of which waits for its first place."""
_AS_FEW = 1.01
"""A layout is also taken at once if it moves at most this many times the fewest bytes."""
_FEWER = 1.001
"""A layout moves fewer bytes than another if the difference exceeds this factor."""
_POSTPONED = 1
"""Fetches postponed to the begin of the next pass if the link is busier than the device; for more
see :func:`postpone_more`."""
_AS_LONG = 1.0005
"""Factor by which a pass may be longer with one more postponed fetch; if the device is busier, it
has to be shorter by this factor."""
_MOST_TRIED = 3
_MOST_VISITS = 600
"""Visits up to which further layouts are tried for a round of several passes, each of which takes
as long again. With more visits, the first possible one was never 1% slower than the best of six."""
_LEAD = 4
"""Rounds after which a simulated loop has to repeat itself."""
_MOST_PLAYED = 1 << 15
"""Uses in the rounds that are simulated until they repeat, without the first ones."""


class Visit(NamedTuple):
    """The time a block spends in HBM for one use, or for several that are near each other.

    Attributes:
        block: Its id.
        first: Position in the round of the first of those uses.
        last: Position of the last.
        nbytes: Bytes of its place.
    """

    block: int
    first: int
    last: int
    nbytes: int


class Place(NamedTuple):
    """Where a block is in HBM.

    Attributes:
        offset: First byte.
        nbytes: Bytes.
    """

    offset: int
    nbytes: int

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
        nbytes: Bytes of its place.
    """

    block: int
    first: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A loop that is laid out.

    Attributes:
        visits: The visits of a round, by first use.
        layout: See :func:`tiermem.core.layouts.layouts`.
        postponed: How many fetches for the next pass are postponed to its begin.
        moved: Seconds that a round's copies take.
        seconds: Seconds that a round takes by the model of the link.
    """

    visits: list[Visit]
    layout: list[list[int]]
    postponed: int
    moved: float
    seconds: float

    def is_better(self, other: LaidOut) -> bool:
        """Whether it takes less time than another, or as long and moves fewer bytes."""
        if _FEWER * self.moved <= other.moved:
            return self.seconds <= _AS_GOOD * other.seconds
        if _FEWER * other.moved <= self.moved:
            return _AS_GOOD * self.seconds < other.seconds
        return self.seconds < other.seconds


class Ways:
    """The possible layouts of a loop and their fetches, which do not depend on times.

    Attributes:
        order: Ids of the blocks used, one round.
        one: The events of a round.
        streams: Bytes of the blocks that stream, by id.
        room: Bytes of the room they stream through.
        visits: The visits of a round, by first use.
        several: Whether blocks are fetched several times in a round.
    """

    def __init__(
        self, order: Sequence[int], one: Round, streams: Mapping[int, int], runs: Sequence[Run]
    ) -> None:
        """Finds the visits of a round.

        Args:
            order: Ids of the blocks used, one round.
            one: The events of a round.
            streams: Bytes of the blocks that stream, by id.
            runs: The runs of bytes that they stream through, ascending.
        """
        self.order, self.one, self.streams = order, one, streams
        self.room = sum(end - begin for begin, end in runs)
        self.visits = visits_of(order, streams, int(_VISIT * self.room))
        blocks = [visit.block for visit in self.visits]
        sizes = [visit.nbytes for visit in self.visits]
        self.several = len(set(blocks)) < len(blocks)
        self._played: list[tuple[list[list[int]], Rounds]] = []
        self._rest = layouts(blocks, sizes, runs) if blocks else iter(())

    def __iter__(self) -> Iterator[tuple[list[list[int]], Rounds]]:
        """Yields layouts with their fetches; each is simulated once, when it is needed."""
        yield from self._played
        for layout in self._rest:
            rounds = play(self.visits, layout, self.one, {})
            if rounds is not None:
                self._played.append((layout, rounds))
                yield layout, rounds


def lay_out(
    ways: Ways, compute: Sequence[float], transfer: Mapping[int, float], latency: float
) -> LaidOut | None:
    """Returns the fastest layout of a loop; None if none is possible.

    Args:
        ways: The possible layouts.
        compute: Seconds of each use of a round.
        transfer: Seconds that each streaming block takes to arrive, by id.
        latency: Seconds between a place becoming free and the copy to it.
    """
    order, one, visits = ways.order, ways.one, ways.visits
    used, most = sum(compute), sum(transfer[visit.block] for visit in visits)
    count = _POSTPONED if most > used else 0
    enough = _AS_GOOD if len(one.lengths) == 1 else _AS_GOOD_SEVERAL
    best: LaidOut | None = None
    fewest = most
    ends = 0.0 if len(one.lengths) > 1 or not visits else at_the_ends(visits, compute)
    if ways.several:
        fewest = _fewest(order, one.lengths, ways.streams, transfer, ways.room)
    tries = _MOST_TRIED
    if ways.several:  # there are more kinds of layouts then
        tries = max(1, min(2 * _MOST_TRIED, _MOST_VISITS // len(visits)))
    for tried, (layout, rounds) in enumerate(ways, 1):
        passes = busy_in(rounds, one.lengths, compute, transfer)
        moved, least = sum(copies for copies, _ in passes), sum(map(max, passes))
        late = postponed(rounds, count, one.lengths)
        seconds = seconds_of(late, order, one.lengths, compute, transfer, latency)
        found = LaidOut(visits, layout, count, moved, seconds)
        if best is None or found.is_better(best):
            best = found
        good = seconds <= enough * least + ends and moved <= _AS_FEW * fewest
        if tried == tries or good:
            break
    return best


def at_the_ends(visits: Sequence[Visit], compute: Sequence[float]) -> float:
    """Returns seconds of compute that cannot overlap with copies, in a round of one pass.

    No place becomes free until the first streaming block has been used, and the last use cannot
    begin before the last copy has ended.

    Args:
        visits: The visits of a round, by first use.
        compute: Seconds of each use of it.
    """
    return sum(compute[: visits[0].first + 1]) + compute[-1]


def postpone_more(
    out: LaidOut,
    ways: Ways,
    compute: Sequence[float],
    transfer: Mapping[int, float],
    latency: float,
) -> LaidOut:
    """Postpones more fetches to the begin of the next pass, as long as a pass takes no longer.

    No place becomes free until the host has entered the first uses of a pass; until then the link
    only has the postponed fetches to do. At the end of a pass the link lacks these only during the
    compute of the last uses, which takes less than was measured if these waited for the host. So
    if the link is busier than the device, fetches that make no difference are postponed, too. Plans
    are compared without this, which takes less time.

    Args:
        out: A layout by :func:`lay_out`; returned unchanged for rounds of several passes.
        ways: The possible layouts of the loop.
        compute: Seconds of each use of a round.
        transfer: Seconds that each streaming block takes to arrive, by id.
        latency: Seconds between a place becoming free and the copy to it.
    """
    lengths, length = ways.one.lengths, ways.one.lengths[0]
    if len(lengths) > 1:
        return out
    as_long = _AS_LONG if out.postponed else 1 / _AS_LONG
    rounds = next(rounds for layout, rounds in ways if layout is out.layout)
    most = max(sum(fetch.use >= length for fetch in fetches) for fetches in rounds.fetches)
    for count in range(out.postponed + 1, most + 1):
        late = postponed(rounds, count, lengths)
        seconds = seconds_of(late, ways.order, lengths, compute, transfer, latency)
        if seconds > as_long * out.seconds:
            break
        out = replace(out, postponed=count, seconds=min(seconds, out.seconds))
    return out


def _fewest(
    order: Sequence[int],
    lengths: Sequence[int],
    streams: Mapping[int, int],
    transfer: Mapping[int, float],
    room: int,
) -> float:
    """Returns the seconds of a round's copies if each pass finds the room full of its blocks."""
    found, first = 0.0, 0
    for length in lengths:
        used = set(order[first : first + length]) & streams.keys()
        copies, nbytes = sum(map(transfer.__getitem__, used)), sum(map(streams.__getitem__, used))
        found += copies * max(0.0, 1.0 - room / max(1, nbytes))
        first += length
    return found


def visits_of(order: Sequence[int], sizes: Mapping[int, int], reach: int) -> list[Visit]:
    """Returns the visits of a round, by first use.

    Args:
        order: Ids of the blocks that are used, one round.
        sizes: Bytes of those that stream, by id.
        reach: Bytes that may be fetched between two uses that belong to one visit.
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


def there_throughout(order: Sequence[int], sizes: Mapping[int, int], room: int) -> set[int]:
    """Returns the blocks that would be in HBM for most of the time even if they streamed.

    Such a block is used again and again between the others (for example embeddings of relative
    positions, in each layer). It takes a place for nearly as long as a resident block, and other
    blocks would have to stream around it.

    Args:
        order: Ids of the blocks that are used, one round or several.
        sizes: Bytes of those that stream, by id.
        room: Bytes of HBM for them.
    """
    visits = visits_of(order, sizes, int(_VISIT * room))
    most = _THROUGHOUT * len(order)
    return {visit.block for visit in visits if visit.last - visit.first > most}


def play(
    visits: Sequence[Visit],
    layout: Sequence[Sequence[int]],
    one: Round,
    inside: Mapping[int, Place],
    missing: Sequence[Missing] = (),
) -> Rounds | None:
    """Simulates rounds and returns the fetches of each pass, as soon as their places are free.

    A place is free once the use after the last use of its block is entered, or the next pass
    begins: the block is not in use any more then. Backward releases blocks later.

    Args:
        visits: The visits of one round, by first use.
        layout: See :func:`tiermem.core.layouts.layouts`.
        one: The events of a round.
        inside: Places of the streaming blocks that are in HBM when the first round begins, by id.
        missing: Resident blocks that are fetched in the first round, by first use.

    Returns:
        The rounds; None if a block would arrive too late for its use, or no two rounds are alike.
    """
    passes, count = len(one.lengths), _LEAD + min(2 * len(layout), 2 + _MOST_PLAYED // one.uses)
    found: list[list[Fetch]] = [[] for _ in range(count * passes)]
    # by block in HBM: where it begins and ends, and the event from which on it may leave
    there = {block: place.offset for block, place in inside.items()}
    ends = {block: place.end for block, place in inside.items()}
    free = dict.fromkeys(inside, -1)
    blocks = {offset: block for block, offset in there.items()}
    begins = sorted(blocks)
    now, when = 0, one.find(0)
    late = list(reversed(missing))
    for number in range(count):
        begin = number * one.count
        for (block, use, last, nbytes), offset in zip(
            visits, layout[number % len(layout)], strict=True
        ):
            while late and late[-1].first <= use:
                _enter_missing(found, late.pop(), when)
            own = there.get(block)
            if own == offset:
                free[block] = begin + one.freed[last]
                continue
            first = bisect_left(begins, offset)
            first -= first > 0 and ends[blocks[begins[first - 1]]] > offset
            behind = bisect_left(begins, offset + nbytes, first)
            over = [blocks[at] for at in begins[first:behind]]
            apart = own is not None and block not in over
            exchanged = behind == first + 1 and begins[first] == offset and not apart
            if apart:
                over.append(block)
            event = now
            for other in over:
                event = max(event, free[other])
            if event >= begin + one.entered[use]:
                return None
            if event != now:
                now, when = event, one.find(event)
            at, event, before = when
            to = number * one.uses + use - before
            found[at].append(Fetch(event, block, nbytes, offset, tuple(over), exchanged, to))
            for other in over:
                del blocks[there.pop(other)], ends[other], free[other]
            begins[first:behind] = [offset]
            if own is not None and apart:
                begins.remove(own)
            there[block], ends[block], blocks[offset] = offset, offset + nbytes, block
            free[block] = begin + one.freed[last]
        while late:
            _enter_missing(found, late.pop(), when)
        whole = now // one.count * passes
        done = _repeated(found[:whole], *dict.fromkeys((passes, len(layout) * passes)))
        if done is not None:
            return done
    return None


def _repeated(found: list[list[Fetch]], *periods: int) -> Rounds | None:
    """Returns the passes up to their repetition with one of some periods; None if there is none."""
    for length in periods:
        number = len(found) - 2 * length
        if number >= 0 and all(map(_alike, found[number:-length], found[-length:])):
            return Rounds(found[: number + length], number)
    return None


def _alike(one: Sequence[Fetch], other: Sequence[Fetch]) -> bool:
    """Whether two passes do the same."""
    if len(one) != len(other):
        return False
    return all(map(eq, map(Fetch.same, one), map(Fetch.same, other)))


def _enter_missing(found: list[list[Fetch]], block: Missing, when: tuple[int, int, int]) -> None:
    """Adds the fetch of a block that stays from now on.

    Args:
        found: The fetches of each pass.
        block: The block.
        when: See :meth:`Round.find`.
    """
    at, event, before = when
    place, use = block.offset, block.first - before
    found[at].append(Fetch(event, block.block, block.nbytes, place, (), False, use))
