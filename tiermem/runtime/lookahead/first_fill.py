"""Fills HBM while a model is wrapped: its first pass then fetches only what did not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tiermem.core.block import Extent, Tier
from tiermem.core.residency import Record
from tiermem.core.schedule import MOST_PASSES, Schedule
from tiermem.runtime.lookahead.arranged import Arranger
from tiermem.runtime.lookahead.plan_maker import READ_ONLY
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.parts import Parts


class FirstFill:
    """Fetches the blocks that a model's first pass uses first, and the residents; under the lock.

    The pass is assumed to use blocks in the order of the modules, and to take as long as with a
    single token: the residents are mostly the same for more tokens.
    """

    def __init__(self, parts: Parts, prefetcher: Prefetcher, arranger: Arranger) -> None:
        """Works on ``parts``.

        Args:
            parts: The parts of the manager.
            prefetcher: Decides what stays.
            arranger: Lays out the streaming blocks.
        """
        self._parts = parts
        self._prefetcher = prefetcher
        self._arranger = arranger

    def fill(self, order: Sequence[int], held: Collection[int]) -> None:
        """Begins the copies; they are ordered before any use, and the host does not wait for them.

        Does nothing if a pass has begun or HBM is in use already, if the home of a block is not
        DRAM, or if there is no layout.

        Args:
            order: Ids of a model's blocks, in the order of its modules.
            held: Ids of those that are held while others are used.
        """
        if not self._may(order):
            return
        self._parts.limit.begin()
        passes = [(number * len(order), None) for number in range(MOST_PASSES)]
        schedule = Schedule([*order] * MOST_PASSES, passes)
        plan = self._prefetcher.plan_first(schedule, held)
        for record, extent in self._places(order, schedule, plan):
            self._parts.transfers.fill(record, extent)
            self._parts.evictor.order.note_change(record.block.id)
            self._parts.counters.prefetches += 1

    def _may(self, order: Sequence[int]) -> bool:
        parts = self._parts
        table, planner = parts.table, parts.planner
        if not self._prefetcher.fetcher.beside or parts.settings.prefetch_depth != "auto":
            return False
        if planner.key is not None or planner.learned or parts.copy.capturing():
            return False
        blocks = [table[block] for block in order]
        return (
            len(blocks) > 1
            and all(r.fixed or r.extent is None for r in table)
            and all(r.defined and r.block.role in READ_ONLY for r in blocks)
            and all(r.fixed or r.home is Tier.DRAM for r in blocks)
        )

    def _places(
        self, order: Sequence[int], schedule: Schedule, plan: StreamPlan
    ) -> Iterator[tuple[Record, Extent]]:
        """Yields the blocks to fetch, in order of use, each with a place that was taken for it."""
        table, residents = self._parts.table, plan.plan.residents
        if all(block in residents or table[block].fixed for block in order):
            for block in order:
                record = table[block]
                there = record.extent is not None
                room = None if there else self._parts.evictor.place(record.block, 0)
                if room is not None:
                    yield record, room.extent
            return
        for fetch in self._arranger.opening(schedule, plan):
            extent = table.hbm.take_at(fetch.offset, fetch.nbytes)
            if extent is None:
                return  # the device has no more memory: what comes later would be in the way
            yield table[fetch.block], extent
