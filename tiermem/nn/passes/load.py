"""The load of a call in tokens, and its kind, as far as its arguments tell."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

_OF_WORK = ("ids", "embeds", "hidden_states", "pixel", "values", "features", "input", "sample")
_OF_NO_WORK = ("mask", "position", "type", "label", "past", "cache", "encoder_hidden")
_PATCH = 3 * 16 * 16
"""Values of an image that are taken for one token: a patch of 16 by 16 pixels."""
_IMAGE = 4
_MOST_KINDS = 64


def tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns about how many tokens a call works on; 0 where that is unknown.

    Times of one model are compared by it, so what counts is that twice the work is twice the
    number.

    Args:
        args: Positional arguments of the call; the first tensor of them counts.
        kwargs: The others; of those whose names speak of input all tensors count, or else the
            first tensor.
    """
    found = next((_count(value) for value in args if isinstance(value, torch.Tensor)), 0)
    named = [(name, value) for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    found += sum(_count(value) for name, value in named if _is_input(name))
    return found or next((_count(value) for _, value in named), 0)


class Kinds:
    """Numbers for calls with the same arguments given, in the same mode."""

    def __init__(self) -> None:
        """Starts with none."""
        self._numbers: dict[Hashable, dict[Hashable, int]] = {}

    def number(
        self, scope: Hashable, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> int:
        """Returns which kind of call of a module this is: 0 for the first, 1 for the next...

        Args:
            scope: The module.
            training: Whether it is in training mode, where it may use other modules.
            args: Positional arguments; how many there are counts.
            kwargs: The others; which of them are given counts.
        """
        kinds = self._numbers.setdefault(scope, {})
        kind = (training, len(args), *_given(kwargs))
        return kinds.setdefault(kind, len(kinds)) if len(kinds) < _MOST_KINDS else 0


def _given(kwargs: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, value in kwargs.items() if value is not None)


def _is_input(name: str) -> bool:
    return any(word in name for word in _OF_WORK) and not any(word in name for word in _OF_NO_WORK)


def _count(value: torch.Tensor) -> int:
    """Returns about how many tokens a tensor has; 0 where it has no sizes."""
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
