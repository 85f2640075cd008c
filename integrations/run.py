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
    _recomputes = False

    def wrap(self, model: nn.Module, *, recompute: bool = False, **options: Any) -> None:
        """Wraps a model; if that fails, the model is unchanged and the manager closed.

        Args:
            model: The model.
            recompute: Whether its layers are recomputed in backward.
            **options: Options of ``tier.wrap``.
        """
        self.model = model
        try:
            if recompute and not getattr(model, "is_gradient_checkpointing", False):
                recompute_layers(model)
                self._recomputes = True
            self.tier.wrap(model, **options)
        except BaseException:
            self._restore()
            self.tier.close()
            raise

    def close(self) -> None:
        """Closes the manager; the model is an ordinary module again, with its trained weights."""
        self.tier.close()
        self._restore()

    def _restore(self) -> None:
        """Stops the recomputation of layers that this class began."""
        if self._recomputes:
            restore_layers(self.model)
            self._recomputes = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.tier.__exit__(*error)
        if self.tier.closed:
            self._restore()
