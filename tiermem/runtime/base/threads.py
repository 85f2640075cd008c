"""Several threads of a program that use blocks at one time: each may have to wait for the others.

Threads in which autograd runs backward are not threads of the program here: one of those waits for
what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, RLock, get_ident

import torch

_LONGEST = 60.0
"""Seconds for which a thread waits until another lets a block go."""
_TURN = 10.0
"""Seconds for which a call waits for others to end: what it waits for may wait for it. After one
that waited in vain others wait a tenth as long, until one gets its turn."""


class UserThreads:
    """Notes which threads of the program use blocks.

    Attributes:
        several: Whether more than one has been seen.
        waiting: Those that wait until another lets a block go.
        then: Called, under the lock, once a second one is seen.
    """

    __slots__ = ("_condition", "_first", "_inside", "_patience", "several", "then", "waiting")

    def __init__(self, lock: RLock) -> None:
        """Has seen none.

        Args:
            lock: The manager's.
        """
        self._condition = Condition(lock)
        self._first = 0
        self._inside = set[int]()
        self._patience = 1.0
        self.several = False
        self.waiting = set[int]()
        self.then: Callable[[int], object] | None = None  # it is given the first one

    def note(self) -> None:
        """Notes that the calling thread uses blocks; any thread may call it."""
        if self.several or torch._C._current_graph_task_id() != -1:
            return
        thread = get_ident()
        self._first = self._first or thread
        if thread != self._first:
            with self._condition:
                if not self.several and self.then is not None:
                    self.then(self._first)
                self.several = True

    def enter(self, most: Callable[[], int]) -> None:
        """Notes that the calling thread begins a call of a wrapped model; under the lock.

        Args:
            most: Returns in how many calls threads may be at one time; it waits for its turn.
        """
        self.note()
        thread = get_ident()
        self.waiting.discard(thread)  # an exception may have cut it short there
        self._inside.discard(thread)
        if self.several and self._inside and torch._C._current_graph_task_id() == -1:
            turn = self._patience
            if len(self._inside) >= most():
                came = self._condition.wait_for(lambda: len(self._inside) < most(), _TURN * turn)
                self._patience = 1.0 if came else turn / 10
        self._inside.add(thread)

    def leave(self) -> None:
        """Notes that the calling thread has ended that call; under the lock."""
        self._inside.discard(get_ident())
        if self.several:
            self.notify()

    def repair(self) -> None:
        """Notes, after an exception anywhere, that no thread is in a call; under the lock."""
        self._inside.clear()
        self.waiting.clear()

    def notify(self) -> None:
        """Wakes the threads that wait: there may be room now; under the lock."""
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
