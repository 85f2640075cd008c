"""When passes release blocks, if that was observed to be later than expected."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from tiermem.core.schedule import lag_of

_MOST_PASSES = 32
_MOST_LAG = 8
"""Most further uses in backward before a block is expected to be released."""
_MOST_WATCHED = 64
"""Most blocks that are checked at each use of a watched pass."""
_THROUGHOUT = 0.5
"""A block that is held for this share of a pass's uses should stay."""


@dataclass(slots=True, eq=False)
class Late:
    """When a pass releases blocks.

    Attributes:
        lag: How many further blocks are used before a block is released.
        further: The same for single blocks, if it is more.
    """

    lag: int
    further: dict[int, int] = field(default_factory=dict)


class Lates:
    """Observations of when passes release blocks; plans and layouts use them.

    A module releases its own block when its call ends, and inner modules use theirs before: a few
    blocks, or all the rest of the pass for the outermost module. So if a pass does not follow its
    layout since a block could not leave yet, the rest of the pass is watched, and what is observed
    is expected from then on.

    Attributes:
        version: How often the expectations have changed.
        watching: Whether the current pass is watched.
    """

    def __init__(self) -> None:
        """Expects all passes to release blocks as usual."""
        self.version = 0
        self.watching = False
        self._known: dict[Hashable, Late] = {}
        self._name: Hashable = None
        self._in_use: dict[int, int] = {}  # where each block that may not leave was used last
        self._left: dict[int, int] = {}  # the same for blocks assumed to be in use to the end
        self._seen: dict[int, int] = {}

    def of(self, name: Hashable) -> Late:
        """Returns when a pass releases blocks; must not be changed."""
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
        """Notes that the current pass left its layout, as blocks are released later than expected.

        Backward releases a block when it has reached the outputs of two further modules. Blocks
        that are used in between, when saved weights are unpacked, also count as uses, so the lag is
        raised for the whole backward.

        Args:
            name: Name of the pass.
            used: Position of the last use of each of those blocks.
        """
        if not lag_of(name):
            self.watching, self._name, self._in_use = True, name, used
            self._left, self._seen = {}, {}
            return
        late = self._of_its_own(name)
        late.lag = min(_MOST_LAG, late.lag + lag_of(name))

    def look(self, block: int, at: int, may_leave: Callable[[int], bool]) -> None:
        """Notes which blocks may leave by now, in a watched pass.

        Args:
            block: The block that is used now.
            at: The position in the pass.
            may_leave: Returns whether a block may leave.
        """
        in_use = self._in_use
        for other in [other for other in in_use if other == block or may_leave(other)]:
            self._note(other, at - 1 - in_use.pop(other))
        in_use[block] = at
        if len(in_use) > _MOST_WATCHED:
            oldest = next(iter(in_use))
            self._left[oldest] = in_use.pop(oldest)

    def end(self, uses: int) -> None:
        """Notes that the current pass has ended: blocks still in use were in use to its end.

        Args:
            uses: How many uses it had.
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
        """Stops watching, after an exception anywhere."""
        self.watching = False

    def _note(self, block: int, further: int) -> None:
        self._seen[block] = max(further, self._seen.get(block, 0))

    def _of_its_own(self, name: Hashable) -> Late:
        """Returns the observations of a pass, to be changed."""
        late = self._known[name] = self._known.pop(name) if name in self._known else self.of(name)
        self.version += 1
        if len(self._known) > _MOST_PASSES:
            del self._known[next(iter(self._known))]
        return late
