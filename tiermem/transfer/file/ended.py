"""Which transfers have ended, told to the threads that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque

from tiermem.errors import StorageError
from tiermem.transfer.file.jobs import FileTransfer


class Ended:
    """The transfers of one pump that have ended.

    Attributes:
        lock: Guards what a transfer says of itself, and what else the pump shares.
        changed: Notified when one has ended, or rests.
        finished: Those that nobody has asked for yet.
        failed: How many have failed so far.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # Ctrl-C can leave a Condition entered, but not a lock
        self.changed = threading.Condition(self.lock)
        self.finished: deque[FileTransfer] = deque()
        self.failed = 0

    def mark_finished(self, transfer: FileTransfer, error: StorageError | None) -> None:
        """Marks a transfer as finished and wakes the threads that wait for it."""
        transfer.error = error
        transfer.finished_ns = time.perf_counter_ns()
        with self.lock:
            self.failed += error is not None
            transfer.finished = True
            self.finished.append(transfer)
            self.changed.notify_all()

    def rest(self, transfer: FileTransfer) -> None:
        """Marks a transfer as waiting for its target alone."""
        with self.lock:
            transfer.rests = True
            self.changed.notify_all()
