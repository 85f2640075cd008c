"""Hooks that keep nothing alive, for places where the garbage collector sees no references."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tiermem.errors import ClosedError

Owner = TypeVar("Owner")
Entered = TypeVar("Entered")


class Hook(Generic[Owner, Entered]):
    """A hook that torch calls for a tensor, and that keeps neither its entry nor its owner alive.

    The garbage collector does not see torch's references to hooks that run after accumulation, nor
    a graph's: a hook that kept the parameter would keep it for ever. A subclass does
    nothing if either no longer exists.
    """

    __slots__ = ("_entry", "_owner")

    def __init__(self, owner: Owner, entry: Entered) -> None:
        self._owner = weakref.ref(owner)
        self._entry = weakref.ref(entry)


class Weak:
    """Calls a method for a parameter on behalf of its gradient, and keeps neither alive.

    torch keeps what is in ``param.grad``, and the garbage collector does not see this reference.
    """

    __slots__ = ("_call", "_entry", "_given", "_owner")

    def __init__(self, method: Callable[..., Any], entry: object, *given: Any) -> None:
        self._owner, self._call = _parts(method)
        self._entry = weakref.ref(entry)
        self._given = given

    def __call__(self, *args: Any) -> Any:
        """Calls the method; raises ClosedError if one of the two objects no longer exists."""
        owner, entry = self._owner(), self._entry()
        if owner is None or entry is None:
            raise ClosedError(
                "this gradient lived in the tiers of a model and a TierManager that are gone; "
                "clone() it before, or keep the model"
            )
        return self._call(owner, entry, *self._given, *args)


def _parts(method: Callable[..., Any]) -> tuple[weakref.ref[Any], Callable[..., Any]]:
    """Returns a weak reference to a bound method's object, and its function.

    ``weakref.WeakMethod`` does the same with some more calls, for every parameter's gradient.
    """
    bound: Any = method
    return weakref.ref(bound.__self__), bound.__func__
