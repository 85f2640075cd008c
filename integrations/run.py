"""What every integration's wrapped model has: a manager, and an end."""

from __future__ import annotations

from types import TracebackType

from torch import nn
from typing_extensions import Self

from tiermem import TierManager


class Run:
    """A wrapped model with its manager; a context manager that closes it.

    Attributes:
        model: The model, wrapped.
        tier: The manager: ``tier.optimizer(...)``, ``stats()``, ``residency()``.
    """

    model: nn.Module
    tier: TierManager

    def close(self) -> None:
        """Closes the manager."""
        self.tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.tier.__exit__(kind, error, traceback)
