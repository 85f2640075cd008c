"""Ctrl-C before any line of tiermem's code, once, wherever a call comes by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tiermem

PACKAGE = str(Path(tiermem.__file__).parent)


class Stop(BaseException):
    """Stands for Ctrl-C."""


def cut_short(call: Callable[[], Any], number: int, files: Sequence[str]) -> str:
    """Runs ``call``, raising before its ``number``-th line in some files of the package.

    Args:
        call: What to run.
        number: Of the line, from 1 on, as lines are come by.
        files: How the paths of the files begin, below the package.

    Returns:
        Which line it was; nothing where the call ended before it, or came to no such line.
    """
    prefixes = tuple(f"{PACKAGE}/{name}" for name in files)
    lines, where = 0, ""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines, where
        if event == "line" and not where:
            lines += 1
            if lines == number:
                where = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
                raise Stop
        return local

    def trace(frame: FrameType, _event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(prefixes) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Stop:
        pass
    finally:
        sys.settrace(before)
    return where
