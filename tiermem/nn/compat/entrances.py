"""Decorators of entry points called by users and torch; they note exceptions for a repair."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from torch import is_grad_enabled
from torch._C import _set_grad_enabled

from tiermem.errors import REFUSALS
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.runtime.manager import BlockManager

F = TypeVar("F", bound=Callable[..., Any])


class Repairable(Protocol):
    """What a repair works on: the modules of a manager.

    Attributes:
        manager: The manager of their blocks.
        repair: Repairs everything; see :mod:`tiermem.nn.wrap.repair`.
    """

    manager: BlockManager
    repair: Callable[[], None]


class HasRuntime(Protocol):
    """Something that users call."""

    _runtime: Repairable


class HasManager(Protocol):
    """Something that torch calls during a user's code."""

    manager: BlockManager


def entrance(method: F) -> F:
    """Marks a method that users call, of an object that :class:`HasRuntime`.

    It begins with a repair if one is due, and notes an exception that was not raised on purpose
    and did not come from outside (:mod:`tiermem.nn.compat.outside`). Such an exception may have
    occurred while a context was being left, so that autograd would stay switched off.
    """

    @functools.wraps(method)
    def enter(self: HasRuntime, /, *args: Any, **kwargs: Any) -> Any:
        manager = self._runtime.manager
        if manager.gate.unsure:
            self._runtime.repair()
        recorded = is_grad_enabled()
        try:
            return method(self, *args, **kwargs)
        except REFUSALS:
            raise
        except BaseException as error:  # no deep calls in here: there may be little stack left
            if OUTSIDE in error.__dict__:
                del error.__dict__[OUTSIDE]
            else:
                manager.gate.torn = manager.gate.unsure = True
                _set_grad_enabled(recorded)
            raise

    return cast("F", enter)


def inside(method: F) -> F:
    """Marks a method that torch calls, of an object that :class:`HasManager`.

    It notes an exception like :func:`entrance`; the repair is left to those.
    """

    @functools.wraps(method)
    def enter(self: HasManager, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except REFUSALS:
            raise
        except BaseException as error:
            if OUTSIDE not in error.__dict__:
                self.manager.gate.torn = self.manager.gate.unsure = True
            raise

    return cast("F", enter)
