"""What lower rooms know of the manager: whether it can be used."""

from __future__ import annotations

from typing import Protocol


class CallGate(Protocol):
    """Stands before every operation on blocks.

    Attributes:
        torn: Whether an exception came at a line of ours, so that anything may be half done.
    """

    torn: bool

    @property
    def closed(self) -> bool:
        """Whether blocks can no longer be used from here."""
        ...

    def guard(self) -> None:
        """Repairs what is half done.

        Raises:
            ClosedError: If blocks can no longer be used from here.
        """
        ...
