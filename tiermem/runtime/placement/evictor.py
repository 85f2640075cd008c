"""Room in HBM: who gets which bytes, and who leaves for them."""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Sequence

from tiermem.core.allocator import Window
from tiermem.core.block import Block, Extent, align_up
from tiermem.core.cost import eviction_cost
from tiermem.core.residency import Record, ResidencyTable, State
from tiermem.core.schedule import Planner
from tiermem.core.victims import NextUseQueue
from tiermem.runtime.memory.slots import Holder, Slot, SlotCache
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.placement.compaction import Compactor
from tiermem.runtime.placement.no_room import too_small
from tiermem.runtime.placement.regions import Regions
from tiermem.runtime.placement.ring import Ring
from tiermem.runtime.transfers.transfers import Transfers

_CANDIDATES = 4
_ATTEMPTS = 3
_MOST_LOOPS = 16
_RESIDENT = 1e12
_SOFT = 1e15


class Evictor:
    """Hands out HBM, evicting what is needed last.

    What is leased, fixed, under way or seen by anything but parameters stays.

    Attributes:
        holders: Who points parameters at which block.
        division: Of HBM between what stays and what streams.
        turns: Hands HBM out in circles, where a loop writes what it streams.
        unseen: Leases under way of whom nobody has seen an address yet, by block.
        places: How often room was asked for.
        moved: Blocks in HBM that were used or have come, so that their next use is another than
            the queue of what may leave knows.
        left: Who left for the one that got it last, if the place just changed hands.
        more: Makes HBM larger by so many bytes, and returns whether it could.
    """

    def __init__(
        self,
        table: ResidencyTable,
        slots: SlotCache,
        traffic: Transfers,
        planner: Planner,
        holders: dict[int, Holder],
        counters: Counters,
    ) -> None:
        """Works on ``table``, under its lock."""
        self.table = table
        self.slots = slots
        self.traffic = traffic
        self.holders = holders
        self.division = Regions(table)
        self.largest_later = 0
        self._attempts = 0
        self._rounds: dict[object, None] = {}
        self.places = 0
        self.left: Record | None = None
        self.more: Callable[[int], bool] = lambda nbytes: False
        self.unseen: dict[int, int] = {}
        self.moved: set[int] = set()
        self._planner = planner
        self._counters = counters
        self._compactor = Compactor(self, counters)
        self._orphans: list[Slot] = []
        self._queue = NextUseQueue()
        self._followed = 0
        self.turns = Ring(self, planner)

    # -- who stays -------------------------------------------------------

    @property
    def residents(self) -> frozenset[int]:
        """Blocks that shall stay while the present loop goes on."""
        return self.division.residents

    def keep(self, residents: frozenset[int], slot: int, lanes: tuple[int, ...] = ()) -> None:
        """Has blocks stay from now on, and HBM divided for that; see :meth:`Regions.keep`."""
        if self.division.keep(residents, slot, lanes):
            self._attempts = 0

    def settle(self, loop: object) -> None:
        """Sends those away who lie in the wrong part, once a loop has come round.

        They come back to the right one when they are used. A block that is in use stays, and
        has another chance at the next round.

        Args:
            loop: What is going on; nothing moves until it goes on for a second round.
        """
        if loop not in self._rounds:  # a loop of several passes has a schedule for each
            self._rounds[loop] = None
            if len(self._rounds) > _MOST_LOOPS:
                del self._rounds[next(iter(self._rounds))]
            self._attempts = 0
            return
        if not self.residents or self._attempts >= _ATTEMPTS:
            return
        self._attempts += 1
        misplaced, placed, division = [], [], self.division
        for extent in self.table.hbm.extents():
            record = self.table.at(extent.offset)
            if record is None or record.fixed or not record.usable:
                continue
            if division.misplaced(record):
                misplaced.append(record)
            elif record.block.id in division.residents:
                placed.append(record)
        if not division.rest_fits(placed):
            misplaced += placed  # they lie with holes between them
        for record in misplaced:  # what is written first goes another time
            if record.in_hbm is State.VALID and self._let_loose(record):
                self.evict(record)
        if not misplaced:
            self._attempts = _ATTEMPTS

    # -- in --------------------------------------------------------------

    def place(self, block: Block, position: int | None) -> Extent | None:
        """Makes room for a block.

        Every round either returns, raises, or has something leave, land or be found in use.

        Args:
            block: What needs it.
            position: Uses until then, for a fetch ahead, which may not wait and may not evict
                what is needed sooner; None where it is needed now.

        Raises:
            CapacityError: If it is needed now and cannot be had.
            StorageError: If what must leave cannot be written.
        """
        hbm = self.table.hbm
        self.places += 1
        self.left = None
        if self.turns.uses:
            extent = self.turns.place(block, position)
            if extent is not None:
                return extent
        resorts = 0
        parts = self.division.parts_for(block)
        extent = self._exchange(block, position, parts)
        if extent is not None:
            return extent
        while True:
            extent = hbm.allocate_in(block.nbytes, parts)
            if extent is not None:
                return extent
            if self.reap():
                continue
            window = self._window(block.nbytes, position, parts)
            anywhere = position is None or block.id in self.residents
            if window is None and anywhere and parts != [(0, hbm.capacity)]:
                parts = [(0, hbm.capacity)]  # better there than not at all
                continue
            if window is not None:
                used = hbm.used
                if not self.clear(window.victims, wait=position is None):
                    return None
                if hbm.used < used:
                    continue
            if position is not None:
                return None
            if self.traffic.flights:
                self.traffic.settle(next(iter(self.traffic.flights)))
            elif self.more(block.nbytes):
                parts = [(0, hbm.capacity)]
            elif resorts == 3:
                raise too_small(block, self.table, self.slots)
            else:
                self._last_resort(resorts, block.nbytes)
                resorts += 1

    def _exchange(
        self, block: Block, position: int | None, parts: Sequence[tuple[int, int]]
    ) -> Extent | None:
        """Has the block needed last leave if that makes just the place wanted.

        So it is in a loop that streams through slots of one size. What the search for a window
        would come to is found without it, and the place changes hands without being freed.
        """
        size = align_up(block.nbytes)
        if self._orphans or self.table.hbm.has_gap(size):
            return None
        self._follow_schedule()
        record = None
        leaves = self._may_leave(position)
        if self.division.by_lane:
            leaves = self._as_large(leaves, size)
        for block_id in self._queue.last(1, self._beyond(position), leaves):
            record = self.table[block_id]
        if record is None or record.in_hbm is not State.VALID or record.extent is None:
            return None
        extent = record.extent
        low, high = self._part_of(extent.offset, parts)
        if extent.nbytes != size or extent.offset < low or extent.end > high:
            return None
        if self.slots.current[record.block.id].wanted or not self._let_loose(record):
            return None
        self.evict(record, free=False)
        self.left = record
        return extent

    def _as_large(self, leaves: Callable[[int], bool], size: int) -> Callable[[int], bool]:
        """Returns what tells whether a block may leave and takes up just so many bytes."""

        def free(block_id: int) -> bool:
            extent = self.table[block_id].extent
            return extent is not None and extent.nbytes == size and leaves(block_id)

        return free

    def lose_track(self) -> None:
        """Says that blocks change places and ``moved`` is not told; see :class:`Replay`."""
        self._queue.schedule = None

    def _window(
        self, nbytes: int, position: int | None, parts: Sequence[tuple[int, int]]
    ) -> Window | None:
        """Finds what to evict: around the blocks needed last, or, failing that, anywhere."""
        hbm, queue = self.table.hbm, self._queue
        self._follow_schedule()

        def price(offset: int) -> float | None:
            return self.price(offset, position)

        free = self._may_leave(position)
        beyond = self._beyond(position)
        best: Window | None = None
        last: list[int] = []
        for most in (1, _CANDIDATES):  # as a rule the first one will do
            last = queue.last(most, beyond, free)
            for block_id in last[0 if most == 1 else 1 :]:
                extent = self.table[block_id].extent
                window = None
                part = self._part_of(extent.offset, parts) if extent is not None else (0, 0)
                if extent is not None and (
                    not self.division.by_lane or part[0] <= extent.offset < part[1]
                ):
                    window = hbm.window_around(extent.offset, nbytes, price, *part)
                if window is not None and (best is None or window.cost < best.cost):
                    best = window
                if best is not None and len(best.victims) == 1 and not self._dirty(best.victims[0]):
                    return best  # one clean block, needed last: nothing is cheaper by much
        if best is None and (position is None or last):
            found = (hbm.cheapest_window(nbytes, price, *part) for part in parts)
            windows = [window for window in found if window is not None]
            best = min(windows, key=lambda window: window.cost, default=None)
        return best

    def _follow_schedule(self) -> None:
        """Orders what may leave by its next use in the schedule of now."""
        queue, planner, moved = self._queue, self._planner, self.moved
        if queue.schedule is planner.schedule and planner.cursor >= self._followed:
            for block_id in moved:
                if block_id not in self.residents:
                    queue.put(block_id, planner.cursor)
        else:
            inside = (self.table.at(extent.offset) for extent in self.table.hbm.extents())
            loose = (r.block.id for r in inside if r is not None and not r.fixed)
            queue.rebuild(
                planner.schedule, planner.cursor, [b for b in loose if b not in self.residents]
            )
        moved.clear()
        self._followed = planner.cursor

    def _beyond(self, position: int | None) -> int:
        """Returns up to which position of the schedule no block may leave that is used there."""
        return -1 if position is None else self._planner.cursor + position

    def _may_leave(self, position: int | None) -> Callable[[int], bool]:
        """Returns what tells whether a block may leave for one needed at ``position``."""

        def free(block_id: int) -> bool:
            record = self.table.get(block_id)
            if record is None or record.extent is None:
                self._queue.drop(block_id)
                return False
            return self.price(record.extent.offset, position) is not None

        return free

    def _part_of(self, offset: int, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Returns the bounds of the run of HBM that an offset is in, or behind."""
        return parts[max(0, bisect_right(parts, (offset, self.table.hbm.capacity)) - 1)]

    def _dirty(self, offset: int) -> bool:
        record = self.table.at(offset)
        return record is not None and record.in_hbm is State.DIRTY

    def _last_resort(self, number: int, nbytes: int) -> None:
        """Tries what may still make room: joining pieces, finding cycles that hold an alias."""
        if number == 1:
            if self._orphans or any(map(self._held_by_alias, self.table)):
                gc.collect()  # takes seconds in a large process
        else:
            self._compactor.gather(nbytes)

    def _held_by_alias(self, record: Record) -> bool:
        slot = self.slots.current.get(record.block.id)
        return slot is not None and not (record.leases or record.fixed) and slot.aliased

    def tidy(self, record: Record, later: int) -> None:
        """Moves a block out of the middle before it is leased, where it would be in the way.

        A block in use can often not be moved any more; so it has to lie where what is needed
        beside it still finds a place.

        Args:
            record: A block in HBM that nothing holds.
            later: Bytes of the largest block that may be needed while it is in use.
        """
        extent = record.extent
        if extent is None or extent.offset >= later or record.leases or record.fixed:
            return
        before, behind = extent.offset, self.table.hbm.capacity - extent.end
        if behind < later and max(before, behind) < min(later, before + behind):
            self.traffic.settle_all()
            if record.usable and self.movable(record):
                self._compactor.gather(min(later, before + behind), keep=record)

    def price(self, offset: int, position: int | None) -> float | None:
        """What evicting the block at ``offset`` costs; None where it has to stay."""
        record = self.table.at(offset)
        if record is None or record.leases or record.fixed or not record.usable:
            return None
        block = record.block
        slot = self.slots.current[block.id]
        if slot.aliased:
            return None
        distance = self._planner.distance(block.id)
        resident = block.id in self.residents
        if position is not None and (
            resident or distance <= position or slot.wanted or block.id in self.traffic.failing
        ):
            return None
        price = eviction_cost(block.nbytes, distance, dirty=record.in_hbm is State.DIRTY)
        return price + resident * _RESIDENT + (_SOFT if slot.wanted else 0.0)

    def movable(self, record: Record) -> bool:
        """Whether nobody but parameters that can be pointed anew sees a block's address."""
        slot = self.slots.current.get(record.block.id)
        if slot is None or not record.usable or slot.aliased:
            return False
        holder = self.holders.get(record.block.id)
        known = holder.leases() if holder is not None else 0
        return record.leases == known + self.unseen.get(record.block.id, 0)

    # -- out -------------------------------------------------------------

    def clear(self, victims: Sequence[int], *, wait: bool) -> bool:
        """Evicts the blocks at these offsets; returns whether all that could be has been done.

        Args:
            victims: Offsets.
            wait: Whether to wait for write-backs; otherwise they are only begun.
        """
        loose, pending = [], []
        for offset in victims:
            record = self.table.at(offset)
            if record is None or not self._let_loose(record):
                continue
            if record.in_hbm is State.DIRTY:
                self.traffic.drain(record)
            loose.append(record)
            if record.in_hbm is State.DRAINING:
                pending.append(record)
        if pending and not wait:
            return False
        for record in pending:
            error = self.traffic.settle(record.block.id)
            if error is not None:
                raise error
        for record in loose:
            if record.in_hbm is State.VALID and (not pending or self._let_loose(record)):
                self.evict(record)
        return True

    def evict(self, record: Record, *, free: bool = True) -> None:
        """Takes a clean block out of HBM.

        Args:
            record: The block.
            free: Whether to free its place; otherwise that is the caller's to give away.
        """
        block_id = record.block.id
        self.unpoint(record)
        self.table.drop(block_id, free=free)
        self._queue.drop(block_id)
        self.moved.discard(block_id)
        self.traffic.leave(block_id)
        self._counters.evictions += 1

    def unpoint(self, record: Record) -> None:
        """Has a block's parameters point elsewhere, where nothing holds them to it."""
        slot = self.slots.current.get(record.block.id)
        if slot is not None and slot.pointed:
            holder = self.holders.get(record.block.id)
            if holder is not None:
                holder.unpoint()

    def forget(self, record: Record, *, gone: bool) -> None:
        """Has a block's data go, while what still looks at the bytes keeps its view of them.

        Args:
            record: The block, at rest and not leased.
            gone: Whether the block itself goes as well.
        """
        block_id = record.block.id
        self.unpoint(record)
        self.moved.discard(block_id)
        slot = self.slots.current.get(block_id)
        keep = slot is not None and slot.aliased and (gone or not record.fixed)
        if keep and slot is not None:
            self._orphans.append(slot)  # first: cut short, the bytes must stay all the same
        if gone:
            self.table.remove(block_id, keep=keep)
        else:
            self.table.discard(block_id, keep=keep)
        if gone or not record.fixed:
            self.traffic.leave(block_id, seen=keep)

    def _let_loose(self, record: Record) -> bool:
        """Unpoints a block; returns whether nothing else needs it where it is."""
        if record.leases or record.fixed or record.extent is None:
            return False
        slot = self.slots.current.get(record.block.id)
        if slot is None or slot.aliased:
            return False  # it stays, and parameters that point there may be used by who has aliases
        if slot.pointed:
            self.unpoint(record)
        return not slot.aliased

    def repair(self) -> None:
        """Makes table, slots and what is kept beside them agree after an exception anywhere.

        Every lease is left as it is.
        """
        self._compactor.finish()
        self.table.repair(slot.extent for slot in self._orphans if slot.aliased)
        left = self.table.orphans()
        self._orphans = [slot for slot in self._orphans if slot.extent in left]
        inside = [(r.block, r.extent) for r in self.table if r.extent is not None]
        self.slots.repair(inside)
        self._queue.schedule = None
        self.left = None
        self.unseen.clear()
        self.moved.clear()
        self._rounds.clear()
        self._attempts = 0
        self.division.reset()

    def reclaim_lost(self) -> None:
        """Frees what was kept because a transfer might write there; nothing is under way now."""
        seen = {slot.extent for slot in self._orphans}
        for extent in self.table.orphans():
            if extent not in seen:
                self.table.reclaim(extent)

    def reap(self) -> bool:
        """Frees what belongs to no block and that nothing looks at; returns whether it found any.

        That is what blocks that have gone left behind, and what was taken for a block that never
        got it because of a Ctrl-C in between.
        """
        gone = [slot for slot in self._orphans if not slot.aliased]
        for slot in gone:
            self._orphans.remove(slot)
            self.table.reclaim(slot.extent)
        if len(self.slots.current) != self.table.present:
            for block_id in list(self.slots.current):
                record = self.table.get(block_id)
                if record is None or record.extent is None:
                    self.traffic.leave(block_id, seen=True)
        strays = self.table.strays()
        for extent in strays:
            self.table.hbm.free(extent)
        return bool(gone or strays)
