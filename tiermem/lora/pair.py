"""Two files that belong together, written so that no reader gets one old and one new file.

One name can be replaced atomically, two names cannot. So the file that readers open first is absent
while the other one is replaced: a crash leaves the former pair, the new one, or one that readers
refuse because a file is missing. The former files are then beside it, as ``.NAME.*.old``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

Write = Callable[[str], object]


def replace_pair(first: Path, write_first: Write, second: Path, write_second: Write) -> None:
    """Writes two files beside the former ones, and renames them when both are complete.

    Args:
        first: The file that readers open first; kept if its contents do not change.
        write_first: Writes it to a path.
        second: The other one, in the same folder.
        write_second: Likewise.

    Raises:
        OSError: If the file system fails; the former files are in place, without the new ones.
    """
    fresh = [_beside(path, "new") for path in (first, second)]
    try:
        for path, write in zip(fresh[::-1], (write_second, write_first), strict=True):
            write(str(path))
            _sync(path)
        if _alike(first, fresh[0]):  # one name is left to replace, which is atomic
            os.replace(fresh[1], second)
            _sync(first.parent)
        else:
            _exchange(first, second)
        with suppress(OSError):  # the new ones are in place
            for name in left_beside(first, second):  # also left by saves that were killed
                first.with_name(name).unlink(missing_ok=True)
    finally:
        for path in fresh:
            path.unlink(missing_ok=True)


def left_beside(*paths: Path) -> list[str]:
    """Returns the names of former files after a crash has interrupted their replacement."""
    return [old.name for path in paths for old in path.parent.glob(f".{path.name}.*.old")]


def _exchange(first: Path, second: Path) -> None:
    """Puts both new files in place, the first one last."""
    former = [_beside(path, "old") for path in (first, second)]
    with ExitStack() as undo:  # in reverse: the first one is restored after the second
        for path, old in zip((first, second), former, strict=True):
            undo.callback(_give_back, old, path)
            with suppress(FileNotFoundError):
                os.rename(path, old)
            _sync(path.parent)  # in this order on the disk as well, in case of a power failure
        for path in (second, first):
            undo.callback(path.unlink, missing_ok=True)
            os.replace(_beside(path, "new"), path)
            _sync(path.parent)
        undo.pop_all()


def _give_back(old: Path, path: Path) -> None:
    with suppress(FileNotFoundError):
        os.rename(old, path)


def _beside(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{end}")


def _alike(path: Path, fresh: Path) -> bool:
    """Whether a file exists already with the intended bytes."""
    try:
        return path.read_bytes() == fresh.read_bytes()
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
