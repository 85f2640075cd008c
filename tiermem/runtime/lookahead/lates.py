"""When passes let go of blocks, where that was seen to be later than expected."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from tiermem.core.schedule import lag_of

_MOST_PASSES = 32
_MOST_LAG = 8
"""Further uses in backward, at the most, before a block is expected to be let go."""
_MOST_WATCHED = 64
"""Blocks that are asked about at each use of a pass that is watched, at most."""
_THROUGHOUT = 0.5
"""Share of a pass's uses for which a block is held that had better stay."""


@dataclass(slots=True, eq=False)
class Late:
    """When a pass lets go of blocks.

    Attributes:
        lag: How many further blocks are used before.
        further: The same of single blocks, where it is more.
    """

    lag: int
    further: dict[int, int] = field(default_factory=dict)


class Lates:
    """What was seen of each pass; what is planned and what is laid out both go by it.

    A module lets go of its own block when it is left, and inner ones are used before: some, or all
    the rest of the pass where it is the outermost. So when a pass breaks off since a block could
    not leave yet, the rest of it is watched, and what is seen is expected from then on.

    Attributes:
        version: How often that has changed.
        watching: Whether the pass under way is watched.
    """

    def __init__(self) -> None:
        """Expects all passes to let go of blocks as they do as a rule."""
        self.version = 0
        self.watching = False
        self._known: dict[Hashable, Late] = {}
        self._name: Hashable = None
        self._in_use: dict[int, int] = {}  # where each block that may not leave was used last
        self._left: dict[int, int] = {}  # likewise, taken to be in use to the end
        self._seen: dict[int, int] = {}

    def of(self, name: Hashable) -> Late:
        """Returns when a pass lets go of blocks; not to be changed."""
        return self._known.get(name) or Late(lag_of(name))

    def throughout(
        self, spans: Iterable[tuple[int, int, Hashable]], sizes: Mapping[int, int], room: int
    ) -> set[int]:
        """Returns the blocks that passes hold for most of their uses: they stay there.

        Args:
            spans: Begin, end and name of each pass.
            sizes: Bytes of blocks that may be among them, by id.
            room: Bytes of HBM; nothing is returned that would take more than half of it.
        """
        found = {
            block
            for begin, end, name in spans
            for block, further in self.of(name).further.items()
            if block in sizes and further >= _THROUGHOUT * (end - begin)
        }
        return found if 2 * sum(map(sizes.__getitem__, found)) <= room else set()

    def broke_off(self, name: Hashable, used: dict[int, int]) -> None:
        """Notes that the pass under way broke off, since blocks are let go later than expected.

        Backward lets go of a block when it has come to the output of two further modules. What is
        used in between, as saved weights are unpacked, counts as a use all the same: its lag is
        raised for all of it.

        Args:
            name: Of the pass.
            used: Where in it each of those blocks was used last.
        """
        if not lag_of(name):
            self.watching, self._name, self._in_use = True, name, used
            self._left, self._seen = {}, {}
            return
        late = self._of_its_own(name)
        late.lag = min(_MOST_LAG, late.lag + lag_of(name))

    def look(self, block: int, at: int, may_leave: Callable[[int], bool]) -> None:
        """Notes what may leave by now, in a pass that is watched.

        Args:
            block: What is used now.
            at: Where in the pass.
            may_leave: Tells whether a block may leave.
        """
        in_use = self._in_use
        for other in [other for other in in_use if other == block or may_leave(other)]:
            self._note(other, at - 1 - in_use.pop(other))
        in_use[block] = at
        if len(in_use) > _MOST_WATCHED:
            oldest = next(iter(in_use))
            self._left[oldest] = in_use.pop(oldest)

    def end(self, uses: int) -> None:
        """Notes that the pass under way is over: what is in use still was so to its end.

        Args:
            uses: How many of them it had.
        """
        if not self.watching:
            return
        self.watching = False
        for block, at in [*self._left.items(), *self._in_use.items()]:
            self._note(block, uses - 1 - at)
        if any(self._seen.values()) or self._name in self._known:
            late = self._of_its_own(self._name)
            late.further.update(self._seen)

    def forget(self) -> None:
        """Watches no longer, after an exception anywhere."""
        self.watching = False

    def _note(self, block: int, further: int) -> None:
        self._seen[block] = max(further, self._seen.get(block, 0))

    def _of_its_own(self, name: Hashable) -> Late:
        """Returns what is known of a pass, to be changed."""
        late = self._known[name] = self._known.pop(name) if name in self._known else self.of(name)
        self.version += 1
        if len(self._known) > _MOST_PASSES:
            del self._known[next(iter(self._known))]
        return late
