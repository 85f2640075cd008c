"""Simulates, use by use, how long a loop takes that reads some blocks from a disk. Pure.

The model follows what ``runtime`` does with a plan: the host runs ahead of the device, requests
the blocks that are used next, and waits only for reads that are needed now. A few rounds are
simulated to reach the steady state; the last ones count.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROUNDS = 4
_HOST = 60e-6
"""Seconds of the host per use."""
_IDLE = 3e-3
"""Seconds by which the first read after an idle time of the disk is slower."""
_PARKED = 1 / 2
"""Share of the staging chunks for a block that is read before HBM has room for it."""
_LAST = 1 / 8
"""Part of a block read straight into HBM that is still to be copied there when the read ends."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a loop, and the room that it has.

    Attributes:
        order: Ids of blocks in order of use.
        compute: Seconds of each use.
        taken: Bytes of the reserve that each streaming block takes, by id.
        copies: Seconds that each of these takes to be copied to HBM over the bus.
        reads: Seconds that the disk takes for each of these that is read from it.
        reserve: Bytes of HBM through which blocks stream.
        staging: Bytes of the chunks through which the disk reads straight into HBM.
        latency: Seconds between room becoming free in HBM and a copy into it.
        parks: Whether the disk begins to read the next block before HBM has room for it.
    """

    order: Sequence[int]
    compute: Sequence[float]
    taken: Mapping[int, int]
    copies: Mapping[int, float]
    reads: Mapping[int, float]
    reserve: int
    staging: int
    latency: float = 0.0
    parks: bool = False


def play(one: Round) -> tuple[float, float]:
    """Returns the seconds of a round in the steady state, and those in which the disk reads."""
    player = _Player(one)
    if not player.uses.blocks:
        return math.fsum(one.compute), 0.0
    marks = []
    for number in range(_ROUNDS):
        marks.append((player.compute, player.read))
        player.round(number)
    rounds = _ROUNDS - 1
    return (player.compute - marks[1][0]) / rounds, (player.read - marks[1][1]) / rounds


@dataclass(slots=True)
class _Here:
    """A block in HBM: its next use, when it is there, and until when the host waits for it."""

    next: int
    came: float
    known: float


class _Uses:
    """The uses of a round whose blocks stream.

    The uses of resident blocks in between are summed up.

    Attributes:
        blocks: Ids of the blocks, in order of use.
        seconds: The compute of each use.
        before: Seconds and number of the uses of resident blocks before each of them.
        after: The same after the last one.
        gaps: How many of these uses later each block is used again.
        from_disk: Positions of the uses whose block is read from a disk.
    """

    def __init__(self, one: Round) -> None:
        self.blocks: list[int] = []
        self.seconds: list[float] = []
        self.before: list[tuple[float, int]] = []
        passed, count = 0.0, 0
        for block, seconds in zip(one.order, one.compute, strict=True):
            if block in one.taken:
                self.blocks.append(block)
                self.seconds.append(seconds)
                self.before.append((passed, count))
                passed, count = 0.0, 0
            else:
                passed, count = passed + seconds, count + 1
        self.after = (passed, count)
        self.gaps = _gaps(self.blocks)
        self.from_disk = [at for at, block in enumerate(self.blocks) if block in one.reads]


class _Player:
    """The simulated clock of the host, and the work submitted so far to device, bus and disk.

    Attributes:
        uses: The uses that are simulated.
        compute: When all compute submitted so far ends.
        read: Seconds in which the disk read so far.
    """

    def __init__(self, one: Round) -> None:
        self._one = one
        self.uses = _Uses(one)
        largest = max(one.taken.values(), default=0)
        self._ahead = max(1, one.reserve - 2 * largest + 1)
        self._here: dict[int, _Here] = {}
        self._used = 0
        self._host = self._bus = self._disk = 0.0
        self._chunks: tuple[float, int] = (0.0, 0)
        self._parked: tuple[int, float] = (-1, 0.0)
        self.compute = self.read = 0.0

    def round(self, number: int) -> None:
        """Simulates a round."""
        here, uses = self._here, self.uses
        length = len(uses.blocks)
        for at, block in enumerate(uses.blocks):
            now = number * length + at
            self._pass(*uses.before[at])
            self._host += _HOST
            if block not in here:
                self._fetch(block, now, None)
            self._look_ahead(now, block)
            self._park(at)
            entry = here[block]
            entry.next = now + uses.gaps[at]
            self._host = max(self._host, entry.known)
            self.compute = max(self.compute, entry.came) + uses.seconds[at]
        self._pass(*uses.after)

    def _pass(self, seconds: float, uses: int) -> None:
        """Simulates uses of blocks that stay."""
        self.compute += seconds
        self._host += _HOST * uses

    def _look_ahead(self, now: int, block: int) -> None:
        """Begins the fetches of the blocks after a use, as far as there is room."""
        one, uses = self._one, self.uses.blocks
        length = len(uses)
        ahead = 0
        for later in range(now + 1, now + length):
            if ahead >= self._ahead:
                break
            other = uses[later % length]
            if other not in self._here and not self._fetch(other, later, block):
                break
            ahead += one.taken[other]

    def _park(self, at: int) -> None:
        """Starts the disk's next read straight into HBM, before the block has room there."""
        if not self._one.parks:
            return
        from_disk = self.uses.from_disk
        first = bisect_right(from_disk, at)
        for position in from_disk[first:] + from_disk[:first]:
            block = self.uses.blocks[position]
            if block not in self._here:
                if block != self._parked[0]:
                    begin = self._begin()
                    self._parked = block, begin
                    self._disk = begin + self._without_room(block) * self._one.reads[block]
                return

    def _without_room(self, block: int) -> float:
        """Returns how much of a block is read before it has room in HBM."""
        return min(1.0, _PARKED * self._one.staging / self._one.taken[block])

    def _fetch(self, block: int, position: int, using: int | None) -> bool:
        """Fetches a block for the use at ``position``, the present one or a later one.

        Args:
            block: Its id.
            position: Position of the use.
            using: For a later use, the block that is in use now, which has to stay; None for the
                present use.
        """
        one = self._one
        size = one.taken[block]
        while self._used + size > one.reserve and self._here:
            # prefetched blocks take less than the room beside the block in use, so there is
            # always a block whose use is later
            others = (other for other in self._here if other != using)
            leaves = max(others, key=lambda other: self._here[other].next, default=None)
            if leaves is None:
                return False
            del self._here[leaves]
            self._used -= one.taken[leaves]
        self._used += size
        if block in one.reads:
            known, came = self._straight(block, size)
        else:
            # the copy waits for all compute submitted so far, which used the evicted blocks
            behind = self.compute + one.latency
            came = self._bus = max(self._bus, self._host, behind) + one.copies[block]
            known = self._host
        self._here[block] = _Here(position, came, known)
        return True

    def _straight(self, block: int, size: int) -> tuple[float, float]:
        """Reads into HBM through staging chunks; returns when the read ends and when the copy does.

        The chunks that the previous block has filled are free when it is in HBM.
        """
        one, seconds = self._one, self._one.reads[block]
        before, nbytes = self._chunks
        if block == self._parked[0]:
            begin, share = self._parked[1], self._without_room(block)
            self._parked = (-1, 0.0)
            if self._host <= begin + share * seconds:
                end = begin + seconds
            else:
                end = self._begin() + (1 - share) * seconds if share < 1 else self._host
        else:
            end = self._begin() + seconds
        if nbytes + size > one.staging:
            end = max(end, before + seconds * min(1.0, (nbytes + size - one.staging) / size))
        self._disk = end
        self.read += seconds
        came = max(end, self.compute + one.latency, self._bus) + _LAST * one.copies[block]
        self._chunks = came, size
        return end, came

    def _begin(self) -> float:
        """Returns when the disk begins a read that is submitted now."""
        return self._disk if self._disk >= self._host else self._host + _IDLE


def _gaps(uses: Sequence[int]) -> list[int]:
    """Returns for each use how many uses later the same block is used again, cyclically."""
    length = len(uses)
    gaps = [0] * length
    later: dict[int, int] = {}
    for at in range(2 * length - 1, -1, -1):
        block = uses[at % length]
        if at < length:
            gaps[at] = later[block] - at
        later[block] = at
    return gaps
