"""Rounds of passes: their events, what is fetched at each, and how long that takes. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

_HOST = 200e-6
"""Seconds of the host for a use; it runs ahead of the device unless the device is idle."""
_PRELUDE = 1e-3
"""Seconds of the host between the begin of a round and its first use."""


def host_seconds(events: int) -> float:
    """Returns the host's seconds from the begin of a round to an event of it, by its number."""
    return _PRELUDE + events * _HOST if events else 0.0


class Fetch(NamedTuple):
    """The fetch of a block to a place, and the blocks that leave for it.

    Attributes:
        event: When it begins: 0 at the begin of its pass, else when use ``event - 1`` of the pass
            has been entered.
        block: Id of the fetched block.
        nbytes: Bytes of its place.
        offset: First byte of its place.
        leaves: Ids of the blocks that are evicted for it.
        exchanged: Whether just one block leaves, and its place has the same offset.
        use: Position of the use for which it is, from the begin of that use's pass.
    """

    event: int
    block: int
    nbytes: int
    offset: int
    leaves: tuple[int, ...]
    exchanged: bool
    use: int

    def same(self) -> tuple[object, ...]:
        """Returns a key that is equal for two fetches that do the same."""
        if self.exchanged:
            return self.event, self.block, self.leaves, self.use
        return self


@dataclass(slots=True)
class Rounds:
    """The fetches in the rounds of a loop, pass by pass.

    Attributes:
        fetches: The fetches of each pass, in order.
        again: The pass that follows the last of them; from then on they repeat.
    """

    fetches: list[list[Fetch]]
    again: int

    def after(self, number: int) -> int:
        """Returns the pass that follows one."""
        return number + 1 if number + 1 < len(self.fetches) else self.again


class Round:
    """The events of a round: the begin of each of its passes, and each use as it is entered.

    Attributes:
        lengths: Uses of each pass.
        uses: How many there are in all.
        count: How many events there are.
        entered: The event of each use.
        freed: The event from which on the block of each use may leave, if it was its last use.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        lags: Sequence[int] = (),
        further: Sequence[int] = (),
    ) -> None:
        """Counts the events.

        Args:
            lengths: Uses of each pass.
            lags: For each pass, how many further uses begin before a block is released; by default
                none.
            further: The same for single uses, if it is more; by default none.
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
            for use in range(first, end):
                more = max(lag, further[use]) if further else lag
                self.freed.append(number + min(use + more, end - 1) + 2)

    def find(self, event: int) -> tuple[int, int, int]:
        """Returns which pass an event is in, which event of that, and the uses before the pass.

        Args:
            event: Counted from the begin of the first round, as passes and uses are.
        """
        turn, event = divmod(event, self.count)
        number = bisect_right(self._begins, event) - 1
        first = turn * self.uses + self._firsts[number]
        return turn * len(self.lengths) + number, event - self._begins[number], first


def busy_in(
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


def first_in_place(fetches: Iterable[Fetch]) -> Iterator[Fetch]:
    """Yields the fetches to bytes to which no earlier fetch goes.

    Args:
        fetches: The fetches of a pass, in order.
    """
    taken: list[tuple[int, int]] = []  # disjoint and ascending, first byte and end
    for fetch in fetches:
        begin, end = fetch.offset, fetch.offset + fetch.nbytes
        low = bisect_right(taken, (begin, begin))
        low -= low > 0 and taken[low - 1][1] > begin
        high = bisect_right(taken, (end, 0))
        if low == high:
            yield fetch
        else:
            begin, end = min(begin, taken[low][0]), max(end, taken[high - 1][1])
        taken[low:high] = [(begin, end)]


def opening(rounds: Rounds) -> list[Fetch]:
    """Returns the fetches with which HBM can be filled before the first pass, by first use.

    They are the first fetches of blocks to bytes that no other block has before.

    Args:
        rounds: The fetches if no streaming block is in HBM at first.
    """
    fetches = rounds.fetches[0]
    first = {fetch.block: fetch for fetch in reversed(fetches)}
    found = (fetch for fetch in first_in_place(fetches) if first[fetch.block] is fetch)
    return sorted(found, key=lambda fetch: fetch.use)


def opened(rounds: Rounds, fetches: Iterable[Fetch]) -> Rounds | None:
    """Returns the fetches of the rounds once HBM has been filled.

    None if the first pass is repeated, as then it would have fetches that were made already.

    Args:
        rounds: The fetches if HBM is not filled.
        fetches: Those with which it has been filled; see :func:`opening`.
    """
    if not rounds.again:
        return None
    filled = set(map(id, fetches))
    first, *others = rounds.fetches
    return Rounds([[f for f in first if id(f) not in filled], *others], rounds.again)


def postponed(rounds: Rounds, count: int, lengths: Sequence[int]) -> Rounds:
    """Postpones the last fetches of each pass that are for the next pass to the begin of that.

    When a pass begins, all room is taken by the blocks that it uses first, and the link is idle
    until some of them have been used; the postponed fetches keep it busy.

    Args:
        rounds: The fetches; see :func:`tiermem.core.laps.play`.
        count: How many of them to postpone at most.
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
    """Returns the fetches of a pass, and separately up to ``count`` of the last for the next."""
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
    """Returns the seconds of a round by a model of the link, once rounds repeat.

    Each round begins with link and device idle, as if the program reads its result: then the link
    has nothing to do until the first streaming block has been used.

    Args:
        rounds: The fetches.
        order: Ids of the blocks used, one round.
        lengths: Uses of each pass of it.
        compute: Seconds of each use.
        transfer: Seconds that a block takes to arrive, by id.
        latency: Seconds between a place becoming free and the copy to it.
    """
    arrived: dict[int, float] = {}
    free: dict[int, float] = {}  # when the compute of a block's last use so far ends
    device = link = 0.0
    events = _by_event(rounds, lengths)
    count = (len(rounds.fetches) - rounds.again) // len(lengths)
    hosts = [host_seconds(event) for event in range(sum(lengths) + len(lengths))]
    seconds = 0.0
    for turn in range(2 * count):
        began = device = link = max(device, link)
        for after, (fetches, use) in zip(hosts, events, strict=False):
            host = began + after
            for fetch in fetches:
                link = max(link, host)
                for block in fetch.leaves:
                    link = max(link, free.get(block, 0.0) + latency)
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
    """Yields the fetches of each event, endlessly, from the first round that repeats.

    Yields:
        The fetches, and the use that is entered next; -1 at the end of a pass.
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
