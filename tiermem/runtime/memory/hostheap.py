"""Keeps the C library's heap from growing under the temporary tensors of ``device="cpu"``.

Gradients, activations and the temporaries of an optimizer are allocated by ``malloc``, live
shortly, and differ in size. Once some large ones have been freed, glibc allocates these from its
heap as well, and its aligned allocation (before 2.38) does not find the holes that they leave. So
step by step the heap grows to many times the size that is in use (ADR 33).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

VARIABLE = "TIERMEM_MALLOC"
"""Environment variable; ``keep`` leaves the C library as it is."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 20
_TOP = 32 << 20
_GROWN = 32 << 20
_SHARE = 16
_EVERY = 4
_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_PAGE = os.sysconf("SC_PAGESIZE")


def _library() -> Any:
    """Returns the C library, or None if it is not glibc or must not be changed."""
    if os.environ.get(VARIABLE) == "keep":
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only glibc has it
        library.mallopt, library.malloc_trim  # noqa: B018
    except (OSError, AttributeError):
        return None
    return library


def _set_by_user() -> bool:
    """Whether environment variables set glibc's thresholds."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in _USERS)


def anonymous_nbytes() -> int:
    """Returns about how many bytes of anonymous memory this process has; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # closed even after Ctrl-C
            fields = file.read(256).split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE


class HostHeap:
    """Returns freed ``malloc`` memory to the system.

    From then on, in the whole process, allocations from 1 MiB on are mapped separately and go
    back to the system when they are freed. For smaller ones the heap is trimmed at the beginning
    of a pass once the process has grown by 32 MiB, or by a sixteenth if that is more.
    """

    def __init__(self) -> None:
        """Sets glibc's thresholds, unless the environment sets them; see :data:`VARIABLE`."""
        self._library = _library()
        self._looks = 0
        self._before = anonymous_nbytes()
        if self._library is None:
            return
        if not _set_by_user():
            self._library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
            self._library.mallopt(_M_TRIM_THRESHOLD, _TOP)

    def trim_if_grown(self) -> None:
        """Trims the heap if the process has grown since the last time; called when a pass begins.

        Only one call in four checks, which takes some microseconds.
        """
        self._looks += 1
        if self._library is None or self._looks % _EVERY:
            return
        now = anonymous_nbytes()
        if now < self._before + max(_GROWN, self._before // _SHARE):
            self._before = min(self._before, now)
            return
        self._library.malloc_trim(0)
        self._before = anonymous_nbytes()
