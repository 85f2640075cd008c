"""What optimizers keep in the tiers, and their steps under way."""

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
        blocks: Returns its blocks of state and masters, and of gradients that no parameter has.
        space: Returns the space below HBM that it has beside these.
        optimizer: The optimizer itself.
        before_forward: Called before each top-level pass, with whether gradients are taken.
        check_steps: Raises a ``CapacityError`` where HBM has no room for one of its steps.
    """

    blocks: Callable[[], list[Block]]
    space: Callable[[], list[tuple[Tier, Extent]]]
    optimizer: object
    before_forward: Callable[[bool], None]
    check_steps: Callable[[], None]


class UnderWay(Protocol):
    """A step that holds blocks until it is made or taken back."""

    def end(self) -> None:
        """Takes it back unless it is made, and releases everything."""
        ...

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns the group that it holds, and the blocks that it leases beside that."""
        ...


class Keepers(list[Keeper]):
    """Those of every optimizer that is open.

    Attributes:
        attempts: Steps that are under way, or could not be taken back yet.
    """

    def __init__(self) -> None:
        """Starts without any."""
        super().__init__()
        self.attempts: list[UnderWay] = []

    def space(self) -> list[tuple[Tier, Extent]]:
        """Returns the space below HBM that optimizers have beside blocks."""
        return [place for keeper in self for place in keeper.space()]
