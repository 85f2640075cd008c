"""The schedule, made from observed passes: order of use, next uses, upcoming uses.

A *pass* is one forward, backward or optimizer sweep. The planner records the
blocks that each pass uses, learns which pass follows which, and so knows the
future of a loop. If the program does something else, blocks are fetched on
demand and the new order is learned: a wrong schedule costs time, never
correctness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NEVER = 1 << 60
"""Position of a use that is not foreseen."""

SOFT = 2
"""Blocks that backward still holds when it uses another one."""

MOST_PASSES = 6
"""Passes that are foreseen, including the current one; more if they have few uses."""

_FEW_USES = 64
"""Uses that are foreseen at least, in as many passes as needed (layers called one by one)."""
_MOST_APART = 32
"""Most passes of a round without repeated names of which two rounds are foreseen."""
_MOST_FORESEEN = 4096
"""With more uses than this, no more passes are foreseen for the above reasons."""
_MOST_CACHED = 192  # each schedule has two keys

_CONTEXTS = (16, 8, 4, 2, 1)
_LOOK_AHEAD = 64
_SELDOM = 3
_MOST_DOUBT = 16
_MOST_CONTEXTS = 4096
_MOST_USES = 1 << 22


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a schedule.

    Attributes:
        position: Position in the order of use.
        block: Id of the block used there.
    """

    position: int
    block: int


