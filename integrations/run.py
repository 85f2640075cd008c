"""What every integration's wrapped model has: a manager, and an end."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Self

from tiermem import TierManager

from .layers import recompute_layers, restore_layers


class Run:
    """A wrapped model with its manager; a context manager that closes it.

    Attributes:
        model: The model, wrapped.
        tier: The manager: ``tier.optimizer(...)``, ``stats()``, ``residency()``.
    """

    model: nn.Module
    tier: TierManager

    def wrap(self, model: nn.Module, *, recompute: bool = False, **options: Any) -> None:
        """Wraps a model; where that fails, the model is as it was and the manager closed.

        Args:
            model: The model.
            recompute: Whether its layers are computed again in backward.
            **options: Of ``tier.wrap``.
        """
        changed = False
        try:
            if recompute:
                recompute_layers(model)
                changed = True
            self.model = self.tier.wrap(model, **options)
        except BaseException:
            if changed:
                restore_layers(model)
            self.tier.close()
            raise

    def close(self) -> None:
        """Closes the manager."""
        self.tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.tier.__exit__(*error)
