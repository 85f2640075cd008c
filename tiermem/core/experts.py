"""Which experts have a seat in HBM: those that tokens choose often stay, the rest pass through.

A *seat* has room for one *piece*: the slice of a stacked tensor that belongs to one expert. Pieces
of one size share a bank of seats. Most seated pieces have *settled*: they leave only for a piece
that is worth clearly more. The other seats are for pieces that pass through; such a seat is reused
as soon as there is no view of its piece. So a round that uses every piece once (many tokens) finds
the settled ones in HBM each time, while an LRU cache would hit none. If few experts are chosen,
those that are chosen often settle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from enum import Enum
from typing import Any

_MARGIN = 1.25
_LEAST = 0.02
"""A piece is worth clearly more than another if it exceeds it by a factor and by this much."""
_SLOWEST = 1 / 64
"""The least weight of one call in the frequencies with which experts are chosen."""
_HEAVIEST = 1e100
"""If the weight of a call exceeds this, all weights are scaled down."""
FORESEEN = 0.5
"""Predictions are worth a copy if this share of them comes true."""
_PASSING = 192 << 20
"""Bytes of seats for passing pieces: enough to keep the bus busy during a layer's other work."""
_LEAST_PASSING = 4
_MOST_PASSING = 3  # at most one in this many of all seats
_AHEAD = 4
"""One in this many rows of a tensor can be filled while another one sharing its place is read."""
_TO_BEGIN = 2
"""The first passes of a trial, which do not count: HBM is laid out during them."""
_COUNTED = 2
_NEAR = 1.25
"""If a pass takes at most this many times the least possible, no other way is tried."""
_MORE_MOVED = 1.4
"""Whole tensors and layers may take at most this many times the bytes of single experts."""


class Popularity:
    """How often each expert of one layer is chosen, and how well choices can be predicted.

    Attributes:
        last: The experts chosen last, ascending.
        repeats: Share of the chosen experts that had also been chosen in the previous call.
        foreseen: Share of the predicted experts that were then chosen.
        expected: The experts that are predicted for the next call.
    """

    def __init__(self, experts: int) -> None:
        """Starts with no call seen."""
        self._often = [0.0] * experts
        self._total = 0.0  # sum of the weights of all calls
        self._weight = 1.0  # weight of the next call
        self.last: list[int] = []
        self.repeats = 0.0
        self.foreseen = 0.0
        self.expected: list[int] = []
        self._calls = 0
        self._looks = 0

    @property
    def worth_a_look(self) -> bool:
        """Whether to predict the next choice: always, or now and then if predictions fail."""
        return self.foreseen >= FORESEEN or self._looks < 8 or not self._calls % 16

    def share(self, expert: int) -> float:
        """Returns the share of calls that chose an expert; older calls weigh less."""
        return self._often[expert] / self._total if self._total else 0.0

    def note(self, chosen: list[int]) -> None:
        """Notes a call in which these experts were chosen."""
        self._calls += 1
        if self.expected:
            self._looks += 1
            right = len(set(chosen).intersection(self.expected)) / len(self.expected)
            self.foreseen += max(1 / self._looks, 1 / 16) * (right - self.foreseen)
            self.expected = []
        often, weight = self._often, self._weight
        for expert in chosen:
            often[expert] += weight
        self._total += weight
        if self._calls >= 1 / _SLOWEST:
            # instead of scaling down all counts, later calls get a larger weight
            self._weight = self._total * _SLOWEST / (1 - _SLOWEST)
        if self._weight > _HEAVIEST:
            self._often = [share / self._weight for share in often]
            self._total /= self._weight
            self._weight = 1.0
        if self.last and chosen:
            again = len(set(chosen) & set(self.last)) / len(chosen)
            self.repeats += max(1 / (self._calls - 1), 1 / 16) * (again - self.repeats)
        self.last = chosen


