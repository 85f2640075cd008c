"""Threads that wait for each other, in an order that a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def lets_go_first(wait: Callable[[Any], bool], go_on: threading.Event) -> Callable[[Any], bool]:
    """Returns what stands for :meth:`UserThreads.wait`: another thread goes on once it is called.

    The calling thread is woken by what that one does, for which it needs the manager's lock.
    """

    def waits(threads: Any) -> bool:
        with threads._condition:
            go_on.set()
            return wait(threads)

    return waits