class Schedule:
    """An order of use, indexed so that the next use of a block is found in O(log n).

    Building takes time and memory practically linear in the length of the order.
    """

    def __init__(
        self,
        order: Sequence[int],
        passes: Sequence[tuple[int, Hashable]] = (),
        seldom: frozenset[int] = frozenset(),
    ) -> None:
        """Indexes ``order``, a sequence of block ids.

        Args:
            order: Ids of blocks.
            passes: Where in it each pass begins, and the name of the pass, if known.
            seldom: Blocks that few passes use; see :func:`seldom_of`.
        """
        self.order = order
        self.passes = passes
        self.seldom = seldom
        # All positions in one list, block by block: a list per block would give the garbage
        # collector a hundred thousand objects to traverse again and again.
        array = np.fromiter(order, np.int64, len(order))
        by_block = np.argsort(array, kind="stable")
        blocks, first = np.unique(array[by_block], return_index=True)
        names = blocks.tolist()
        bounds = [*first.tolist(), len(order)]
        self._positions: list[int] = by_block.tolist()
        self._begin: dict[int, int] = dict(zip(names, bounds, strict=False))
        self._end: dict[int, int] = dict(zip(names, bounds[1:], strict=True))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def first_length(self) -> int:
        """Uses of its first pass."""
        return self.passes[1][0] if len(self.passes) > 1 else len(self)

    @cached_property
    def comes_again(self) -> bool:
        """Whether its first pass is followed by another one with the same uses."""
        length = self.first_length
        again = list(self.order[length : 2 * length])
        return bool(again) and list(self.order[:length]) == again

    @cached_property
    def spans(self) -> list[tuple[int, int, Hashable]]:
        """Begin, end and name of each pass."""
        ends = [*(begin for begin, _ in self.passes[1:]), len(self)]
        return [(begin, end, key) for (begin, key), end in zip(self.passes, ends, strict=False)]

    def round_over(self, blocks: Container[int]) -> list[tuple[int, int, Hashable]]:
        """Returns the passes of a round: begin, end and name of each, until they come again.

        Passes that use none of these blocks are left out, as they make no difference to them.

        Args:
            blocks: Ids of blocks.

        Returns:
            The passes, from the first one on; empty if the foreseen passes do not repeat.
        """
        order = list(self.order)
        found = [span for span in self.spans if any(b in blocks for b in order[span[0] : span[1]])]
        uses = [order[begin:end] for begin, end, _ in found]
        count = _round_of(uses)
        if count is not None:
            return found[:count]
        for count in range(1, len(uses) // 2 + 1):  # something else comes, but not just now
            if uses[count : 2 * count] == uses[:count]:
                return found[:count]
        return []

    def next_use(self, block: int, start: int) -> int:
        """Returns the first position at or after ``start`` that uses ``block``, or NEVER."""
        end = self._end.get(block)
        if end is None:
            return NEVER
        index = bisect_left(self._positions, start, self._begin[block], end)
        return self._positions[index] if index < end else NEVER


def _round_of(uses: Sequence[list[int]]) -> int | None:
    """Returns the period with which passes repeat; None if they do not.

    Args:
        uses: What each of them uses, in order.
    """
    counts = range(1, len(uses) // 2 + 1)
    return next((count for count in counts if uses[count:] == uses[:-count]), None)


def _is_cut_short(keys: Sequence[Hashable], history: Sequence[Hashable]) -> bool:
    """Whether two rounds of passes are longer than the passes that are foreseen.

    Only rounds without repeated names are recognized: parts of a model that are called one after
    another (for example two encoders and the projections of their outputs).

    Args:
        keys: Names of the passes that are foreseen, from the current one on.
        history: Names of the passes up to that one.
    """
    for count in range(1, min(_MOST_APART, len(history) - 1) + 1):
        if history[-1 - count] == keys[0]:
            return len(keys) < 2 * count and len(set(history[-count:])) == count
    return False


def seldom_of(past: Sequence[Sequence[int]], ahead: Sequence[Sequence[int]]) -> frozenset[int]:
    """Returns the blocks that are used in at most a third of the passes in which others are.

    Keeping such a block in HBM saves a copy now and then; keeping another one saves a copy in
    nearly every pass. The result must not depend on the position in the loop, or the residents
    would change each time. So it is counted over a round if there is one, and otherwise also over
    past passes, since few passes are foreseen for a model whose calls are about to end.

    Args:
        past: The blocks that each of the last passes used, in order; as many passes as are ahead.
        ahead: The blocks that the current pass and those after it are expected to use.
    """
    uses = [*map(list, past), *map(list, ahead)]
    passes = Counter(block for use in uses[: _round_of(uses)] for block in set(use))
    foreseen = set().union(*ahead)
    most = max((passes[block] for block in foreseen), default=0)
    return frozenset(block for block in foreseen if _SELDOM * passes[block] <= most)


def lag_of(key: Hashable) -> int:
    """Returns how many further blocks are used in a pass before a block is released.

    Args:
        key: Name of the pass.
    """
    return SOFT if is_backward(key) else 0


def is_backward(key: Hashable) -> bool:
    """Whether a pass of that name is a backward."""
    return isinstance(key, tuple) and key[:1] == ("backward",)


class Trace:
    """The order of use observed in one pass, repeats of the same block in a row left out.

    Attributes:
        key: Name of the pass.
        blocks: Ids of the blocks; None as long as they are the foreseen ones up to the cursor.
    """

    def __init__(self, key: Hashable) -> None:
        """Starts empty, for the pass named ``key``."""
        self.key = key
        self.blocks: list[int] | None = None


class Planner:
    """Follows the passes, and says what will be used next.

    Attributes:
        schedule: The foreseen uses, from the begin of the current pass.
        cursor: The position of the current pass in it.
        last: The block used last; -1 before the first.
        learned: How many passes were different from what was foreseen.
        doubt: By how many unforeseen uses outnumber foreseen ones, lately.
        exact: Whether there is no doubt, and the pass has used exactly what was foreseen; then
            :meth:`follow` only advances ``cursor`` and ``last``.
    """

    def __init__(self) -> None:
        """Starts with nothing known."""
        self._known: dict[Hashable, list[int]] = {}
        self._guessed: set[Hashable] = set()
        self._after: dict[tuple[Hashable, ...], Hashable] = {}
        self._history: list[Hashable] = []
        self._foreseen: list[Hashable] = []  # from the current pass on
        self._trace: Trace | None = None
        self._cache: dict[tuple[Hashable, Hashable], Schedule] = {}
        self.schedule = Schedule(())
        self.cursor = 0
        self.last = -1
        self.learned = 0
        self.doubt = 0
        self.exact = False
        self._again: Hashable = None
        self._far = NEVER

    @property
    def key(self) -> Hashable | None:
        """Name of the current pass."""
        return self._trace.key if self._trace is not None else None

    @property
    def used(self) -> Sequence[int]:
        """The blocks that the current pass has used so far."""
        return self._observed(self._trace) if self._trace is not None else ()

    def knows(self, key: Hashable) -> bool:
        """Whether a pass of that name has been seen or guessed before."""
        return key in self._known

    def observed(self, key: Hashable) -> bool:
        """Whether a pass of that name has ended, so that its uses are not a guess."""
        return key in self._known and key not in self._guessed

    def order_of(self, key: Hashable) -> Sequence[int]:
        """Returns the blocks that a pass of that name has used or is expected to use, in order."""
        return self._known.get(key, ())

    def begin(
        self,
        key: Hashable,
        guess: Sequence[int] = (),
        *,
        like: Hashable = None,
        again: bool = False,
    ) -> None:
        """Ends the current pass and begins the next.

        Args:
            key: Name of the new pass.
            guess: Order to assume if this pass has not been seen before.
            like: Another pass, whose order is assumed instead of ``guess`` if it has been seen.
            again: Whether to assume that it repeats, if no pass is known to follow it.
        """
        self._end()
        self._again = key if again else None
        self._far = NEVER
        self.doubt //= 2
        self._foreseen = self._foreseen[1:] if self._foreseen[1:2] == [key] else []
        for length in _CONTEXTS:
            if len(self._history) >= length:
                self._learn(tuple(self._history[-length:]), key)
        self._history.append(key)
        del self._history[:-64]
        if key not in self._known:
            self._known[key] = list(self._known[like] if self.observed(like) else guess)
            self._guessed.add(key)
        self._trace = Trace(key)
        self.last = -1
        self.cursor = 0
        self.schedule = self._foresee()
        self.exact = not self.doubt

    def touch(self, block: int) -> bool:
        """Records that ``block`` is used now, and moves on in the schedule.

        Returns:
            False if it was the block used last, so that nothing changed.
        """
        if block == self.last:
            return False
        schedule, cursor, trace = self.schedule, self.cursor, self._trace
        if cursor < len(schedule.order) and schedule.order[cursor] == block:
            if trace is not None and trace.blocks is not None:  # as `follow`, in line
                self._remember(trace.blocks, block)
            self.last = block
            self.cursor = cursor + 1
            if self.doubt:
                self.doubt -= 1
            return True
        self.last = block
        self.exact = False
        if schedule.order:
            self.doubt = min(self.doubt + 1, _MOST_DOUBT)
        if trace is not None:
            trace.blocks = self._observed(trace)
            self._remember(trace.blocks, block)
        position = schedule.next_use(block, cursor)
        if position < cursor + _LOOK_AHEAD or (position != NEVER and position == self._far):
            self.cursor = position + 1
            self._far = NEVER
        else:  # taken for a leap once the next use confirms it
            self._far = position + 1 if position != NEVER else NEVER
        return True

    def follow(self, block: int) -> None:
        """Records that ``block`` is used now, which is the next one that was foreseen."""
        trace = self._trace
        if trace is not None and trace.blocks is not None:
            self._remember(trace.blocks, block)
        self.last = block
        self.cursor += 1
        if self.doubt:
            self.doubt -= 1

    def distance(self, block: int) -> int:
        """Returns how many uses precede the next use of ``block``; NEVER if none is foreseen."""
        position = self.schedule.next_use(block, self.cursor)
        return position - self.cursor if position != NEVER else NEVER

    def reset(self) -> None:
        """Ends the current pass without learning from it, after an exception anywhere."""
        self._trace = None
        self._cache.clear()
        self.schedule = Schedule(())
        self.cursor = 0
        self.last = -1

    def forget(self, blocks: set[int]) -> None:
        """Removes blocks that no longer exist from every trace."""
        for key, order in self._known.items():
            self._known[key] = [block for block in order if block not in blocks]
        self._cache.clear()
        if self._trace is not None:
            self.exact = False
            used = self._observed(self._trace)
            self._trace.blocks = [block for block in used if block not in blocks]
        foreseen = self.schedule.order
        behind = sum(1 for block in foreseen[: self.cursor] if block in blocks)
        self.schedule = Schedule([block for block in foreseen if block not in blocks])
        self.cursor -= behind

    def _end(self) -> None:
        if self._trace is None:
            return
        key, blocks = self._trace.key, self._observed(self._trace)
        self._guessed.discard(key)
        if self._known.get(key) != blocks:
            self._known[key] = blocks
            self._cache.clear()
            self.learned += 1
        self._trace = None

    def _remember(self, blocks: list[int], block: int) -> None:
        if len(blocks) < _MOST_USES:  # further uses are not recorded
            blocks.append(block)

    def _observed(self, trace: Trace) -> list[int]:
        """Returns the blocks used so far in the current pass."""
        return list(self.schedule.order[: self.cursor]) if trace.blocks is None else trace.blocks

    def _learn(self, context: tuple[Hashable, ...], key: Hashable) -> None:
        """Remembers which pass followed; contexts that have not occurred for long are dropped."""
        if self._after.pop(context, None) != key:
            self._foreseen.clear()  # another future may be foreseen now
        self._after[context] = key
        if len(self._after) > _MOST_CONTEXTS:
            del self._after[next(iter(self._after))]

    def _foresee(self) -> Schedule:
        """Concatenates this pass and those expected after it, about two rounds."""
        keys = self._foreseen or [self._history[-1]]
        history, known = [*self._history, *keys[1:]], self._known
        uses = sum(len(known.get(key, ())) for key in keys)
        while True:
            few = len(keys) < MOST_PASSES or (uses < _FEW_USES and len(keys) < _FEW_USES)
            if not few and (uses >= _MOST_FORESEEN or not _is_cut_short(keys, self._history)):
                break
            following = self._successor(history)
            if following is None:
                break
            keys.append(following)
            history.append(following)
            uses += len(known.get(following, ()))
        self._foreseen = keys
        around = tuple(self._history[-len(keys) - 1 : -1]), tuple(keys)
        cached = self._cache.get(around)
        if cached is None:
            past, ahead = ([known.get(key, ()) for key in part] for part in around)
            seldom = seldom_of(past, ahead)
            # what is behind makes no other schedule of it: what was planned and recorded holds
            cached = self._cache.get((seldom, around[1]))
            if cached is None:
                order: list[int] = []
                passes: list[tuple[int, Hashable]] = []
                for key, uses_of_it in zip(keys, ahead, strict=True):
                    passes.append((len(order), key))
                    order.extend(uses_of_it)
                cached = Schedule(order, passes, seldom)
            for name in (around, (seldom, around[1])):
                self._cache[name] = cached
                if len(self._cache) > _MOST_CACHED:
                    self._cache.pop(next(iter(self._cache)))
        return cached

    def _successor(self, history: list[Hashable]) -> Hashable | None:
        for length in _CONTEXTS:
            if len(history) >= length:
                found = self._after.get(tuple(history[-length:]))
                if found is not None:
                    return found
        return self._again if history[-1] == self._again else None
