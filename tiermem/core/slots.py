"""Lanes: blocks of each size stream through slots of their own. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence


def lane_of(slots: Sequence[int], size: int) -> int:
    """Returns the bytes of the slots that a block of a size streams through; 0 for none.

    Args:
        slots: Bytes of each slot, the largest first.
        size: Of the block.
    """
    return next((slot for slot in reversed(slots) if slot >= size), 0)


def slots_in(base: int, border: int, slot: int) -> list[tuple[int, int]]:
    """Returns first byte and end of slots that are alike, side by side, the last with the rest.

    Args:
        base: First byte that they may have.
        border: First byte behind them that they may not have.
        slot: Bytes of each; 0 for none.

    Returns:
        Bounds; none where there is no room for one.
    """
    if slot == 0 or border - base < slot:
        return []
    begins = range(base, border - slot + 1, slot)
    return [*((begin, begin + slot) for begin in begins[:-1]), (begins[-1], border)]


def lane_parts(slots: Sequence[int], base: int, border: int) -> dict[int, list[tuple[int, int]]]:
    """Returns first byte and end of the slots of each lane, side by side.

    Args:
        slots: Bytes of each slot, the largest first.
        base: First byte that they may have.
        border: First byte behind them that they may not have.

    Returns:
        Bounds by bytes of a slot; none where the slots do not all fit.
    """
    parts: dict[int, list[tuple[int, int]]] = {}
    for size in slots:
        parts.setdefault(size, []).append((base, base + size))
        base += size
    return parts if base <= border else {}


def all_fit(sizes: Iterable[int], runs: Iterable[int]) -> bool:
    """Whether blocks fit into runs of bytes, the largest first, each where the least is left.

    Args:
        sizes: Of the blocks.
        runs: Bytes of each run.
    """
    left = list(runs)
    for size in sorted(sizes, reverse=True):
        fitting = [run for run in left if run >= size]
        if not fitting:
            return False
        left.remove(min(fitting))
        left.append(min(fitting) - size)
    return True


class Lanes:
    """The uses of each lane in one pass, and after it the first block of the next one.

    The rest of the next pass is left to its begin. Before the host has come to its layers nothing
    is used and no slot comes free: had all been fetched before, the link would stand still.

    Attributes:
        order: Ids of blocks in order of use.
        slots: How many slots each lane has.
        positions: Of the uses that need its slots, by lane, ascending; one of them is in the next
            pass.
        last: Position of the last use of this pass that needs any.
    """

    def __init__(
        self,
        order: Sequence[int],
        slots: Sequence[int],
        moving: Mapping[int, int],
    ) -> None:
        """Looks at a pass.

        Args:
            order: Ids of blocks in order of use.
            slots: Bytes of each slot, the largest first.
            moving: Bytes of the blocks that stream, by id.
        """
        found: dict[int, list[int]] = {size: [] for size in slots}
        for position, block in enumerate(order):
            lane = lane_of(slots, moving[block]) if block in moving else 0
            if lane:
                found[lane].append(position)
        count = Counter(slots)
        self.order = order
        self.slots = [count[size] for size in found]
        self.positions = list(found.values())
        self.last = max((lane[-1] for lane in self.positions if lane), default=-1)
        if self.last >= 0:
            opening = min((lane for lane in self.positions if lane), key=lambda lane: lane[0])
            opening.append(len(order) + opening[0])


class LaneWalk:
    """How far the fetches of each lane have got in a pass."""

    def __init__(self, lanes: Lanes) -> None:
        """Begins at the begin of a pass, where every slot is free."""
        self.lanes = lanes
        self._held: list[deque[int]] = [deque() for _ in lanes.slots]
        self._next = [0] * len(lanes.slots)

    def restart(self, cursor: int) -> None:
        """Looks at everything again from a cursor on, the use just before which goes on."""
        for lane, positions in enumerate(self.lanes.positions):
            self._held[lane].clear()
            self._next[lane] = bisect_left(positions, cursor - 1)

    def move_on(self, cursor: int) -> None:
        """Sets the next use; the one before it goes on, and those before that are over."""
        for lane, held in enumerate(self._held):
            while held and held[0] < cursor - 1:
                held.popleft()
            positions, at = self.lanes.positions[lane], self._next[lane]
            while at < len(positions) and positions[at] < cursor - 1:
                at += 1  # it was passed over
            self._next[lane] = at

    def soonest(self) -> tuple[int, int] | None:
        """Returns the lane and the position of the next use that a lane has a slot for.

        A lane may be ahead of another whose slots are all taken. But what the pass ends with
        comes last: once everything is there, the link has little to do while the rest computes.
        """
        lanes = self.lanes
        best: tuple[int, int] | None = None
        first = 2 * len(lanes.order)
        for lane, positions in enumerate(lanes.positions):
            at = self._next[lane]
            if at == len(positions):
                continue
            position = positions[at]
            first = min(first, position)
            free = len(self._held[lane]) < lanes.slots[lane]
            if free and (best is None or position < best[1]):
                best = (lane, position)
        if best is not None and best[1] >= lanes.last and best[1] > first:
            return None
        return best

    def take(self, lane: int, position: int) -> None:
        """Notes that the block of that use is in a slot, or on its way there."""
        self._held[lane].append(position)
        self._next[lane] += 1


def laned_time(
    lanes: Lanes, compute: Sequence[float], transfer: Sequence[float], latency: float = 0.0
) -> float:
    """Returns the seconds one pass takes, to the end of the fetch for the next one.

    A fetch is asked for at a use, and begins when the compute before that use is over.

    Args:
        lanes: What goes by which lane.
        compute: Seconds of each use.
        transfer: Seconds of the fetch each use needs, if it is by a lane.
        latency: Seconds between the end of that compute and the copy.
    """
    walk = LaneWalk(lanes)
    there = [0.0] * (2 * len(compute))
    now = link = 0.0
    opening = min((lane[0] for lane in lanes.positions if lane), default=-1)
    for position, seconds in enumerate(compute):
        walk.move_on(position + 1)
        while (found := walk.soonest()) is not None:
            if found[1] != opening:  # that came before
                link = max(link, now + latency if now else 0.0)
                link += transfer[found[1] % len(compute)]
                there[found[1]] = link
            walk.take(*found)
        now = max(now, there[position]) + seconds
    return max(now, link)


def one_ahead_time(
    moving: Sequence[bool], compute: Sequence[float], transfer: Sequence[float], latency: float
) -> float:
    """Returns the seconds one pass takes with two slots: one block in use, one fetched ahead.

    Args:
        moving: Which uses need a fetch.
        compute: Seconds of each use.
        transfer: Seconds of the fetch each use needs, if any.
        latency: Seconds between the end of the compute before a use and the copy asked for at it.
    """
    positions = [position for position, moves in enumerate(moving) if moves]
    now = link = there = 0.0  # the first one came before
    used = 0
    for position, seconds in enumerate(compute):
        if used < len(positions) and positions[used] == position:
            used += 1
            arrived, asked_at = there, now
            following = positions[used % len(positions)]
            link = there = max(link, asked_at + latency) + transfer[following]
            now = max(now, arrived)
        now += seconds
    return max(now, link)
