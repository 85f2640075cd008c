"""What is known of a loop: the times of its uses and fetches, and its possible layouts."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.core.block import Tier
from tiermem.core.forecast import Forecast
from tiermem.core.laps import Ways
from tiermem.core.loops import Files, Loop
from tiermem.core.residency import Record
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.lates import Late, Lates
from tiermem.runtime.metrics.pass_timer import LINK_UP
from tiermem.runtime.parts import Parts

SLOT_LATENCY = 50e-6
_ROUNDS = 3
_MOST_KNOWN = 4
"""How many loops have their possible layouts kept, and how many of these."""
_MOST_WAYS = 3


class LoopTimes:
    """Combines measurements and forecasts for plans."""

    def __init__(self, parts: Parts, lates: Lates) -> None:
        """Works on ``parts``; ``lates`` says when passes release blocks."""
        self._parts = parts
        self._lates = lates
        self._ways: dict[tuple[object, ...], dict[frozenset[int], Ways]] = {}

    def rate_up(self) -> float:
        """Returns the bytes per second from DRAM to HBM, the best that were measured."""
        return self._parts.pass_timer.estimates.fastest(LINK_UP[Tier.DRAM])

    def loop(
        self,
        schedule: Schedule,
        spans: Sequence[tuple[int, int, object]],
        sizes: dict[int, int],
        room: int,
        compute: Sequence[float],
        fetch: dict[int, tuple[str, float] | None],
        spare: int,
    ) -> Loop:
        """Returns the :class:`Loop` for which to plan; all its times are known.

        Args:
            schedule: The schedule.
            spans: Begin, end and name of the passes of a round; empty if it does not repeat.
            sizes: Bytes of its blocks, by id.
            room: Bytes of HBM for them.
            compute: Seconds of each use of the schedule.
            fetch: Link and seconds of the fetch of each block, by id.
            spare: Bytes of spare DRAM.
        """
        whole = [(0, len(compute), None)]  # a few rounds tell as much as all that are foreseen
        blocks, seconds = list[int](), list[float]()
        begins = list[int]()
        for begin, end, _ in [*spans] * _ROUNDS or whole:
            begins.append(len(blocks))
            used = [(schedule.order[p], compute[p]) for p in range(begin, end)]
            blocks += [b for b, _ in used if b in sizes]
            seconds += [s for b, s in used if b in sizes]
        begins = begins[: max(1, len(spans))]
        transfer = {block: seconds[1] for block, seconds in fetch.items() if seconds}
        link = LINK_UP[Tier.NVME]
        on_disk = [b for b, found in fetch.items() if found and found[0] == link and b in sizes]
        files = None
        if on_disk:
            # a disk that had to wait is not slower
            rate = self._parts.pass_timer.estimates.fastest(link)
            disk = {block: sizes[block] / rate for block in on_disk}
            staging = self._parts.homes.staging
            files = Files(disk, spare, 0 if staging is None else staging.numel())
        lates = [self._lates.of(key) for _, _, key in spans] or [Late(0)]
        lags = [late.lag for late in lates]
        further = [{b: n for b, n in late.further.items() if n and b in sizes} for late in lates]
        later = (frozenset(known.items()) for known in further)
        for block in on_disk:
            transfer[block] = seconds_from_dram(self._parts, self._parts.table[block])
        return Loop(
            blocks,
            sizes,
            room,
            seconds,
            transfer,
            SLOT_LATENCY,
            files,
            laid_out=bool(spans),
            begins=begins,
            lags=lags,
            further=further,
            ways=self._ways_of((tuple(blocks), *begins, room, frozenset(sizes), *lags, *later)),
        )

    def _ways_of(self, name: tuple[object, ...]) -> dict[frozenset[int], Ways]:
        """Returns the known layouts of a loop, for which only times may have changed.

        Args:
            name: Everything on which they depend, except the residents.
        """
        ways = self._ways.pop(name, {})
        while len(ways) > _MOST_WAYS:  # those used last are kept
            del ways[next(iter(ways))]
        self._ways[name] = ways
        if len(self._ways) > _MOST_KNOWN:
            del self._ways[next(iter(self._ways))]
        return ways

    def spare(self) -> int:
        """Returns the bytes of DRAM that nothing else needs."""
        dram = self._parts.homes.dram
        return dram.capacity - dram.used + self._parts.transfers.ahead.nbytes

    def compute(self, schedule: Schedule, order: Sequence[int], load: int) -> list[float | None]:
        """Returns the seconds of each use; None if the pass is not known."""
        get, found = self._parts.table.get, list[float | None]()
        bounds = [begin for begin, _ in schedule.passes[1:]] + [len(order)]
        known: dict[object, list[float | None]] = {}
        forecast = Forecast(self._parts.pass_timer.estimates)
        for (begin, key), end in zip(schedule.passes, bounds, strict=False):
            if begin >= len(order):
                break
            seconds = known.get(key)
            if seconds is None or len(seconds) != end - begin:
                records = ((block, get(block)) for block in order[begin:end])
                uses = [(b, None if record is None else record.block) for b, record in records]
                seconds = known[key] = forecast.seconds(key, load, uses)
            found += seconds
        return found[: len(order)]

    def fetch(self, record: Record, beside: bool) -> tuple[str, float] | None:
        """Returns the link over which a block is prefetched, and the seconds."""
        link = LINK_UP.get(record.home)
        if link is None or not (beside or record.home is not Tier.DRAM):
            return None
        block = record.block
        return link, self._parts.pass_timer.estimates.transfer(link, block.id, block.nbytes)

    def from_dram(self, record: Record) -> tuple[str, float]:
        """Returns link and seconds of the fetch of a block that has a copy in DRAM by then."""
        return LINK_UP[Tier.DRAM], seconds_from_dram(self._parts, record)


def seconds_from_dram(parts: Parts, record: Record) -> float:
    """Returns the seconds of the copy of a block from DRAM to HBM."""
    block = record.block
    return parts.pass_timer.estimates.transfer(LINK_UP[Tier.DRAM], block.id, block.nbytes)