class Seats:
    """Assigns pieces to the seats of one bank.

    Attributes:
        seated: Seat of each piece.
    """

    def __init__(self, count: int, nbytes: int, worth: Callable[[Any], float]) -> None:
        """Starts with empty seats.

        Args:
            count: The number of seats.
            nbytes: Bytes of each.
            worth: Returns the worth of having a piece in HBM; only compared, never added.
        """
        self.seated: dict[Hashable, int] = {}
        self._worth = worth
        self._free = list(range(count))[::-1]
        self._passing: dict[Hashable, None] = {}  # the least recently used first
        self._count = count
        usual = max(_LEAST_PASSING, _PASSING // max(nbytes, 1))
        self._usual = max(1, min(usual, count // _MOST_PASSING))
        self._most = self._usual
        self._order: list[Hashable] = []  # settled ones by falling worth; some have left

    def expect(self, pieces: int) -> None:
        """Makes the number of passing seats what a layer uses, up to three quarters, if more.

        Otherwise, if all experts are chosen, the bus would be idle during a layer's other work.
        """
        self._most = max(self._usual, min(pieces, self._count * 3 // 4))

    def used(self, *pieces: Hashable) -> None:
        """Notes uses of seated pieces: among passing pieces they leave later."""
        passing = self._passing
        if passing.keys().isdisjoint(pieces):
            return
        for piece in pieces:
            if piece in passing:
                del passing[piece]
                passing[piece] = None

    def give_up(self, piece: Hashable) -> int:
        """Takes a piece out; returns its seat, which is free."""
        seat = self.seated.pop(piece)
        self._passing.pop(piece, None)
        self._free.append(seat)
        return seat

    def rename(self, piece: Hashable, name: Hashable) -> None:
        """Gives a seated piece another name, and marks it as one of the next to leave."""
        self._passing.pop(piece, None)
        self.seated[name] = self.seated.pop(piece)
        self._passing[name] = None

    def seat(
        self, piece: Hashable, stays: Callable[[Hashable], bool], *, urgent: bool, guessed: bool
    ) -> int | None:
        """Gives a piece a seat, for which another may have to leave.

        Args:
            piece: The piece; it has no seat.
            stays: Returns whether a seated piece cannot leave now.
            urgent: Whether it is needed now; then a settled one leaves if no other can.
            guessed: Whether it is only predicted; then it does not replace a settled piece.

        Returns:
            The seat; None if no piece can leave.
        """
        if self._free:
            self.seated[piece] = seat = self._free.pop()
            return seat
        self._balance(stays)
        victim = self._leaves(stays)
        if victim is None and urgent:
            victim = self._least(stays)
        if victim is None:
            return None
        settles = not guessed and self._is_worth_more(piece, stays)
        if settles:
            self._passing[self._order[-1]] = None  # leaves soon
        self._passing.pop(victim, None)
        self.seated[piece] = seat = self.seated.pop(victim)
        if not settles:
            self._passing[piece] = None
        return seat

    def _leaves(self, stays: Callable[[Hashable], bool]) -> Hashable | None:
        """Returns the first passing piece that may leave.

        Those before it are in use or will be used; they are moved to the end, so that they are not
        tested each time.
        """
        for other in [*self._passing]:
            if not stays(other):
                return other
            self.used(other)
        return None

    def _balance(self, stays: Callable[[Hashable], bool]) -> None:
        """Keeps the number of passing pieces: adds settled pieces worth least, or settles some."""
        while len(self._passing) > self._most:
            self._passing.popitem()  # the most recently used settles
        while len(self._passing) < self._most:
            least = self._least(stays)
            if least is None:
                return
            self._passing[least] = None

    def _is_worth_more(self, piece: Hashable, stays: Callable[[Hashable], bool]) -> bool:
        least = self._least(stays)
        if least is None:
            return False
        return self._worth(piece) > _MARGIN * self._worth(least) + _LEAST

    def _least(self, stays: Callable[[Hashable], bool]) -> Hashable | None:
        """Returns the settled piece that is worth least of those that may leave."""
        for _ in range(2):
            while self._order:
                piece = self._order[-1]
                settled = piece in self.seated and piece not in self._passing
                if settled and not stays(piece):
                    return piece
                self._order.pop()
            settled_now = [p for p in self.seated if p not in self._passing]
            self._order = sorted(settled_now, key=self._worth, reverse=True)
        return None


class Way(Enum):
    """How the experts of a pass are copied to HBM.

    Attributes:
        EACH: One by one, those that tokens choose.
        TENSORS: Whole tensors, in consecutive seats.
        LAYERS: All tensors of a layer, as a block like any other.
    """

    EACH = "each"
    TENSORS = "tensors"
    LAYERS = "layers"


class Trial:
    """Finds out which way is faster for passes of one kind in which all experts are chosen.

    Expert by expert, fewer bytes are copied, but each layer's copies wait for its router, and its
    product is computed in parts. Whole tensors and layers are copied during the compute of others.
    These are tried first; expert by expert only if that could be much faster.

    Attributes:
        way: The way of the next pass.
        settled: Whether the choice is final.
    """

    def __init__(self, way: Way) -> None:
        """Begins with ``way``; the other is :attr:`Way.EACH`."""
        self.way = self._other = way
        self.settled = False
        self._seen = 0
        self._best: dict[Way, float] = {}

    def refuse(self, way: Way) -> None:
        """Notes that this way was not possible for a pass."""
        if way is self._other:
            self.way, self.settled = Way.EACH, True

    def note(self, way: Way, seconds: float, least: float) -> None:
        """Notes a pass; it does not count if it used another way than the trial asks for.

        Args:
            way: The way it used.
            seconds: How long it took.
            least: The least that it can take in any way.
        """
        if self.settled or way is not self.way:
            return
        self._seen += 1
        if self._seen <= _TO_BEGIN:
            return
        self._best[way] = min(seconds, self._best.get(way, seconds))
        if self._seen < _TO_BEGIN + _COUNTED:
            return
        if way is self._other and self._best[way] > _NEAR * least:
            self.way, self._seen = Way.EACH, 0
            return
        self.way = min(self._best, key=self._best.__getitem__)
        self.settled = True


def whole_tensors(tensors: int, experts: int, rows: int, *, abreast: bool) -> list[int] | None:
    """Returns the places of tensors that are used in turn, each as a whole.

    Some have a place of their own and stay: the first, so that a pass can begin at once, and
    others, evenly spread. The rest share the remaining rows, so that every second one ends some
    rows later: while a tensor is read, rows that it does not use are filled for the next one. A
    remainder of less than a tensor is used to keep rows of the first tensor that shares.

    Args:
        tensors: The number of tensors.
        experts: Rows of each.
        rows: Rows of HBM for all of them.
        abreast: Whether two tensors that share should have places that do not overlap, if there is
            room: those of one layer are used directly after each other.

    Returns:
        The first row of each; None if there is no room for one.
    """
    if rows < experts:
        return None
    if tensors * experts <= rows:
        return [number * experts for number in range(tensors)]
    shared = 2 * experts if abreast and rows >= 2 * experts else experts
    stay, left = divmod(rows - shared, experts)
    ahead = min(left, experts // _AHEAD) if shared == experts else 0
    first, last = rows - shared - ahead, rows - experts
    begins, kept, shares = list[int](), 0, 0
    for number in range(tensors):
        if number * stay // tensors >= kept and kept < stay:
            begins.append(kept * experts)
            kept += 1
        else:
            place = last if shares % 2 else first
            begins.append(place if shares else stay * experts)
            shares += 1
    return begins


def moved_whole(tensors: int, experts: int, rows: int, *, abreast: bool) -> int:
    """Returns how many rows a pass copies if tensors are used as wholes.

    Args: as of :func:`whole_tensors`.
    """
    begins = whole_tensors(tensors, experts, rows, abreast=abreast)
    if begins is None:
        return tensors * experts
    users = Counter(row for begin in begins for row in range(begin, begin + experts))
    return sum(count for count in users.values() if count > 1)


def is_worth_whole(room: int, stacks: Collection[int]) -> bool:
    """Whether whole layers may be the faster way if all experts are chosen.

    They need room for two, and must not move much more than experts by themselves.

    Args:
        room: Bytes of HBM beside all other blocks.
        stacks: Bytes of each layer's experts.
    """
    largest = max(stacks, default=0)
    spare = room - 2 * largest
    if spare < 0 or not largest:
        return False
    kept = 0
    for nbytes in sorted(stacks, reverse=True):
        kept += nbytes if kept + nbytes <= spare else 0
    total = sum(stacks)
    return moves_little_more(total - kept, total - room)


def moves_little_more(nbytes: int, least: int) -> bool:
    """Whether a way that copies ``nbytes`` is worth a trial if ``least`` have to be copied."""
    return nbytes <= _MORE_MOVED * least


def share_out(room: int, sizes: dict[int, tuple[int, int]]) -> dict[int, int] | None:
    """Divides room among banks, so that each holds the same share of its pieces.

    Args:
        room: Bytes.
        sizes: By the bytes of a seat: how many pieces there are, and the least number of seats.

    Returns:
        Seats by the bytes of a seat; None if not even the least numbers fit.
    """
    least = {size: min(count, few) for size, (count, few) in sizes.items()}
    spare = room - sum(size * few for size, few in least.items())
    if spare < 0:
        return None
    missing = sum(size * (sizes[size][0] - few) for size, few in least.items())
    part = min(1.0, spare / missing) if missing else 0.0
    return {size: few + int(part * (sizes[size][0] - few)) for size, few in least.items()}
