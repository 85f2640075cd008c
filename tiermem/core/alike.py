"""Tests and changes of many objects at once, in loops that run in C.

A training step tests a dozen properties of each parameter, and mostly all parameters of a block
have the same value. A Python loop takes 20 to 90 bytecode instructions per parameter and test.
These functions take none, and no signal handler runs in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import is_, is_not
from typing import Any, TypeVar

Thing = TypeVar("Thing")

_NONES = repeat(None)


def all_none(values: Iterable[Any]) -> bool:
    """Whether each value is None."""
    return all(map(is_, values, _NONES))


def any_none(values: Iterable[Any]) -> bool:
    """Whether any value is None."""
    return any(map(is_, values, _NONES))


def without_none(values: Sequence[Thing | None]) -> list[Thing]:
    """Returns the values that are not None, in order."""
    return [*compress(values, map(is_not, values, _NONES))]  # type: ignore[list-item]


def all_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether each value is the same object as the one at its position in ``others``.

    Args:
        values: The values.
        others: As many objects.
    """
    return all(map(is_, values, others))


def all_are(values: Iterable[Any], other: Any) -> bool:
    """Whether each value is the object ``other``."""
    return all(map(is_, values, repeat(other)))


def set_each(things: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Sets an attribute of each object to the value at its position in ``values``.

    Args:
        things: The objects.
        name: The attribute; setting it must not run Python code.
        values: As many values.
    """
    any(map(setattr, things, repeat(name), values))


def set_all(things: Iterable[Any], name: str, value: Any) -> None:
    """Sets an attribute of each object to one value; see :func:`set_each`."""
    any(map(setattr, things, repeat(name), repeat(value)))
