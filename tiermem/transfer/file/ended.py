"""Which transfers have ended; notifies the threads that wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque

from tiermem.errors import StorageError
from tiermem.transfer.file.jobs import FileTransfer


class Ended:
    """The transfers of one pump that have ended.

    Attributes:
        lock: Guards the state of transfers, and other state that the pump shares.
        changed: Notified when a transfer has ended, or rests.
        finished: Those that have not been returned by a poll yet.
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
        """Marks a transfer as waiting for its target only."""
        with self.lock:
            transfer.rests = True
            self.changed.notify_all()
