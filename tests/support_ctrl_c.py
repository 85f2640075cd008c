"""Ctrl-C before any line of tiermem's code, once, wherever a call comes by it."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiermem

PACKAGE = str(Path(tiermem.__file__).parent)


class Stop(BaseException):
    """Stands for Ctrl-C."""


@functools.cache
def uncut(code: CodeType) -> frozenset[int]:
    """Returns the offsets at which a line begins and no exception can come.

    There the ordinary way out of a ``with`` begins: no signal handler and no error comes between
    the last call inside and the call of ``__exit__``, as the interpreter looks for signals after
    calls, where the context is still in force. Or a ``try:`` begins, which does nothing, and is in
    no block of the compiled code, not even in a ``with`` around it.
    """
    found = set()
    ops = [op for op in dis.get_instructions(code) if op.opname not in ("CACHE", "EXTENDED_ARG")]
    for index, op in enumerate(ops):
        names = [o.opname for o in ops[index : index + 3]]
        values = [o.argval for o in ops[index : index + 3]]
        if names == ["LOAD_CONST"] * 3 and values == [None] * 3:
            found.add(op.offset)
            if index and ops[index - 1].opname == "SWAP":  # of what is returned from inside
                found.add(ops[index - 1].offset)
        if op.opname in ("NOP", "SETUP_FINALLY"):
            found.add(op.offset)
        if op.opname == "POP_BLOCK" and [o.argval for o in ops[index + 1 : index + 2]] == [None]:
            found.add(op.offset)
    return frozenset(found)


@functools.cache
def after_calls(code: CodeType) -> frozenset[int]:
    """Returns the offsets of what follows a call, before which a signal handler may raise.

    What a call has returned is lost then: it is not yet assigned to anything.
    """
    ops = [op for op in dis.get_instructions(code) if op.opname not in ("CACHE", "EXTENDED_ARG")]
    found = {b.offset for a, b in pairwise(ops) if a.opname.startswith("CALL")}
    return frozenset(found) - uncut(code)


def first_times(call: Callable[[], Any], files: Sequence[str]) -> list[int]:
    """Runs ``call``; returns when it comes to each line for the first time.

    Lines of loops are most of what a call comes by: cut short at one out of some lines, and not at
    one out of some times, it is at more lines.

    Args:
        call: What to run.
        files: As for :func:`cut_short`.

    Returns:
        Numbers for that, in their order, and one that is beyond the end.
    """
    found: dict[tuple[str, int], int] = {}
    number = 0

    def come_by(frame: FrameType) -> None:
        nonlocal number
        number += 1
        found.setdefault((frame.f_code.co_filename, frame.f_lineno), number)

    _watched(call, files, come_by)
    return [*found.values(), 2 * number]


def cut_short(call: Callable[[], Any], number: int, files: Sequence[str]) -> str:
    """Runs ``call``, raising before its ``number``-th line in some files of the package.

    Args:
        call: What to run.
        number: Of the line, from 1 on, as lines are come by.
        files: How the paths of the files begin, below the package.

    Returns:
        Which line it was; nothing where the call ended before it, or came to no such line.
    """
    lines, where = 0, ""

    def come_by(frame: FrameType) -> None:
        nonlocal lines, where
        lines += 1
        if lines == number:
            where = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
            raise Stop

    _watched(call, files, come_by)
    return where


def _watched(
    call: Callable[[], Any], files: Sequence[str], come_by: Callable[[FrameType], None]
) -> None:
    """Runs ``call``, and ``come_by`` before its lines until that raises."""
    prefixes = tuple(f"{PACKAGE}/{name}" for name in files)
    over = False

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal over
        if event == "line" and not over and frame.f_lasti not in uncut(frame.f_code):
            try:
                come_by(frame)
            except Stop:
                over = True
                raise
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
