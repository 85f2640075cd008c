"""Places for what streams in a loop, laid out for whole rounds beforehand. Pure.

Blocks that stream come up in the order of their use, each to a place that is given by the layout:
the room that they stream through is gone over from its begin to its end, in *laps*. So what a
round fetches, where to, and what leaves for it follows from the order of use and the sizes alone.
A round is one pass, or several: forward and then backward.
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
"""Share of the room to stream through that may come up between two uses for one fetch."""
_THROUGHOUT = 0.5
"""Share of all uses, from a block's first to its last, from which on it stays."""
_AS_GOOD = 1.01
"""A layout that takes so many times the busier of link and compute is taken at once."""
_AS_GOOD_SEVERAL = 1.03
"""The same in rounds of several passes, each of which waits for its first place."""
_AS_FEW = 1.01
"""One that moves so many times the fewest bytes is taken at once, too."""
_FEWER = 1.001
"""Factor from which on one moves fewer bytes than another."""
_POSTPONED = 1
"""Fetches left to the begin of the next pass, where the link is busier than the device; for more
see :func:`postpone_more`."""
_AS_LONG = 1.0005
"""Factor by which a pass may be longer with one more of those; it has to be as much shorter where
the device is busier."""
_MOST_TRIED = 3
_MOST_VISITS = 600
"""Visits in the layouts that are tried of a round of several passes, each of which takes as long
again. With more than that the first that can be was never 1% slower than the best of six."""
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
        nbytes: Bytes of it.
    """

    block: int
    first: int
    offset: int
    nbytes: int


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


class Ways:
    """The ways to lay a loop out, and what is fetched then, whatever the times are.

    Attributes:
        order: Ids of the blocks used, one round.
        one: The events of a round.
        streams: Bytes of the blocks that stream, by id.
        room: Bytes of the room they stream through.
        visits: Of a round, by first use.
        several: Whether blocks come several times in a round.
    """

    def __init__(
        self, order: Sequence[int], one: Round, streams: Mapping[int, int], runs: Sequence[Run]
    ) -> None:
        """Looks at what streams.

        Args:
            order: Ids of the blocks used, one round.
            one: The events of a round.
            streams: Bytes of the blocks that stream, by id.
            runs: The room they stream through, ascending.
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
        """Yields layouts and what is fetched with them; each is played once, when asked for."""
        yield from self._played
        for layout in self._rest:
            rounds = play(self.visits, layout, self.one, {})
            if rounds is not None:
                self._played.append((layout, rounds))
                yield layout, rounds


def lay_out(
    ways: Ways, compute: Sequence[float], transfer: Mapping[int, float], latency: float
) -> LaidOut | None:
    """Lays a loop out in the way that takes it the least time; None where none is possible.

    Args:
        ways: Those that there are.
        compute: Seconds of each use of a round.
        transfer: Seconds that each block which streams takes to arrive, by id.
        latency: Seconds between a place coming free and the copy to it.
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
    if ways.several:  # there are more kinds
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
    """Returns seconds of compute that no layout has copies beside, in a round of one pass.

    Until the first block that streams has been used no place comes free, and the last use is made
    when the last copy is there, or later.

    Args:
        visits: Of a round, by first use.
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
    """Leaves more fetches to the begin of the next pass, as long as a pass takes no longer for it.

    Until the host has entered the first uses of a pass no place comes free: all that the link has
    to do meanwhile is what was left to it. As a pass ends the link lacks that only while the last
    uses compute, which takes less than was measured where the host was what they waited for. So
    where the link is busier than the device, those that come to the same are left as well. Plans
    are compared without this, which takes less time.

    Args:
        out: As :func:`lay_out` returns it for the others; as it is in rounds of several passes.
        ways: The ways to lay the loop out.
        compute: Seconds of each use of a round.
        transfer: Seconds that each block which streams takes to arrive, by id.
        latency: Seconds between a place coming free and the copy to it.
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
    """Returns seconds of copies of a round each pass of which finds the room full of its blocks."""
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


def there_throughout(order: Sequence[int], sizes: Mapping[int, int], room: int) -> set[int]:
    """Returns the blocks that are in HBM for most of the time however they stream.

    One of them is used again and again among all others (embeddings of relative positions, in each
    layer). Its place is taken nearly as if it stayed, and what streams would have to go around it.

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
    # of what is in HBM, by block: where it begins and ends, and the event from which it may leave
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
    """Returns the passes up to where they repeat after one of some numbers; None where none do."""
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
    """Enters the fetch of a block that stays from now on.

    Args:
        found: What is fetched in each pass.
        block: The block.
        when: See :meth:`Round.find`.
    """
    at, event, before = when
    place, use = block.offset, block.first - before
    found[at].append(Fetch(event, block.block, block.nbytes, place, (), False, use))
