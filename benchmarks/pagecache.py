"""The kernel's page cache, emptied of files, so that the next read of them is the disk's."""

from __future__ import annotations

import os
from pathlib import Path


def evict(folder: str | os.PathLike[str]) -> None:
    """Drops every file below a folder from the page cache.

    Pages that are still to be written are written first: the kernel keeps those, and those
    that are mapped by somebody.

    Args:
        folder: Where to look, with all that is below it.
    """
    for path in Path(folder).rglob("*"):
        if not path.is_file():
            continue
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def is_cached(path: str | os.PathLike[str]) -> bool:
    """Whether the beginning of a file would be read without the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(file)
