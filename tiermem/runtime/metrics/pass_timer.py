"""Measures passes as they run: stamps around uses and copies, read without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.pace import Estimates
from tiermem.core.residency import Record
from tiermem.runtime.metrics.counters import Counters, Efficiency, PaceRow
from tiermem.runtime.metrics.device_speed import flops_of
from tiermem.runtime.metrics.machine_profile import MachineProfile, device_name, load
from tiermem.transfer.copy import CopyEngine, Event
from tiermem.transfer.stamps import Clock, CudaClock, HostClock, Stamp
from tiermem.transfer.streams import CudaCopyEngine

LINK_UP = {Tier.DRAM: "dram->hbm", Tier.NVME: "nvme->hbm"}
"""Link over which blocks are fetched, by home tier."""

_SAME_DISK = {"nvme->dram": "nvme->hbm"}
_MOST_USES = 3000
_MOST_WAITING = 4
_HOST, _HOST_WAIT = "host", "host wait"


@dataclass(slots=True, eq=False)
class _Fill:
    """A copy to HBM between two stamps; its holders are its pass and the use it is for."""

    block: Block
    nbytes: int
    begin: Stamp
    end: Stamp
    holders: int = 2


@dataclass(slots=True, eq=False)
class _Use:
    """A use: the stamps at which the compute before it ended, and its own began."""

    block: int
    link: str | None
    before: Stamp
    after: Stamp
    fill: _Fill | None
    expected: bool
    host_ns: int


@dataclass(slots=True, eq=False)
class _Sample:
    """A measured pass."""

    key: Hashable
    moved: dict[str, int]
    uses: list[_Use] = field(default_factory=list)
    fills: list[_Fill] = field(default_factory=list)
    flows: dict[str, tuple[int, float]] = field(default_factory=dict)
    end: Stamp | None = None
    at: int = 0
    measured: float = 0.0
    compute: dict[int, tuple[float, int]] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Totals:
    """Sums over the measured passes, except the first of each name.

    Attributes:
        seconds: From begin to end.
        compute: Seconds of compute, at its usual length.
        waits: Seconds of waiting, by what was waited for.
        moved: Bytes, by link.
    """

    seconds: float = 0.0
    compute: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Length:
    """The duration of the current pass.

    Attributes:
        key: Its name; None before the first.
        began: Seconds on the host's clock.
        slowed: Whether measuring takes some of that time.
        first: Stamp of the compute stream when it began; None if unknown.
        last: The same when it ended, after its last work was submitted.
    """

    key: Hashable = None
    began: float = 0.0
    slowed: bool = False
    first: Stamp | None = None
    last: Stamp | None = None


_NOT_ARRIVED: tuple[Stamp | None, int] = (None, 0)
"""At a use: the stamp before it waits, and the nanoseconds that the host had waited until then."""


class PassTimer:
    """Stamps the passes that are measured, and passes the times to the estimates.

    Every use has two stamps on the compute stream: one when the compute before it ends, one
    when it may begin itself, as its block is there. So the time between two uses is divided into
    the wait for a block and the compute with it, without the host waiting for either.

    Attributes:
        sampling: Whether the current pass is measured; otherwise nothing here may be called for its
            uses.
        pending: Whether measured passes are still to be read.
        estimates: What was learned.
    """

    def __init__(self, clock: Clock, counters: Counters, estimates: Estimates) -> None:
        """Starts with nothing measured."""
        self.sampling = False
        self.pending = False
        self.estimates = estimates
        self._clock = clock
        self._counters = counters
        self._open: _Sample | None = None
        self._length = _Length()
        self._waiting: deque[_Sample] = deque()
        self._before = _NOT_ARRIVED
        self._begin: Stamp | None = None
        self._fills: dict[int, _Fill] = {}
        self._older: dict[int, _Fill] = {}
        self._last: dict[str, int] = {}
        self._totals = _Totals()
        self._reads_at_ends = False

    @property
    def clock(self) -> Clock:
        """The clock that records stamps."""
        return self._clock

    # -- stamping --------------------------------------------------------

    def begin(self, key: Hashable) -> None:
        """Begins a pass, which ends the one before."""
        self._close()
        now = self._clock.host()
        # measuring takes host time: if the host is the limit, such a pass would look like a
        # change, be measured again because of that, and so on
        length = self._length
        if length.key is not None and not length.slowed:
            self.estimates.took(length.key, self._took(now))
        self._free(length.first, length.last)
        length.first = length.last = None
        length.key, length.began = key, now
        if self._older or self._fills:
            for fill in self._older.values():
                self._let_go(fill)
            self._older, self._fills = self._fills, {}
        # the plan for this pass is made with what was measured; once a plan can be made without it,
        # it is read at the end of a pass instead, where the host usually only has to wait
        if self.pending and not (self._reads_at_ends and self.estimates.can_foresee(key)):
            self.harvest()
        self._reads_at_ends = False
        if self.estimates.wants(key) and len(self._waiting) < _MOST_WAITING:
            self.sampling = self._clock.usable()
            if self.sampling:
                self._open = _Sample(key, self._counters.bytes_by_link())
        length.slowed = self.sampling or self.pending
        if now and not length.slowed and self._clock.usable():
            length.first = self._clock.stamp()

    def left(self) -> None:
        """Notes that the current pass has submitted its last work.

        What a program does between this and the next pass does not belong to it.
        """
        length = self._length
        if length.first is not None and length.last is None and self._clock.usable():
            length.last = self._clock.stamp()

    def leave_first_out(self) -> None:
        """Does not measure the current pass if it is the first of its name.

        See :meth:`Estimates.leave_out`.
        """
        sample = self._open
        if sample is not None and self.estimates.leave_out(sample.key):
            self._open, self.sampling = None, False  # its length is atypical, too
            self._discard(sample)

    def cut_short(self) -> None:
        """Drops what is being measured, after an exception anywhere."""
        self._free(*self._stamps())
        self._open = self._begin = None
        self._before = _NOT_ARRIVED
        self._length.first = self._length.last = None
        self._waiting.clear()
        self._fills, self._older = {}, {}
        self.sampling = self.pending = False
        self.estimates.ask_again()

    def arrived(self) -> None:
        """Stamps the compute stream at a use, before it waits for anything."""
        self._drop_loose()
        self._before = self._clock.stamp(), self._counters.stall_ns

    def started(self, record: Record, ready: Event | None) -> None:
        """Stamps the compute stream when the use may begin, with its block in HBM.

        Args:
            record: The block's record.
            ready: The event for which the compute stream waits, if any.
        """
        (before, stalled), self._before = self._before, _NOT_ARRIVED
        sample = self._open
        if sample is None:
            return
        after = self._clock.stamp() if before is not None else None
        if after is None or len(sample.uses) >= _MOST_USES:
            self._free(before, after)
            self._close()
            return
        block_id = record.block.id
        fill = self._fills.pop(block_id, None) or self._older.pop(block_id, None)
        waited = self._counters.stall_ns - stalled
        # a block with a home in a file that was copied from DRAM waits for the DRAM link
        link = LINK_UP[Tier.DRAM] if fill is not None else LINK_UP.get(record.home)
        sample.uses.append(_Use(block_id, link, before, after, fill, ready is not None, waited))

    def ended(self) -> bool:
        """Ends the pass after its last work was submitted, and reads the passes before it.

        Returns:
            Whether any were read.
        """
        self._reads_at_ends = True
        found = self.pending
        if found:
            self.harvest()
        if self._open is not None:
            self._open.end = self._clock.stamp() if self._clock.usable() else None
            self._close()
        return found

    def rising(self, extent: Extent, after: Event | None) -> None:
        """Stamps the begin of a copy to HBM that is about to be submitted."""
        self._free(self._begin)
        self._begin = self._clock.stamp_copies(extent, after)

    def risen(self, block: Block, nbytes: int) -> None:
        """Stamps the end of a copy to HBM that has been submitted.

        Args:
            block: The block that is copied.
            nbytes: Bytes transferred over the link.
        """
        begin, self._begin = self._begin, None
        end = self._clock.stamp_copies(None, None)
        if self._open is None or begin is None or end is None:
            self._free(begin, end)
            return
        fill = _Fill(block, nbytes, begin, end)
        self._open.fills.append(fill)
        stale = self._fills.get(block.id)
        if stale is not None:
            self._let_go(stale)
        self._fills[block.id] = fill

    def landed(self, link: str, nbytes: int, begun_ns: int, finished_ns: int) -> None:
        """Enters a file transfer that succeeded; time shared with another one counts once."""
        busy = finished_ns - max(begun_ns, self._last.get(link, 0))
        self._last[link] = max(finished_ns, self._last.get(link, 0))
        if self._open is not None:
            before, seconds = self._open.flows.get(link, (0, 0.0))
            self._open.flows[link] = (before + nbytes, seconds + max(0, busy) / 1e9)

    # -- reading ---------------------------------------------------------

    def harvest(self) -> None:
        """Reads the uses whose stamps have passed, in order."""
        if not self._clock.usable():
            return
        while self._waiting:
            sample = self._waiting[0]
            while sample.at < len(sample.uses):
                if not self._read(sample):
                    return
            self._waiting.popleft()
            self._commit(sample)
        self.pending = False

    def reset(self) -> None:
        """Forgets the times measured so far, but not the estimates, and soon measures again."""
        for sample in [*self._waiting, *([self._open] if self._open is not None else [])]:
            self._discard(sample)
        self._waiting.clear()
        self._open = None
        self.sampling = self.pending = False
        self._totals = _Totals()
        self.estimates.ask_again()

    def efficiency(self) -> Efficiency | None:
        """Returns how the measured passes compare with their bound; None before any."""
        self.harvest()
        totals = self._totals
        if totals.seconds <= 0.0:
            return None
        bounds = {"compute": totals.compute}
        for link, nbytes in totals.moved.items():
            rate = self.estimates.best_rate(link)
            if rate is None and link == "hbm->dram":
                rate = self.estimates.best_rate("dram->hbm")
            if rate is not None and nbytes:
                bounds[link] = nbytes / rate
        limit = max(bounds, key=lambda name: bounds[name])
        losses = {name: seconds for name, seconds in totals.waits.items() if seconds > 0.0}
        rest = totals.seconds - totals.compute - sum(losses.values())
        losses[_HOST] = losses.get(_HOST, 0.0) + max(0.0, rest)
        return Efficiency(totals.seconds, bounds[limit], limit, losses)

    def rows(self, records: Iterable[Record]) -> list[PaceRow]:
        """Returns the measured times of these blocks."""
        self.harvest()
        by_id = {record.block.id: record for record in records}
        found = []
        for key, block_id, seconds, samples in self.estimates.rows():
            record = by_id.get(block_id)
            if record is None:
                continue
            block, link = record.block, LINK_UP.get(record.home)
            fetch = self.estimates.transfer(link, block_id, block.nbytes) if link else 0.0
            found.append(PaceRow(block.name, _text(key), seconds, fetch, block.nbytes, samples))
        return found

    # -- inside ----------------------------------------------------------

    def _close(self) -> None:
        sample, self._open = self._open, None
        self.sampling = False
        self._drop_loose()
        if sample is None:
            return
        now = self._counters.bytes_by_link()
        sample.moved = {link: n - sample.moved.get(link, 0) for link, n in now.items()}
        if sample.uses:
            self.estimates.asked(sample.key)
            self._waiting.append(sample)
            self.pending = True
        else:
            self._discard(sample)

    def _drop_loose(self) -> None:
        """Frees the stamps of a use or a copy that an error interrupted."""
        if self._before[0] is not None or self._begin is not None:
            self._free(self._before[0], self._begin)
            self._before, self._begin = _NOT_ARRIVED, None

    def _stamps(self) -> set[Stamp | None]:
        """Returns the stamps that are not freed, each once."""
        found = {self._before[0], self._begin, self._length.first, self._length.last}
        fills = [*self._fills.values(), *self._older.values()]
        for sample in [*self._waiting, *([] if self._open is None else [self._open])]:
            found.add(sample.end)
            fills += sample.fills
            for use in sample.uses[sample.at :]:
                found.update((use.before, use.after))
                fills += [] if use.fill is None else [use.fill]
        for fill in fills:
            found.update((fill.begin, fill.end))
        return found

    def _took(self, now: float) -> float:
        """Returns the duration of the ending pass, up to its end on the device if that is known.

        Args:
            now: Seconds on the host's clock, when the next one begins.
        """
        first, last, clock = self._length.first, self._length.last, self._clock
        known = first is not None and last is not None and clock.usable()
        if not (known and clock.passed(last) and clock.passed(first)):
            return now - self._length.began
        return min(now - self._length.began, self._seconds(first, last))

    def _seconds(self, begin: Stamp, end: Stamp) -> float:
        """Returns the seconds between two recorded stamps; 0 if the second was recorded first.

        Threads with separate streams record stamps on these, whose work has no common order.
        """
        return max(0.0, self._clock.seconds(begin, end))

    def _read(self, sample: _Sample) -> bool:
        """Reads the next use of a pass, if all its stamps have been recorded."""
        clock = self._clock
        use = sample.uses[sample.at]
        last = sample.at + 1 == len(sample.uses)
        end = sample.end if last else sample.uses[sample.at + 1].before
        for stamp in (end, use.fill and use.fill.end, use.after, use.before):  # the last first
            if stamp is not None and not clock.passed(stamp):
                return False
        wait = self._seconds(use.before, use.after)
        sample.measured += wait
        self._attribute(sample, use, wait)
        if end is not None:
            seconds = self._seconds(use.after, end)
            sample.measured += seconds
            total, count = sample.compute.get(use.block, (0.0, 0))
            sample.compute[use.block] = (total + seconds, count + 1)
        self._free_use(use)
        if last:
            self._free(sample.end)
            sample.end = None
        sample.at += 1
        return True

    def _attribute(self, sample: _Sample, use: _Use, wait: float) -> None:
        """Attributes the wait before a use to what compute waited for."""
        waits = sample.waits
        host = use.host_ns / 1e9
        if use.fill is not None:
            part = self._seconds(use.before, use.fill.end)
        elif use.link == "nvme->hbm":
            part = min(wait, host)
            host -= part
        else:
            part = wait if use.expected else 0.0
        part = min(wait, part)
        if use.link is not None:
            waits[use.link] = waits.get(use.link, 0.0) + part
            wait -= part
        part = min(wait, host)
        waits[_HOST_WAIT] = waits.get(_HOST_WAIT, 0.0) + part
        waits[_HOST] = waits.get(_HOST, 0.0) + wait - part

    def _commit(self, sample: _Sample) -> None:
        clock, estimates = self._clock, self.estimates
        first = not estimates.passed(sample.key)
        fills = []
        for fill in sample.fills:
            if clock.passed(fill.begin) and clock.passed(fill.end):
                seconds = max(1e-9, self._seconds(fill.begin, fill.end))
                fills.append(("dram->hbm", fill.block.id, seconds))
                nbytes, before = sample.flows.get("dram->hbm", (0, 0.0))
                sample.flows["dram->hbm"] = (nbytes + fill.nbytes, before + seconds)
            self._let_go(fill)
        sample.fills = []
        compute = {block: total / count for block, (total, count) in sample.compute.items()}
        whole = sum(total for total, _ in sample.compute.values())
        estimates.observe(sample.key, compute, sample.flows, fills, whole)
        if first:  # the first pass includes one-time work of tiermem and torch
            return
        totals = self._totals
        totals.seconds += sample.measured
        for block, (total, count) in sample.compute.items():
            usual = estimates.compute(sample.key, block)
            totals.compute += total if usual is None else min(total, usual * count)
        for name, seconds in sample.waits.items():
            totals.waits[name] = totals.waits.get(name, 0.0) + seconds
        for link, moved in sample.moved.items():
            link = _SAME_DISK.get(link, link)
            totals.moved[link] = totals.moved.get(link, 0) + moved

    def _discard(self, sample: _Sample) -> None:
        for use in sample.uses[sample.at :]:
            self._free_use(use)
        for fill in sample.fills:
            self._let_go(fill)
        self._free(sample.end)

    def _free_use(self, use: _Use) -> None:
        self._free(use.before, use.after)
        if use.fill is not None:
            self._let_go(use.fill)

    def _let_go(self, fill: _Fill) -> None:
        fill.holders -= 1
        if not fill.holders:
            self._free(fill.begin, fill.end)

    def _free(self, *stamps: Stamp | None) -> None:
        for stamp in stamps:
            if stamp is not None:
                self._clock.free(stamp)


def open_pass_timer(copy: CopyEngine, counters: Counters, device: torch.device) -> PassTimer:
    """Returns the pass timer of a manager, on the clock of its device.

    Args:
        copy: The copy engine, whose streams are timed on CUDA.
        counters: Counts what moved.
        device: The device whose machine profile gives the first estimates, if there is one.
    """
    clock = CudaClock(copy) if isinstance(copy, CudaCopyEngine) else HostClock()
    profile = load(device=device_name(device)).profile
    return PassTimer(clock, counters, estimates_from(profile, flops_of(device)))


def estimates_from(profile: MachineProfile | None, flops: float = 0.0) -> Estimates:
    """Returns estimates that start with what is known before any measurement.

    Args:
        profile: The measured link speeds.
        flops: Operations per second to expect of the device; 0 if unknown.
    """
    if profile is None:
        return Estimates(flops=flops)

    def first(link: str, nbytes: int) -> float | None:
        rates = {
            "dram->hbm": profile.h2d_at(nbytes),
            "hbm->dram": profile.d2h,
            "nvme->hbm": profile.nvme_read,
            "hbm->nvme": profile.nvme_write,
        }
        return rates.get(link)

    return Estimates(first, flops)


def _text(key: Hashable) -> str:
    """Returns a pass's name for display, such as ``"backward/forward/0/True"``."""
    if isinstance(key, tuple):
        return "/".join(text for part in key if (text := _text(part)))
    return str(key)
