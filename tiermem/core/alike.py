"""Questions about many things at once, and changes of them, in loops that run in C.

A training step asks a dozen things of each parameter, and mostly all of a block answer alike. In a
loop of Python each of them takes the host 20 to 90 instructions a parameter. These take none, and
no signal handler runs in between.
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
    """Whether each value is the very object that stands at its place among the others.

    Args:
        values: Some.
        others: As many.
    """
    return all(map(is_, values, others))


def all_are(values: Iterable[Any], other: Any) -> bool:
    """Whether each value is one object."""
    return all(map(is_, values, repeat(other)))


def set_each(things: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Sets an attribute of each thing to the value at its place.

    Args:
        things: Whose attribute.
        name: Of the attribute; setting it is to run no code of Python.
        values: As many.
    """
    any(map(setattr, things, repeat(name), values))


def set_all(things: Iterable[Any], name: str, value: Any) -> None:
    """Sets an attribute of each thing to one value; see :func:`set_each`."""
    any(map(setattr, things, repeat(name), repeat(value)))
