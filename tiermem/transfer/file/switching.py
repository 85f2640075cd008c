"""How long a busy Python thread may keep the GIL while transfers are in progress."""

from __future__ import annotations

import sys
import threading

SWITCH_SECONDS = 0.0005
"""Longest time that a busy Python thread keeps the GIL while transfers are in progress."""


class SwitchInterval:
    """Shortens the interpreter's switch interval while any pump has work.

    A pump takes the GIL three times per chunk. With the usual 5 ms, a thread busy
    in pure Python would limit it to a fifth of the disk's speed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._usual = 0.0

    def shorten(self) -> None:
        """Counts one more pump at work."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, SWITCH_SECONDS))

    def restore(self) -> None:
        """Counts one less; the last restores the interval, unless other code set it since."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and sys.getswitchinterval() == SWITCH_SECONDS:
                sys.setswitchinterval(self._usual)

    def forked(self) -> None:
        """Resets the count in a forked child, which has no pumps."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        if self._users:
            self._users = 1
            self.restore()


switch_interval = SwitchInterval()
"""The instance of this process."""
