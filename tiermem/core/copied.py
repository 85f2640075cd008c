"""Free bytes that nothing but copies out of them has used since compute did."""

from __future__ import annotations

from bisect import bisect_left


class CopiedRuns:
    """Runs of free bytes, each left by what was copied out and then used by nothing.

    Whoever comes there next waits for those copies, and for nothing else: they have waited for
    all compute that had used the bytes.

    Attributes:
        runs: First byte of each run and the first behind it, ascending; no two of them touch.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.runs: list[tuple[int, int]] = []
        self._taken: set[int] = set()  # where what was handed out begins, if all of it was such

    def add(self, start: int, end: int) -> None:
        """Enters bytes that have just become free.

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
        """Removes bytes that are handed out, and remembers whether all of them were such.

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
        """Forgets what is remembered of what was handed out at ``start``."""
        self._taken.discard(start)

    def was(self, start: int) -> bool:
        """Whether all that was handed out at ``start`` was such; asked once."""
        if start not in self._taken:
            return False
        self._taken.remove(start)
        return True

    def clear(self) -> None:
        """Forgets everything."""
        self.runs.clear()
        self._taken.clear()
