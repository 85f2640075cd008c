"""What a test leaves behind in its process, and children that it forks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager


def open_files() -> set[tuple[str, str]]:
    """Returns number and target of every descriptor of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:  # the one that lists them
            continue
    return found


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fails if a descriptor or thread is there after what runs inside that was not before.

    What earlier tests dropped, in cycles or in threads about to end, may go at any time and
    does not count: it is kept from the collector meanwhile, and only what is new is asked for.
    """
    gc.freeze()
    files, threads = open_files(), set(threading.enumerate())
    try:
        yield
        gc.collect()
        assert not open_files() - files
        assert not set(threading.enumerate()) - threads
    finally:
        gc.unfreeze()


def child(inside: Callable[[], object]) -> int:
    """Forks a child that runs ``inside``; returns its exit status, 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 1
        try:
            inside()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def beside_each_other(lines: Iterable[Sequence[str]]) -> int:
    """Runs scripts of Python, each with its arguments; returns 1 where any failed or died."""
    running = [subprocess.Popen([sys.executable, *line]) for line in lines]
    return int(max(process.wait() != 0 for process in running))  # all are waited for
