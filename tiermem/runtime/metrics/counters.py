"""Statistics: counters that every mechanism feeds, and the rows users read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from tiermem.core.block import Tier
from tiermem.core.residency import Record, State

_TIERS = ("hbm", "dram", "nvme")
_STARTED, _ENDED, _NBYTES = itemgetter(2), itemgetter(3), itemgetter(4)

Row = tuple[str, str, int, int, int]
"""A span of time: lane, name, begin and end in nanoseconds, bytes moved."""


@dataclass(frozen=True)
class LinkStats:
    """Bytes, blocks and time moved over one link.

    Attributes:
        nbytes: Bytes that crossed it; for blocks that are copied packed, those of the packed form.
        moves: Whole blocks.
        seconds: Time the copies took, summed (host time for copies on streams).
    """

    nbytes: int = 0
    moves: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ActivationStats:
    """Counts of tensors that were saved for backward.

    Attributes:
        offloaded: Copies from HBM to a lower tier.
        offloaded_bytes: Their bytes.
        shared: Saved tensors that needed no copy of their own, since another copy covers their
            bytes.
        kept: Tensors that stayed in HBM since there was no room for them below, or no way to copy
            them.
        reused: Uses in backward that found the original still in HBM.
        fetched_ahead: Copies fetched before their use.
        fetched_late: Copies fetched at their use.
        waits: Times the host waited for a file that was being read ahead.
        used: Bytes below HBM now.
        peak: Most bytes ever below HBM.
    """

    offloaded: int = 0
    offloaded_bytes: int = 0
    shared: int = 0
    kept: int = 0
    reused: int = 0
    fetched_ahead: int = 0
    fetched_late: int = 0
    waits: int = 0
    used: int = 0
    peak: int = 0


class ActivationCounters:
    """The mutable side of :class:`ActivationStats`."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.offloaded = 0
        self.offloaded_bytes = 0
        self.shared = 0
        self.kept = 0
        self.reused = 0
        self.fetched_ahead = 0
        self.fetched_late = 0
        self.waits = 0

    def freeze(self, used: int, peak: int) -> ActivationStats:
        """Returns what was counted; ``used`` and ``peak`` are bytes below HBM."""
        return ActivationStats(**vars(self), used=used, peak=peak)


