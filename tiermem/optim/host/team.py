"""The number of threads of a step on the host."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from tiermem.errors import CapacityError

_SPARE = 2  # one of this many cores is left to others


def team_size(threads: int) -> int:
    """Returns how many threads a step takes, of those that torch would use.

    The others are for the threads that launch kernels and copies meanwhile: cores of a virtual
    machine are often hyperthreads, and during copies memory limits a step sooner than they do
    (ADR 13 has the figures).

    Args:
        threads: The result of ``torch.get_num_threads()``.
    """
    return max(1, threads - threads // _SPARE)


@contextmanager
def as_team() -> Iterator[None]:
    """Sets the kernel threads of the calling thread to those of a host step, inside ``with``."""
    before = torch.get_num_threads()
    torch.set_num_threads(team_size(before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def team(name: str) -> ThreadPoolExecutor:
    """Returns an executor of one thread whose kernels use a step's number of threads.

    Args:
        name: Name of the thread.

    Raises:
        CapacityError: If the system cannot start a thread.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, name)
    try:
        begun = pool.submit(_set_own, team_size(before))
    except RuntimeError as error:
        raise CapacityError(
            f"the system starts no thread for steps on the host ({error}); raise the limit of "
            "processes (ulimit -u) or of address space (ulimit -v), or use where='device'"
        ) from error
    begun.result()
    torch.set_num_threads(before)  # threads started later use the number that was last set anywhere
    return pool


def _set_own(threads: int) -> None:
    torch.get_num_threads()  # the first such call in a thread takes the common number
    torch.set_num_threads(threads)
