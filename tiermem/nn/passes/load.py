"""The load of a call in tokens, and its kind, as far as its arguments show them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

_OF_WORK = ("ids", "embeds", "hidden_states", "pixel", "values", "features", "input", "sample")
_OF_NO_WORK = ("mask", "position", "type", "label", "past", "cache", "encoder_hidden")
_PATCH = 3 * 16 * 16
"""Values of an image that count as one token: a patch of 16 by 16 pixels."""
_IMAGE = 4
_MOST_KINDS = 64


def tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns about how many tokens a call processes; 0 if that is unknown.

    The number is used to compare times of one model, so it only has to be proportional to the work.

    Args:
        args: Positional arguments of the call; the first tensor counts.
        kwargs: Keyword arguments; all tensors whose names mean input count, or else the first
            tensor.
    """
    found = next((_count(value) for value in args if isinstance(value, torch.Tensor)), 0)
    named = [(name, value) for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    found += sum(_count(value) for name, value in named if _is_input(name))
    return found or next((_count(value) for _, value in named), 0)


class Kinds:
    """Numbers the kinds of calls: those with the same arguments given, in the same mode."""

    def __init__(self) -> None:
        """Starts with none."""
        self._numbers: dict[Hashable, dict[Hashable, int]] = {}

    def number(
        self, scope: Hashable, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> int:
        """Returns which kind of call of a module this is: 0 for the first, 1 for the next...

        Args:
            scope: The module.
            training: Whether it is in training mode, in which it may use other modules.
            args: Positional arguments; their number counts.
            kwargs: Keyword arguments; their names count.
        """
        kinds = self._numbers.setdefault(scope, {})
        kind = (training, len(args), *_given(kwargs))
        return kinds.setdefault(kind, len(kinds)) if len(kinds) < _MOST_KINDS else 0


def _given(kwargs: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, value in kwargs.items() if value is not None)


def _is_input(name: str) -> bool:
    return any(word in name for word in _OF_WORK) and not any(word in name for word in _OF_NO_WORK)


def _count(value: torch.Tensor) -> int:
    """Returns about how many tokens a tensor has; 0 if it has no sizes."""
    if value.is_nested and value.layout is torch.strided:
        return 0
    shape = value.shape
    if not all(isinstance(size, int) for size in shape):
        return 0
    if not value.dtype.is_floating_point:
        return math.prod(shape)
    if len(shape) >= _IMAGE:
        return -(-math.prod(shape) // _PATCH)
    return math.prod(shape[:-1])
