"""Whether the blocks of a manager can be used."""

from __future__ import annotations

from collections.abc import Callable

from tiermem.errors import ClosedError

_IN_CHILD = (
    "this TierManager belongs to the parent process; a forked child cannot use its "
    "tiers: open one of its own, or pass it ordinary tensors"
)
_CLOSED = (
    "this TierManager is closed: the models that were wrapped in it are ordinary ones "
    "again, unless they were discarded, and the state of its optimizers is gone (take "
    "optimizer.state_dict() before); open a new one and wrap again"
)


class CallGate:
    """Checks, before every operation on blocks, that blocks can be used.

    Attributes:
        closed: Whether blocks can no longer be used from here.
        forked: Whether that is because this process is a forked child.
        torn: Whether an exception was raised in tiermem's own code, so that an operation may
            be half done.
        unsure: Whether the leases have not been checked since then.
    """

    __slots__ = ("_repair", "closed", "forked", "torn", "unsure")

    def __init__(self, repair: Callable[[], None]) -> None:
        """Starts open.

        Args:
            repair: Repairs what is half done, if that is possible now.
        """
        self._repair = repair
        self.closed = False
        self.forked = False
        self.torn = False
        self.unsure = False

    def guard(self) -> None:
        """Repairs what is half done.

        Raises:
            ClosedError: If blocks can no longer be used from here.
        """
        if self.closed:
            raise ClosedError(_IN_CHILD if self.forked else _CLOSED)
        if self.torn:
            self._repair()
