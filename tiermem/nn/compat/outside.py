"""Calls from tiermem to a user's code or torch, and marks on the exceptions they raise.

There are two kinds of exceptions. One may occur between any two lines of tiermem (Ctrl-C, a
signal handler's, no memory): then anything may be half done, and the next call repairs it
(:mod:`tiermem.nn.wrap.repair`). Or it was raised by called code, or on purpose: then tiermem's
state is consistent, thanks to ``finally`` clauses, and there is nothing to repair. The class of
an exception does not distinguish the two, so those of the second kind are marked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

OUTSIDE = "_tiermem_outside"
"""Key in the ``__dict__`` of an exception that came from outside."""


def outside(call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Makes a call out of tiermem, and marks what it raises.

    Only for places where an exception of that call leaves nothing of tiermem half done.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        error.__dict__[OUTSIDE] = True
        raise


def on_purpose(error: E) -> E:
    """Marks an exception of torch's or Python's own classes that is about to be raised."""
    error.__dict__[OUTSIDE] = True
    return error
