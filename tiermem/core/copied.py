"""Free bytes that, since compute last used them, only copies out of them have used."""

from __future__ import annotations

from bisect import bisect_left


class CopiedRuns:
    """Runs of free bytes whose last use was a copy out of them.

    A block that is placed there next has to wait for those copies only: the copies themselves
    have waited for all compute that used the bytes.

    Attributes:
        runs: First byte of each run and the first behind it, ascending; no two of them touch.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.runs: list[tuple[int, int]] = []
        self._taken: set[int] = set()  # offsets handed out whose bytes were all in such runs

    def add(self, start: int, end: int) -> None:
        """Adds bytes that have just become free.

        Args:
            start: The first.
            end: The first behind them.
        """
        runs = self.runs
        first = last = bisect_left(runs, (start, 0))
        if first and runs[first - 1][1] == start:
            first, start = first - 1, runs[first - 1][0]
        if last < len(runs) and runs[last][0] == end:
            last, end = last + 1, runs[last][1]
        runs[first:last] = [(start, end)]

    def take(self, start: int, end: int) -> None:
        """Removes bytes that are handed out, and remembers whether all of them were in such runs.

        Args:
            start: The first.
            end: The first behind them.
        """
        runs = self.runs
        first = bisect_left(runs, (start, 0))
        if first and runs[first - 1][1] > start:
            first -= 1
        last, rest = first, list[tuple[int, int]]()
        while last < len(runs) and runs[last][0] < end:
            low, high = runs[last]
            if low <= start and end <= high:
                self._taken.add(start)
            rest += [(low, start)] if low < start else []
            rest += [(end, high)] if high > end else []
            last += 1
        runs[first:last] = rest

    def give_back(self, start: int) -> None:
        """Forgets what :meth:`take` remembered of ``start``."""
        self._taken.discard(start)

    def was(self, start: int) -> bool:
        """Whether all bytes handed out at ``start`` were in such runs; can be asked only once."""
        if start not in self._taken:
            return False
        self._taken.remove(start)
        return True

    def clear(self) -> None:
        """Forgets everything."""
        self.runs.clear()
        self._taken.clear()