@dataclass(frozen=True)
class Stats:
    """What a manager has done since it was opened or ``reset_stats()``.

    Attributes:
        links: By link, such as ``"dram->hbm"``.
        hits: Uses of a block that was in HBM already.
        misses: Uses that had to fetch it, or wait for it.
        prefetches: Fetches begun before the use.
        reads_in_place: Uses of a block that read a few of its rows in place in DRAM.
        read_in_place: Bytes of those rows; no link counts them.
        experts_chosen: Experts that tokens chose, summed over the calls of layers whose experts
            are copied one by one; a backward through a call that has saved experts counts as one
            more call.
        expert_hits: Of these, those that were in HBM already, or being copied after a prediction.
        expert_guesses: Experts that were fetched before a token had chosen them.
        expert_guesses_right: Of these, those that were chosen in the next call.
        evictions: Blocks taken out of HBM.
        write_backs: Of those, how many were dirty.
        relocations: Blocks in use that were moved within HBM to join free pieces.
        stalls: Times the host waited for a transfer.
        stall_seconds: How long, in all.
        errors: Transfers that failed (and were raised, or tried again).
        used: Bytes in use, by tier.
        budget: Bytes allowed, by tier.
        peak: Most bytes ever in use, by tier.
        io_engine: Which engine drives the files: ``"uring"``, ``"threads"`` or ``"none"``.
        io_reason: Why it was chosen.
        direct_io: Whether the files bypass the page cache.
        compute_seconds: Host time inside wrapped modules, backward and optimizer, less stalls.
        prefetch_wasted: Of the prefetches, those whose block left HBM, or whose pass ended,
            without a use.
        efficiency: ``bound_seconds`` over ``measured_seconds``; None before a pass was measured.
        measured_seconds: Time of the passes that were measured (device time on CUDA): the first
            ones of each kind except the very first, then one in sixteen, and more if they
            differ from what was expected.
        bound_seconds: The least those passes could take: the longest of their compute and of
            their bytes over each link at the best speed it sustained.
        limit: Which of these is the longest: ``"compute"`` or a link.
        losses: The measured time that was not compute, by cause, in seconds. By link, such as
            ``"dram->hbm"``: how long compute waited for blocks (if a link is the limit, its
            time beyond the compute cannot be avoided). ``"host wait"``: waits for room, or for
            files besides. ``"host"``: launches, hooks, and compute that took longer than usual.
        reads_into: Where blocks that stream from files are read to now: ``"hbm"``, directly, or
            ``"dram"``, before HBM has room for them; ``"none"`` without an NVMe tier.
        kept_in_dram: Bytes of blocks with homes in files of which DRAM keeps copies during the
            present loop, so that they are not read again.
        packed_in_dram: Bytes of packed copies of weights in DRAM, which have three quarters of the
            bytes of the weights. They are freed for homes that need this DRAM.
        kept_in_hbm: Bytes of blocks that stay in HBM while the present loop streams others.
        hbm_mapped: Bytes of device memory that the HBM tier has mapped, in whole chunks; at
            most its budget, rounded up to the driver's units (2 MiB).
        activations: Tensors saved for backward that left HBM.
    """

    links: dict[str, LinkStats] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    prefetches: int = 0
    reads_in_place: int = 0
    read_in_place: int = 0
    experts_chosen: int = 0
    expert_hits: int = 0
    expert_guesses: int = 0
    expert_guesses_right: int = 0
    evictions: int = 0
    write_backs: int = 0
    relocations: int = 0
    stalls: int = 0
    stall_seconds: float = 0.0
    errors: int = 0
    used: dict[str, int] = field(default_factory=dict)
    budget: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    io_engine: str = "none"
    io_reason: str = ""
    direct_io: bool = False
    compute_seconds: float = 0.0
    prefetch_wasted: int = 0
    efficiency: float | None = None
    measured_seconds: float = 0.0
    bound_seconds: float = 0.0
    limit: str | None = None
    losses: dict[str, float] = field(default_factory=dict)
    reads_into: str = "none"
    kept_in_dram: int = 0
    packed_in_dram: int = 0
    kept_in_hbm: int = 0
    hbm_mapped: int = 0
    activations: ActivationStats = field(default_factory=ActivationStats)

    @property
    def hit_rate(self) -> float:
        """Hits over uses; 1.0 before any use."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0


@dataclass(frozen=True)
class Efficiency:
    """Measured passes compared with their bound; see :class:`Stats`.

    Attributes:
        measured: Seconds they took.
        bound: Seconds they could have taken.
        limit: What the bound comes from.
        losses: Seconds that were not compute, by cause.
    """

    measured: float
    bound: float
    limit: str
    losses: dict[str, float]


@dataclass(frozen=True)
class PaceRow:
    """The measured times of a block in one kind of pass.

    Attributes:
        block: Its name.
        during: The pass, such as ``"forward/0/True"``.
        compute_seconds: From its use to the next one; device time on CUDA, waits left out.
        transfer_seconds: Time of a fetch from its home; 0.0 if that is HBM.
        nbytes: Its size.
        samples: How many measured passes the compute is the median of, five at the most.
    """

    block: str
    during: str
    compute_seconds: float
    transfer_seconds: float
    nbytes: int
    samples: int


@dataclass(frozen=True)
class ResidencyRow:
    """The location of one block.

    Attributes:
        block: Its name.
        role: What its tensors are for.
        home: Its home tier.
        nbytes: Its size.
        tiers: State by tier.
        leases: The number of leases.
    """

    block: str
    role: str
    home: str
    nbytes: int
    tiers: dict[str, str]
    leases: int


class Counters:
    """The mutable side of :class:`Stats`.

    Attributes:
        moved_by: Bytes, blocks and nanoseconds of what moved, by link.
        count_swap: Enters the prefetch of a block from DRAM into the place of a block that was
            evicted for it, given its row of the timeline.
        count_copy: Enters another copy from DRAM to HBM likewise.
    """

    def __init__(self) -> None:
        """Starts at zero."""
        self._swaps: list[Row] = []
        self.count_swap: Callable[[Row], None] = self._swaps.append
        self._copies: list[Row] = []
        self.count_copy: Callable[[Row], None] = self._copies.append
        self.reset()

    def reset(self) -> None:
        """Sets everything to zero."""
        self.hits = 0
        self.misses = 0
        self.prefetches = 0
        self.reads_in_place = 0
        self.read_in_place = 0
        self.experts_chosen = 0
        self.expert_hits = 0
        self.expert_guesses = 0
        self.expert_guesses_right = 0
        self.evictions = 0
        self.write_backs = 0
        self.relocations = 0
        self.stalls = 0
        self.stall_ns = 0
        self.copy_ns = 0
        self.busy_ns = 0
        self.errors = 0
        self.prefetch_wasted = 0
        self.activations = ActivationCounters()
        self.moved_by: dict[str, list[int]] = {}
        self._swaps.clear()
        self._copies.clear()

    def moved(self, link: str, nbytes: int, elapsed_ns: int, blocks: int = 1) -> None:
        """Counts blocks that moved."""
        entry = self.moved_by.get(link)
        if entry is None:
            entry = self.moved_by[link] = [0, 0, 0]
        entry[0] += nbytes
        entry[1] += blocks
        entry[2] += elapsed_ns

    def add_up(self) -> None:
        """Sums what was counted row by row; called when a pass ends, and before a look at it."""
        swaps = self._add_up(self._swaps)
        self.evictions += swaps
        self.prefetches += swaps
        self._add_up(self._copies)

    def _add_up(self, rows: list[Row]) -> int:
        """Sums what moved, and drops the rows; returns their number."""
        count = len(rows)
        if count:
            elapsed = sum(map(_ENDED, rows)) - sum(map(_STARTED, rows))
            self.moved("dram->hbm", sum(map(_NBYTES, rows)), elapsed, count)
            self.copy_ns += elapsed
            del rows[:count]
        return count

    def bytes_by_link(self) -> dict[str, int]:
        """Returns the bytes that moved, by link."""
        self.add_up()
        return {name: entry[0] for name, entry in self.moved_by.items()}

    def links(self) -> dict[str, LinkStats]:
        """Returns what moved, by link."""
        self.add_up()
        return {
            name: LinkStats(nbytes, moves, nanoseconds / 1e9)
            for name, (nbytes, moves, nanoseconds) in sorted(self.moved_by.items())
        }


def stats_of(
    counters: Counters,
    *,
    used: tuple[int, int, int],
    budget: tuple[int, int, int],
    peak: tuple[int, int, int],
    io: tuple[str, str],
    direct: bool,
    efficiency: Efficiency | None,
    ahead: tuple[str, int] = ("none", 0),
    packed: int = 0,
    kept: int = 0,
    mapped: int = 0,
) -> Stats:
    """Returns the counters as users see them.

    Args:
        counters: The counts.
        used: Bytes in use in HBM, DRAM and on NVMe.
        budget: Bytes allowed there.
        peak: Most bytes ever in use there.
        io: The I/O engine, and why it was chosen.
        direct: Whether the files bypass the page cache.
        efficiency: The measured passes compared with their bound.
        ahead: Where streamed blocks are read to from files, and bytes of which DRAM keeps copies.
        packed: Bytes of packed copies in DRAM.
        kept: Bytes of the blocks that stay in HBM.
        mapped: Bytes of device memory that the HBM tier has mapped.
    """
    counters.add_up()
    busy = counters.busy_ns
    lost = min(busy, counters.stall_ns + counters.copy_ns)
    return Stats(
        links=counters.links(),
        hits=counters.hits,
        misses=counters.misses,
        prefetches=counters.prefetches,
        reads_in_place=counters.reads_in_place,
        read_in_place=counters.read_in_place,
        experts_chosen=counters.experts_chosen,
        expert_hits=counters.expert_hits,
        expert_guesses=counters.expert_guesses,
        expert_guesses_right=counters.expert_guesses_right,
        evictions=counters.evictions,
        write_backs=counters.write_backs,
        relocations=counters.relocations,
        stalls=counters.stalls,
        stall_seconds=counters.stall_ns / 1e9,
        errors=counters.errors,
        used=dict(zip(_TIERS, used, strict=True)),
        budget=dict(zip(_TIERS, budget, strict=True)),
        peak=dict(zip(_TIERS, peak, strict=True)),
        io_engine=io[0],
        io_reason=io[1],
        direct_io=direct,
        compute_seconds=(busy - lost) / 1e9,
        prefetch_wasted=counters.prefetch_wasted,
        efficiency=None if efficiency is None else efficiency.bound / efficiency.measured,
        measured_seconds=0.0 if efficiency is None else efficiency.measured,
        bound_seconds=0.0 if efficiency is None else efficiency.bound,
        limit=None if efficiency is None else efficiency.limit,
        losses={} if efficiency is None else efficiency.losses,
        reads_into=ahead[0],
        kept_in_dram=ahead[1],
        packed_in_dram=packed,
        kept_in_hbm=kept,
        hbm_mapped=mapped,
    )


def row_of(record: Record) -> ResidencyRow:
    """Returns the location of a block, for users."""
    home, block = record.home, record.block
    tiers = {"hbm": record.in_hbm.value}
    if record.annexed is not None:
        home, tiers = Tier.DRAM, {"hbm": State.ABSENT.value, "dram": record.in_hbm.value}
    elif home is not Tier.HBM:
        tiers[home.value] = record.at_home.value
    return ResidencyRow(
        block=block.name,
        role=block.role.value,
        home=home.value,
        nbytes=block.nbytes,
        tiers=tiers,
        leases=record.leases,
    )
