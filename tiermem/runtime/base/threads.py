"""Several threads of a program that use blocks at the same time and may wait for each other.

Threads in which autograd runs backward do not count here: a thread of the program waits for
them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, RLock, get_ident

import torch

_LONGEST = 60.0
"""Seconds for which a thread waits until another one releases a block."""
_TURN = 10.0
"""Seconds for which a call waits for others to end, since these may be waiting for it. After a call
has waited in vain, others wait a tenth as long, until one gets its turn."""


class UserThreads:
    """Notes which threads of the program use blocks.

    Attributes:
        several: Whether more than one has been seen.
        waiting: The threads that wait until another one releases a block.
        then: Called, under the lock, when a second thread is seen.
    """

    __slots__ = ("_condition", "_first", "_inside", "_patience", "several", "then", "waiting")

    def __init__(self, lock: RLock) -> None:
        """Has seen no thread yet.

        Args:
            lock: The manager's lock.
        """
        self._condition = Condition(lock)
        self._first = 0
        self._inside = set[int]()
        self._patience = 1.0
        self.several = False
        self.waiting = set[int]()
        self.then: Callable[[int], object] | None = None  # called with the first thread

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
            most: Returns how many threads may be in calls at the same time; if there are more, this
                one waits.
        """
        self.note()
        thread = get_ident()
        self.waiting.discard(thread)  # an exception may have ended its wait
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
        """Wakes waiting threads, since there may be room now; under the lock."""
        self._condition.notify_all()

    def wait(self) -> bool:
        """If there is no room, waits until another thread in a model releases a block.

        Returns:
            Whether one has; False at once if all others are waiting, too.
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
