"""How many threads a step on the host is spread over."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from tiermem.errors import CapacityError

_SPARE = 4  # of so many cores one is left to others


def team_size(threads: int) -> int:
    """Returns how many threads a step takes, of those that torch would use.

    The others are for the threads that launch kernels and copies meanwhile. torch's kernels wait
    for the last of their threads: with one on every core they waited for the one whose core had
    something else to do. On 16 cores 16 threads made 1.1 G steps of AdamW a second, 12 made 2.0,
    and the Python beside them took 1.3 times as long with 16.

    Args:
        threads: What ``torch.get_num_threads()`` says.
    """
    return max(1, threads - max(1, threads // _SPARE))


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
