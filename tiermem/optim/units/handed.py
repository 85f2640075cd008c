"""Which gradients the plain optimizer of a unit gets, and whether it writes them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter

import torch

from tiermem.core.alike import all_same, any_none, set_each

_first, _dtype = itemgetter(0), attrgetter("dtype")


class HandedGradients:
    """The gradients that are handed over in a step, and whether it changes them.

    Attributes:
        given: Gradients that are neither in the tiers nor ``param.grad``, by the parameter's id.
        spoils: Whether a step of the class may write the gradients that it gets.
        scaled: Whether the current step undoes a scale in them.
    """

    __slots__ = ("given", "scaled", "spoils")

    def __init__(self) -> None:
        """Assumes that steps write gradients, until the class has been tried."""
        self.given: dict[int, torch.Tensor] = {}
        self.spoils = True
        self.scaled = False

    @property
    def written(self) -> bool:
        """Whether the current step may have written them."""
        return self.spoils or self.scaled

    def hand_over(
        self,
        members: Sequence[tuple[torch.Tensor, int]],
        owns: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """Gives the optimizer the gradients, in the dtype of what it steps.

        Args:
            members: Parameters of the unit and the number of their group.
            owns: What the optimizer steps for each.
            gradients: One for each, or None; those in ``given`` take precedence.

        Returns:
            The stepped tensors whose gradient was cast: that gradient is not shared.
        """
        if self.given:
            found = zip(members, gradients, strict=True)
            gradients = [self.given.get(id(param), gradient) for (param, _), gradient in found]
        params = [*map(_first, members)]
        plain = all_same(owns, params) and not any_none(gradients)
        if plain and all_same(map(_dtype, gradients), map(_dtype, params)):
            set_each(params, "grad", gradients)
            return []
        cast = []
        for (param, _), own, given in zip(members, owns, gradients, strict=True):
            gradient = given
            if gradient is None:
                own.grad = None
                continue
            if own is not param or gradient.dtype is not param.dtype:
                gradient = gradient.to(own.device, own.dtype)
                if gradient is not given:
                    cast.append(own)
            if own.grad is not gradient:
                own.grad = gradient
        return cast
