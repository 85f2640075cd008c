"""Finds the block in HBM whose next use is furthest away, without testing all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from tiermem.core.schedule import NEVER, Schedule

_MOST_REFUSED = 64


class NextUseQueue:
    """Blocks by position of next use, the furthest first.

    Entries are updated lazily: an outdated one is dropped when it is found. A block whose foreseen
    use did not happen is entered again by the next :meth:`rebuild`.
    """

    def __init__(self) -> None:
        """Starts empty, for an empty schedule."""
        self._heap: list[tuple[int, int]] = []
        self._use: dict[int, int] = {}
        self.schedule: Schedule | None = None

    def __len__(self) -> int:
        return len(self._use)

    def rebuild(self, schedule: Schedule, cursor: int, blocks: Iterable[int]) -> None:
        """Starts anew for another schedule.

        Args:
            schedule: Where next uses are looked up from now on.
            cursor: Position in it.
            blocks: The blocks that are in HBM and may leave.
        """
        self.schedule = schedule
        self._use = {block: schedule.next_use(block, cursor) for block in blocks}
        self._heap = [(-use, block) for block, use in self._use.items()]
        heapify(self._heap)

    def put(self, block: int, cursor: int) -> None:
        """Adds a block, or its new next use after it was used."""
        use = NEVER if self.schedule is None else self.schedule.next_use(block, cursor)
        if self._use.get(block) != use:
            self._use[block] = use
            heappush(self._heap, (-use, block))

    def remove(self, block: int) -> None:
        """Removes a block."""
        self._use.pop(block, None)

    def last(self, most: int, beyond: int, accept: Callable[[int], bool]) -> list[int]:
        """Returns up to ``most`` acceptable blocks, the one with the furthest next use first.

        Args:
            most: How many to look for.
            beyond: Only blocks used after this position count.
            accept: Returns whether a block may be evicted now.
        """
        found: list[int] = []
        again: list[tuple[int, int]] = []
        heap, uses = self._heap, self._use
        while heap and len(again) - len(found) < _MOST_REFUSED:
            entry = heap[0]
            use, block = entry
            if -use <= beyond:
                break
            if uses.get(block) != -use or entry in again:
                heappop(heap)
                continue
            if accept(block):
                found.append(block)
                if len(found) == most:
                    break
            again.append(heappop(heap))
        for entry in again:
            heappush(heap, entry)
        return found
