"""How many threads torch's CPU kernels take: as many as help on this machine, now.

A team of threads waits for its slowest member at the end of each kernel. Where a core has something
else to do as well (or a container may use less than it sees), that wait is a time slice of the
system's, milliseconds after kernels of microseconds. Settings that change how threads wait
(``OMP_WAIT_POLICY``) are read when torch is imported; the number of threads can be set later.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_ROUNDS = 5
_SECONDS = 2.0  # after which no further round begins
_WORTH = 0.9  # more threads must need less than this share of the time
_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def allowed(most: int, quota: Path = _QUOTA) -> int:
    """Returns how many threads can run at once.

    Args:
        most: What torch would take.
        quota: Where the control group's share is told, as ``"200000 100000"`` or ``"max ..."``.
    """
    try:
        share, period = quota.read_text(encoding="ascii").split()[:2]
        most = min(most, math.ceil(int(share) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, min(most, len(os.sched_getaffinity(0))))


def best(most: int, timed: Callable[[int], float], limit: float = _SECONDS) -> int:
    """Returns how many threads to take: the fewest that nothing is much faster than.

    Args:
        most: At most so many.
        timed: Returns the seconds that a piece of the work takes with so many threads.
        limit: Seconds of work after which no further round begins.
    """
    numbers = [most]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    found: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(_ROUNDS):  # in turn, so that what else goes on meets them all alike
        for number, seconds in found.items():
            seconds.append(timed(number))
        if sum(map(sum, found.values())) > limit:
            break
    medians = {number: statistics.median(seconds) for number, seconds in found.items()}
    chosen = 1
    for number in reversed(numbers):
        if medians[number] < _WORTH * medians[chosen]:
            chosen = number
    return chosen


@contextmanager
def threads(asked: int | None, device: str, work: Callable[[], object]) -> Iterator[int]:
    """Sets torch's number of kernel threads to a fast one, inside ``with``.

    Args:
        asked: The number; None for what a short trial finds best. The trial is left out where the
            environment says a number, and on a GPU.
        device: Where the work is done.
        work: A piece of it, some milliseconds long.

    Yields:
        The number.
    """
    before = torch.get_num_threads()

    def timed(number: int) -> float:
        torch.set_num_threads(number)
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    try:
        number = asked or before
        if asked is None and device == "cpu" and not any(os.environ.get(name) for name in _SET):
            most = allowed(before)
            if most > 1:
                work()  # what only the first call does
                number = best(most, timed)
        torch.set_num_threads(number)
        yield number
    finally:
        torch.set_num_threads(before)
