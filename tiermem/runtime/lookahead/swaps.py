"""Swaps: the fetch of a block at one position of a schedule, and the blocks that leave for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from tiermem.core.residency import Record


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The place of a block that does not simply replace one other block.

    A loop may cycle through its slots more slowly than through its blocks, so the place is given
    relative to a block that is or was there.

    Attributes:
        leaves: The blocks that are evicted for it.
        anchor: One of those, or a neighbour that stays; None if the address is always the same.
        behind: Whether ``delta`` counts from the end of the anchor, not from its begin.
        delta: Bytes from there.
    """

    leaves: tuple[Record, ...]
    anchor: Record | None
    behind: bool
    delta: int

    @property
    def instead_of(self) -> Record | None:
        """The one block that leaves for it, if that has the same offset; else None."""
        one = len(self.leaves) == 1 and self.anchor is self.leaves[0]
        return self.anchor if one and not (self.behind or self.delta) else None

    def offset(self) -> int:
        """Returns the offset in HBM; negative if the anchor is not in HBM."""
        if self.anchor is None:
            return self.delta
        extent = self.anchor.extent
        if extent is None:
            return -1
        return self.delta + (extent.end if self.behind else extent.offset)


@dataclass(slots=True, eq=False)
class Swap:
    """One block that is fetched to the place of another, or of several.

    Attributes:
        comes: The block that is fetched.
        leaves: The block that is evicted for it, with the same offset; ``comes`` itself if ``fit``
            says which blocks leave.
        nbytes: Size of the place, wherever it is: a loop may cycle through its slots more slowly
            than through its blocks.
        position: Position of its use in the schedule.
        passes: How many passes later that is.
        key: Name of that pass.
        fit: Its place, if that is not the place of one other block of the same size; the other
            block may be smaller or larger if the place begins with it.
        came: Id of the block that is fetched.
        went: Id of the block of ``leaves``.
    """

    comes: Record
    leaves: Record
    nbytes: int
    position: int
    passes: int = 0
    key: Hashable = None
    fit: Fit | None = None
    came: int = field(init=False)
    went: int = field(init=False)

    def __post_init__(self) -> None:
        self.came, self.went = self.comes.block.id, self.leaves.block.id

    @property
    def departures(self) -> int:
        """How many blocks leave for it."""
        return 1 if self.fit is None else len(self.fit.leaves)

    def told(self) -> tuple[int, ...]:
        """Returns the values by which two swaps are compared: equal if they do the same."""
        fit = self.fit
        if fit is None:
            return self.comes.block.id, self.leaves.block.id, self.nbytes
        anchor = -1 if fit.anchor is None else fit.anchor.block.id
        went = (record.block.id for record in fit.leaves)
        return self.comes.block.id, self.nbytes, anchor, fit.behind, fit.delta, *went


@dataclass(slots=True, eq=False)
class Step:
    """The swaps at one position of a schedule.

    Attributes:
        used: Record of the block that is used; None before the first use.
        block: Id of that block; -1 before the first use.
        swaps: The swaps performed then.
    """

    used: Record | None
    block: int
    swaps: list[Swap] = field(default_factory=list)


def steps_over(order: Iterable[int], get: Callable[[int], Record | None]) -> list[Step]:
    """Returns the steps of a pass, without swaps yet: one at its begin, and one after each use.

    Args:
        order: Ids of the blocks that it uses.
        get: Returns the record of a block, if it exists.
    """
    return [Step(None, -1), *(Step(get(block), block) for block in order)]
