"""Tells a forked child from the process that opened the tiers."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_generation = 0
_locked: weakref.WeakSet[Any] = weakref.WeakSet()


def _forked() -> None:
    global _generation
    _generation += 1
    # another thread of the parent may have had the lock, and will never give it back here
    for owner in list(_locked):
        owner.lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def generation() -> int:
    """Returns how many forks lie between this process and the one that was started."""
    return _generation


def renew_lock(owner: Any) -> None:
    """Gives ``owner.lock`` a fresh lock in every forked child."""
    _locked.add(owner)
