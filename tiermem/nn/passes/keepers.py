"""What optimizers keep in the tiers, and their steps in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiermem.core.block import Block, Extent, Tier
from tiermem.nn.groups.group import Group


@dataclass(frozen=True, slots=True, eq=False)
class Keeper:
    """What one optimizer keeps in the tiers.

    Attributes:
        blocks: Returns its blocks of state and masters, and of gradients taken from parameters.
        space: Returns the space below HBM that it has beside these.
        optimizer: The optimizer itself.
        before_forward: Called before each top-level pass, with whether gradients are computed.
        check_steps: Raises a ``CapacityError`` if HBM has no room for one of its steps.
    """

    blocks: Callable[[], list[Block]]
    space: Callable[[], list[tuple[Tier, Extent]]]
    optimizer: object
    before_forward: Callable[[bool], None]
    check_steps: Callable[[], None]


class UnderWay(Protocol):
    """A step that holds blocks until it is completed or undone."""

    def end(self) -> None:
        """Undoes it unless it is complete, and releases everything."""
        ...

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns the group that it holds, and the blocks that it leases beside that."""
        ...


class Keepers(list[Keeper]):
    """The keepers of all open optimizers.

    Attributes:
        attempts: Steps that are in progress, or could not be undone yet.
    """

    def __init__(self) -> None:
        """Starts without any."""
        super().__init__()
        self.attempts: list[UnderWay] = []

    def space(self) -> list[tuple[Tier, Extent]]:
        """Returns the space below HBM that optimizers have beside blocks."""
        return [place for keeper in self for place in keeper.space()]
