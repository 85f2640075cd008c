"""Several threads of a program that use blocks at one time: each may have to wait for the others.

Threads in which autograd runs backward are not threads of the program here: one of those waits for
what they do.
"""

from __future__ import annotations

from threading import Condition, RLock, get_ident

import torch

_LONGEST = 60.0
"""Seconds for which a thread waits until another lets a block go."""


class UserThreads:
    """Notes which threads of the program use blocks.

    Attributes:
        several: Whether more than one has been seen.
        waiting: Those that wait until another lets a block go.
    """

    __slots__ = ("_condition", "_first", "_inside", "several", "waiting")

    def __init__(self, lock: RLock) -> None:
        """Has seen none.

        Args:
            lock: The manager's.
        """
        self._condition = Condition(lock)
        self._first = 0
        self._inside = set[int]()
        self.several = False
        self.waiting = set[int]()

    def note(self) -> None:
        """Notes that the calling thread uses blocks; any thread may call it."""
        if self.several or torch._C._current_graph_task_id() != -1:
            return
        thread = get_ident()
        self._first = self._first or thread
        if thread != self._first:
            self.several = True

    def enter(self) -> None:
        """Notes that the calling thread begins a call of a wrapped model; under the lock."""
        thread = get_ident()
        self._inside.add(thread)
        self.waiting.discard(thread)  # an exception may have cut it short there

    def leave(self) -> None:
        """Notes that the calling thread has ended that call; under the lock."""
        self._inside.discard(get_ident())
        self.notify()

    def notify(self) -> None:
        """Wakes the threads that wait: there may be room now; under the lock."""
        if self.waiting:
            self._condition.notify_all()

    def wait(self) -> bool:
        """Waits, where there is no room, until another thread in a model lets a block go.

        Returns:
            Whether one has; False at once where none does anything but wait.
        """
        thread = get_ident()
        with self._condition:
            if thread not in self._inside or not self._inside - self.waiting - {thread}:
                return False
            self.waiting.add(thread)
            try:
                return self._condition.wait(_LONGEST)
            finally:
                self.waiting.discard(thread)
