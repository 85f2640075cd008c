"""How many threads a step on the host is spread over."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from tiermem.errors import CapacityError

_SPARE = 2  # of so many cores one is left to others


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


def team(name: str) -> ThreadPoolExecutor:
    """Returns a thread whose kernels are spread over a step's threads.

    Args:
        name: The thread's.

    Raises:
        CapacityError: If the system starts no thread.
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
    torch.set_num_threads(before)  # threads begun later have the last that was set anywhere
    return pool


def _set_own(threads: int) -> None:
    torch.get_num_threads()  # what a thread is the first to ask for takes the common number
    torch.set_num_threads(threads)
