"""Blocks that have left HBM since this was last read."""

from __future__ import annotations

from collections.abc import Iterable


class Departures:
    """A log of departures from HBM: all changes in HBM are entered, and there is one reader.

    For a block that has left, both attributes are updated in line.

    Attributes:
        count: Grows whenever a block leaves HBM or changes its place there; compare it with an
            earlier value to know whether any has since.
        unread: The blocks that were added since :meth:`read` was called last.
    """

    __slots__ = ("count", "unread")

    def __init__(self) -> None:
        """Starts empty."""
        self.count = 0
        self.unread: set[int] = set()

    def add_move(self) -> None:
        """Notes that a block has changed its place in HBM, or another has come into its place."""
        self.count += 1

    def add_home(self, block_id: int) -> None:
        """Notes that a block's home copy is to be fetched (again): it was lent or written."""
        self.unread.add(block_id)

    def read(self) -> set[int]:
        """Returns the blocks added since this was called last."""
        unread, self.unread = self.unread, set()
        return unread

    def skip(self) -> None:
        """Drops unread entries: the reader checks everything anyway."""
        self.unread.clear()

    def forget(self, block_ids: Iterable[int]) -> None:
        """Removes blocks that do not exist any more."""
        self.unread.difference_update(block_ids)
