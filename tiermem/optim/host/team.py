"""The threads that steps on the host are spread over, and the order in which those are made."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from tiermem.errors import CapacityError

_SPARE = 2  # of so many cores one is left to others

T = TypeVar("T")


def team_size(threads: int) -> int:
    """Returns how many threads a step takes, of those that torch would use.

    The others are for the threads that launch kernels and copies meanwhile: cores of a virtual
    machine are often halves of one, and beside copies memory limits a step sooner than they do
    (ADR 13 has the figures).

    Args:
        threads: What ``torch.get_num_threads()`` says.
    """
    return max(1, threads - threads // _SPARE)


@contextmanager
def as_team() -> Iterator[None]:
    """Sets the calling thread's kernel threads to those of a host step, inside ``with``."""
    before = torch.get_num_threads()
    torch.set_num_threads(team_size(before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Team:
    """A thread that does one piece of work after another, whose kernels are spread over a team.

    Of what waits it takes what is needed first. Backward hands steps out in the reverse of the
    order in which the next forward needs them: in the order of arrival, that would wait at its
    begin for all that the thread is behind.
    """

    def __init__(self, name: str) -> None:
        """Starts the thread.

        Args:
            name: The thread's.

        Raises:
            CapacityError: If the system starts no thread.
        """
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[tuple[int, int], Callable[[], None]] = {}
        before = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, name)
        try:
            begun = self._thread.submit(_set_own, team_size(before))
        except RuntimeError as error:
            raise CapacityError(
                f"the system starts no thread for steps on the host ({error}); raise the limit of "
                "processes (ulimit -u) or of address space (ulimit -v), or use where='device'"
            ) from error
        begun.result()
        torch.set_num_threads(before)  # threads begun later have the last that was set anywhere

    def submit(self, place: int, work: Callable[[], T]) -> Future[T]:
        """Hands work to the thread.

        Args:
            place: In the order in which results are needed, the lowest first; what has the same
                place is done in the order in which it was handed over.
            work: What to do.

        Returns:
            Its end; it can be cancelled until it begins.

        Raises:
            RuntimeError: If the thread was shut down.
        """
        end: Future[T] = Future()
        key = place, next(self._numbers)
        with self._lock:
            self._thread.submit(self._next)  # as many of these as there is work
            self._waiting[key] = partial(_do, end, work)
        return end

    def shutdown(self) -> None:
        """Ends the thread, once all that was handed over is done."""
        self._thread.shutdown()

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # Ctrl-C came before there was work
            work = self._waiting.pop(min(self._waiting))
        work()


def _do(end: Future[T], work: Callable[[], T]) -> None:
    """Does what an executor does with work of its own."""
    if not end.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        end.set_exception(error)
    else:
        end.set_result(result)


def _set_own(threads: int) -> None:
    torch.get_num_threads()  # what a thread is the first to ask for takes the common number
    torch.set_num_threads(threads)
