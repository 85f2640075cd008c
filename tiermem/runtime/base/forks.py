"""Distinguishes a forked child from the process that opened the tiers."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol


class Forked(Protocol):
    """An object that is notified of forks. Its methods neither raise nor wait for threads."""

    def before_fork(self) -> None:
        """Called when this process is about to fork."""
        ...

    def after_fork(self) -> None:
        """Called in the parent after a fork, also if it failed."""
        ...

    def forked(self) -> None:
        """Called in a forked child."""
        ...


_generation = 0
_told: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.RLock()
"""One fork at a time: what was prepared for one must not be undone by another."""


def _before() -> None:
    _forking.acquire()
    for owner in list(_told):
        owner.before_fork()


def _after() -> None:
    try:
        for owner in list(_told):
            owner.after_fork()
    finally:
        _forking.release()


def _forked() -> None:
    global _forking, _generation
    _generation += 1
    _forking = threading.RLock()
    for owner in list(_told):
        owner.forked()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_forked)


def generation() -> int:
    """Returns how many forks there were between the process that was started and this one."""
    return _generation


def tell_of_forks(owner: Forked) -> None:
    """Notifies an object of every fork, as long as it exists."""
    _told.add(owner)
