"""What has left HBM since it was last looked at."""

from __future__ import annotations

from collections.abc import Iterable


class Departures:
    """A log of departures from HBM: all changes of what is in HBM are entered, one reader reads it.

    Attributes:
        count: Grows whenever a block leaves HBM or changes its place there; compare it with an
            earlier value to know whether any has since.
    """

    __slots__ = ("_unread", "count")

    def __init__(self) -> None:
        """Starts empty."""
        self.count = 0
        self._unread: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._unread)

    def add(self, block_id: int) -> None:
        """Enters that a block has left HBM."""
        self.count += 1
        self._unread.add(block_id)

    def add_move(self) -> None:
        """Enters that a block has changed its place in HBM, or another has come into its place."""
        self.count += 1

    def add_home(self, block_id: int) -> None:
        """Enters that a block's home copy is to be fetched (again): it was lent or written."""
        self._unread.add(block_id)

    def read(self) -> set[int]:
        """Returns the blocks added since this was called last."""
        unread, self._unread = self._unread, set()
        return unread

    def skip(self) -> None:
        """Drops what was added and not read: the reader looks at everything anyway."""
        self._unread.clear()

    def forget(self, block_ids: Iterable[int]) -> None:
        """Takes out blocks that do not exist any more."""
        self._unread.difference_update(block_ids)
