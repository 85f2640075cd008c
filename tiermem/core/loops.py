"""Loops that only read: their blocks and times, and how long they take with a plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from tiermem.core import fromdisk
from tiermem.core.cost import refetched, streaming_time
from tiermem.core.laps import LaidOut, Ways, at_the_ends, lay_out
from tiermem.core.rounds import Round, host_seconds
from tiermem.core.slots import one_ahead_time

_SEVERAL = 3
"""With fewer slots than this, one block is in use and one is prefetched, however small they are."""
_SLOWER = 1.1
"""Factor on compute times: if compute takes about as long as the copies, the model of free room is
not precise enough to tell which of the two delays each block."""
_MORE_MOVED = 1.05
"""Factor over the fewest bytes: kernels are slower beside copies, even if they wait for none."""
_WORTH_IT_LAID_OUT = 1.01
"""As ``_WORTH_IT``, over the least time of any plan: then no other plan has to be tried."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How HBM, and spare DRAM, are shared between blocks that stay and blocks that stream.

    Attributes:
        residents: Blocks that stay in HBM.
        reserve: Bytes of HBM through which the others stream, in use or prefetched.
        slot: Bytes of the pieces into which the reserve is divided; 0 if nothing streams.
        in_dram: Blocks whose home is a file and of which a copy stays in DRAM; None if the plan
            does not concern DRAM.
        parks: Whether a disk begins to read the next block that goes straight into HBM before HBM
            has room for it.
    """

    residents: frozenset[int]
    reserve: int
    slot: int = 0
    in_dram: frozenset[int] | None = None
    parks: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """The disk's times and spare DRAM, for blocks whose home is a file.

    Attributes:
        seconds: Seconds that a disk takes for a block, by id.
        room: Bytes of spare DRAM.
        staging: Bytes of the chunks through which the disk reads straight into HBM.
    """

    seconds: Mapping[int, float]
    room: int
    staging: int


def largest_beside(sizes: Mapping[int, int], kept: Collection[int]) -> int:
    """Returns the bytes of the largest block that is not kept; 0 if there is none."""
    return max((size for block, size in sizes.items() if block not in kept), default=0)


def occupied(size: int, slot: int) -> int:
    """Returns the bytes of a slot divided by the number of blocks of a size that it holds.

    Args:
        size: Bytes of the block.
        slot: Bytes of a slot, at least as many.
    """
    return slot // (slot // size)


@dataclass(frozen=True)
class Loop:
    """A loop that only reads.

    Attributes:
        order: Ids of blocks in order of use, a few rounds.
        sizes: Bytes by id.
        room: Bytes of HBM for these blocks.
        compute: Seconds of each use.
        transfer: Seconds a block takes to arrive, by id; if its home is a file, from DRAM.
        latency: Seconds between a slot becoming free and the next copy into it.
        files: Times and spare DRAM for the blocks whose homes are files.
        steady: Whether the same blocks are used in the same order, each once per round.
        laid_out: Whether its rounds are laid out beforehand (:mod:`tiermem.core.laps`).
        begins: Positions in the order at which the passes of a round begin.
        lags: For each pass, how many further blocks are used before a block is released.
        further: For each pass, the same for single blocks with a larger number; may be empty.
        ways: The possible layouts of the loop, which do not depend on times, by what stays.
    """

    order: Sequence[int]
    sizes: Mapping[int, int]
    room: int
    compute: Sequence[float]
    transfer: Mapping[int, float]
    latency: float
    files: Files | None = None
    steady: bool = False
    laid_out: bool = False
    begins: Sequence[int] = (0,)
    lags: Sequence[int] = (0,)
    further: Sequence[Mapping[int, int]] = ()
    ways: dict[frozenset[int], Ways] = field(default_factory=dict)

    @cached_property
    def _by_residents(self) -> dict[frozenset[int], LaidOut | None]:
        """Layouts found so far, by the blocks that stay; None if none is possible."""
        return {}

    @cached_property
    def length(self) -> int:
        """Uses in a round."""
        return _period(self.order)

    @cached_property
    def _passes(self) -> list[tuple[int, int]]:
        """Where each pass of a round begins and ends."""
        begins = [begin for begin in self.begins if begin < self.length]
        return list(pairwise([*begins, self.length]))

    @property
    def _host(self) -> float:
        """Seconds until the host has entered the last use of a round."""
        return host_seconds(self.length + len(self._passes) - 2)

    @cached_property
    def slower(self) -> Loop:
        """The same loop with somewhat longer compute, with which plans are compared."""
        return replace(self, compute=[_SLOWER * seconds for seconds in self.compute])

    def seconds(self, plan: Plan) -> float:
        """Returns the seconds that it takes with a plan, by a model of the links."""
        if self.files is not None:
            return self.from_disk(plan, self.files)[0]
        order, sizes, kept = self.order, self.sizes, plan.residents
        out = self.by_laps(plan)
        if out is not None:
            return out.seconds * len(order) / self.length
        slot = largest_beside(sizes, kept) or 1
        taken = {b: s if b in kept else occupied(s, slot) for b, s in sizes.items()}
        if self.steady and sum(s for b, s in taken.items() if b not in kept) > plan.reserve:
            found = self._all_anew(plan, taken)
            return max(found, self.one_by_one(plan)) if self.by_twos(plan) else found
        # a resident block is fetched once with any plan, so this is left out of the comparison
        fetched = refetched(order, taken, kept, plan.reserve, kept)
        arrive = [self.transfer[b] if f else 0.0 for b, f in zip(order, fetched, strict=True)]
        streamed = [taken[b] if f else 0 for b, f in zip(order, fetched, strict=True)]
        found = streaming_time(self.compute, arrive, streamed, plan.reserve, self.latency)
        if plan.reserve >= _SEVERAL * plan.slot:
            return found
        # this model lets small blocks share a slot, which two slots cannot provide
        if self.steady:
            return max(found, self.one_by_one(plan))
        return max(found, one_ahead_time(fetched, self.compute, arrive, self.latency))

    def by_laps(self, plan: Plan) -> LaidOut | None:
        """Returns the layout of its rounds with a plan; None if there is none."""
        kept = plan.residents
        if not self.laid_out or not self._has_copies(plan):
            return None
        if kept not in self._by_residents:
            order, compute, _ = self._round()
            ways = self.ways.pop(kept, None)
            if ways is None:
                further = [
                    late.get(block, 0)
                    for (begin, end), late in zip(self._passes, self.further, strict=False)
                    for block in order[begin:end]
                ]
                one = Round([end - begin for begin, end in self._passes], self.lags, further)
                streams = {block: s for block, s in self.sizes.items() if block not in kept}
                room = self.room - sum(self.sizes.values()) + sum(streams.values())
                ways = Ways(order, one, streams, [(0, room)])
            self.ways[kept] = ways
            out = lay_out(ways, compute, self.transfer, self.latency)
            self._by_residents[kept] = out
        return self._by_residents[kept]

    def keep_ways(self, plan: Plan) -> None:
        """Makes a plan's layouts the last ones to be dropped from ``ways``."""
        if (ways := self.ways.pop(plan.residents, None)) is not None:
            self.ways[plan.residents] = ways

    def _has_copies(self, plan: Plan) -> bool:
        """Whether all blocks that stream from files with a plan have copies in DRAM."""
        if self.files is None:
            return True
        copies = plan.in_dram or frozenset()
        if sum(self.sizes.get(block, 0) for block in copies) > self.files.room:
            return False
        return self.files.seconds.keys() & self.sizes.keys() <= plan.residents | copies

    def lays_out_as(self, plan: Plan, other: Plan) -> bool:
        """Whether rounds can be laid out with a plan, if they can be with another one.

        If they cannot, :meth:`seconds` uses a less precise model.
        """
        return self.by_laps(plan) is not None or self.by_laps(other) is None

    def is_good(self, plan: Plan, worth_it: float = _WORTH_IT_LAID_OUT) -> bool:
        """Whether no other plan for rounds that are laid out would be much better.

        With a good plan, the busiest of link, compute and host is never idle between the use of the
        first streaming block and the last use, and hardly more moves than with any other plan.

        Args:
            plan: The plan.
            worth_it: A plan is good if it takes at most this many times the least of any plan.
        """
        out = self.by_laps(plan)
        if out is None:
            return False
        streams = [s for block, s in self.sizes.items() if block not in plan.residents]
        passes = self._busy(self.sizes, self.room - sum(sorted(streams)[-2:]))
        moves = sum(copies for copies, _ in passes)
        ends = at_the_ends(out.visits, self.compute[: self.length])
        least = max(sum(map(max, passes)), self._host)
        enough = worth_it * least + ends
        return out.seconds <= enough and out.moved <= _MORE_MOVED * moves

    def _busy(self, blocks: Collection[int], room: int) -> list[tuple[float, float]]:
        """Returns the seconds of copies, and of compute, in each pass of a round.

        Args:
            blocks: The blocks that are copied to HBM, unless they are there when the pass begins.
            room: Bytes of those that are there.
        """
        found = []
        for begin, end in self._passes:
            used = set(self.order[begin:end]).intersection(blocks)
            nbytes = sum(map(self.sizes.__getitem__, used))
            copies = sum(map(self.transfer.__getitem__, used))
            left = copies * max(0.0, 1.0 - room / max(1, nbytes))
            found.append((left, sum(self.compute[begin:end])))
        return found

    def _all_anew(self, plan: Plan, taken: Mapping[int, int]) -> float:
        """Returns the seconds of rounds in which every use of a streaming block needs a fetch."""
        kept = plan.residents
        arrive = {b: 0.0 if b in kept else s for b, s in self.transfer.items()}
        streamed = {b: 0 if b in kept else s for b, s in taken.items()}
        return streaming_time(
            self.compute,
            list(map(arrive.__getitem__, self.order)),
            list(map(streamed.__getitem__, self.order)),
            plan.reserve,
            self.latency,
        )

    def at_least(self, plan: Plan) -> float:
        """Returns a lower bound of the seconds, if each block is used once in each pass."""
        streams = self.sizes.keys() - plan.residents
        passes = self._busy(streams, plan.reserve if len(self._passes) > 1 else 0)
        host = self._host if self.laid_out else 0.0
        return max(sum(map(max, passes)), host) * len(self.order) / self.length

    def from_disk(self, plan: Plan, files: Files) -> tuple[float, float]:
        """Returns the seconds with a plan for blocks from files, and those in which the disk reads.

        The simulation includes all blocks that HBM and DRAM keep between two uses.
        """
        order = self.order[: self.length]
        compute = self.compute[: self.length]
        slot = largest_beside(self.sizes, plan.residents) or 1
        taken = {b: occupied(s, slot) for b, s in self.sizes.items() if b not in plan.residents}
        there = plan.in_dram or frozenset()
        reads = {b: s for b, s in files.seconds.items() if b in taken and b not in there}
        one = fromdisk.Round(
            order,
            compute,
            taken,
            self.transfer,
            reads,
            plan.reserve,
            files.staging,
            self.latency,
            plan.parks,
        )
        rounds = len(self.order) / len(order)
        seconds, busy = fromdisk.play(one)
        return rounds * seconds, rounds * busy

    def one_by_one(self, plan: Plan) -> float:
        """Returns the seconds with a plan of two slots: one block in use, one prefetched.

        The model of :meth:`seconds` does not fit two slots: it lets small blocks share a slot, and
        reuses room as soon as it is free.
        """
        order, compute, fetch = self._round()
        moves = [block not in plan.residents for block in order]
        one = one_ahead_time(moves, compute, fetch, self.latency)
        return one * len(self.order) / len(order)

    def by_twos(self, plan: Plan) -> bool:
        """Whether a plan has one block in use and one prefetched, in rounds that are alike."""
        return self.steady and plan.reserve < _SEVERAL * plan.slot

    def _round(self) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
        """Returns one round's blocks, their compute, and how long each takes to arrive."""
        order = self.order[: self.length]
        return order, self.compute[: self.length], [self.transfer[block] for block in order]


def _period(order: Sequence[int]) -> int:
    """Returns the period of an order of uses; its length if it does not repeat.

    By the failure function of Knuth, Morris and Pratt: the length without the longest border.
    """
    border = [0] * len(order)
    matched = 0
    for at in range(1, len(order)):
        while matched and order[at] != order[matched]:
            matched = border[matched - 1]
        if order[at] == order[matched]:
            matched += 1
        border[at] = matched
    return len(order) - (border[-1] if border else 0)
