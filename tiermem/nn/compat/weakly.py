"""Hooks that keep nothing alive, for places where the garbage collector cannot see references."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tiermem.errors import ClosedError


class Hook:
    """Calls a method for a parameter, as long as its entry and the method's object are there.

    The garbage collector does not see torch's references to hooks that run after accumulation: a
    hook that kept the parameter would keep it for ever.
    """

    __slots__ = ("_call", "_entry", "_owner")

    def __init__(self, method: Callable[[Any, torch.Tensor], None], entry: object) -> None:
        self._owner, self._call = _parts(method)
        self._entry = weakref.ref(entry)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Calls the method, where both objects are still alive."""
        owner, entry = self._owner(), self._entry()
        if owner is not None and entry is not None:
            self._call(owner, entry, tensor)


class Weak:
    """Calls a method for a parameter on behalf of its gradient, and keeps neither.

    torch keeps what is in ``param.grad``, and the garbage collector does not see that it does.
    """

    __slots__ = ("_call", "_entry", "_given", "_owner")

    def __init__(self, method: Callable[..., Any], entry: object, *given: Any) -> None:
        self._owner, self._call = _parts(method)
        self._entry = weakref.ref(entry)
        self._given = given

    def __call__(self, *args: Any) -> Any:
        """Calls the method; raises ClosedError where one of both objects is gone."""
        owner, entry = self._owner(), self._entry()
        if owner is None or entry is None:
            raise ClosedError(
                "this gradient lived in the tiers of a model and a TierManager that are gone; "
                "clone() it before, or keep the model"
            )
        return self._call(owner, entry, *self._given, *args)


def _parts(method: Callable[..., Any]) -> tuple[weakref.ref[Any], Callable[..., Any]]:
    """Returns a weak reference to a bound method's object, and its function.

    ``weakref.WeakMethod`` does the same with some calls more, at every parameter's gradient.
    """
    bound: Any = method
    return weakref.ref(bound.__self__), bound.__func__
