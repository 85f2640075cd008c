"""Two files that belong together, written so that no reader takes one of each.

A name can be replaced at once, two names cannot. So the file that readers begin with is away while
the other one is replaced: what a crash leaves is the former pair, the new one, or one that readers
refuse because it lacks a file. The former files lie beside it then, as ``.NAME.*.old``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

Write = Callable[[str], object]


def replace_pair(first: Path, write_first: Write, second: Path, write_second: Write) -> None:
    """Writes two files beside the former ones, and puts them in their places when both are whole.

    Args:
        first: Where readers begin; it is left as it is where nothing changes in it.
        write_first: Writes it to a path.
        second: The other one, in the same folder.
        write_second: Likewise.

    Raises:
        OSError: If the file system fails; the former files are there, and nothing of the new ones.
    """
    fresh = [_beside(path, "new") for path in (first, second)]
    try:
        for path, write in zip(fresh[::-1], (write_second, write_first), strict=True):
            write(str(path))
            _sync(path)
        if _alike(first, fresh[0]):  # one name is left to replace, and that is done at once
            os.replace(fresh[1], second)
            _sync(first.parent)
        else:
            _exchange(first, second)
        with suppress(OSError):  # the new ones are there
            for name in left_beside(first, second):  # by saves that were killed, too
                first.with_name(name).unlink(missing_ok=True)
    finally:
        for path in fresh:
            path.unlink(missing_ok=True)


def left_beside(*paths: Path) -> list[str]:
    """Returns the names that former files have where a crash has cut their replacement short."""
    return [old.name for path in paths for old in path.parent.glob(f".{path.name}.*.old")]


def _exchange(first: Path, second: Path) -> None:
    """Puts both new files in their places; the first one is there last."""
    former = [_beside(path, "old") for path in (first, second)]
    with ExitStack() as undo:  # from its end: the first one comes back when the second has
        for path, old in zip((first, second), former, strict=True):
            undo.callback(_give_back, old, path)
            with suppress(FileNotFoundError):
                os.rename(path, old)
            _sync(path.parent)  # in this order on the disk as well, should the power fail
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
    """Whether a file is there already with the bytes that it is to have."""
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
