"""Tells a forked child from the process that opened the tiers."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forked(Protocol):
    """Has something to do in a forked child."""

    def forked(self) -> None:
        """This is a forked child."""
        ...


_generation = 0
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def _forked() -> None:
    global _generation
    _generation += 1
    for owner in list(_told):
        owner.forked()


os.register_at_fork(after_in_child=_forked)


def generation() -> int:
    """Returns how many forks lie between this process and the one that was started."""
    return _generation


def tell_of_forks(owner: Forked) -> None:
    """Has ``owner.forked()`` called in every forked child, as long as the owner lives."""
    _told.add(owner)
