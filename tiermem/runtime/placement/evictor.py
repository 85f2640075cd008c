"""Allocates HBM for blocks, and evicts others for them."""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from tiermem.core.allocator import Window
from tiermem.core.block import ALIGNMENT, Block, Extent, align_up
from tiermem.core.residency import Record, ResidencyTable, State
from tiermem.core.schedule import Planner
from tiermem.errors import CapacityError, StorageError
from tiermem.runtime.memory.slots import Holder, SlotCache
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.placement.compaction import Compactor
from tiermem.runtime.placement.leaving import (
    FAILING,
    RESIDENT,
    WANTED,
    LeaveRules,
    LeavingOrder,
    Why,
)
from tiermem.runtime.placement.no_room import too_small
from tiermem.runtime.placement.regions import Regions
from tiermem.runtime.placement.ring import Ring
from tiermem.runtime.placement.settling import Settling
from tiermem.runtime.transfers.transfers import Transfers

_CANDIDATES = 4


class Room(NamedTuple):
    """A place in HBM for a block.

    Attributes:
        extent: The place.
        left: The block evicted for it, if its place was handed over without being freed.
    """

    extent: Extent
    left: Record | None = None


class Left(Protocol):
    """Bytes of HBM of a block that has left, of which there may be aliases."""

    @property
    def extent(self) -> Extent:
        """Their place."""
        ...

    @property
    def aliased(self) -> bool:
        """Whether there are aliases of them."""
        ...


class Evictor:
    """Allocates HBM, evicting the blocks that are needed last.

    A block that is leased, fixed, in transfer or aliased stays.

    Attributes:
        regions: The regions of HBM in which blocks stay and through which others stream.
        rules: Decide which blocks may leave.
        order: The blocks in HBM by their next use.
        ring: Allocates HBM in a ring, for loops that write the blocks they stream.
        largest_later: Bytes of the largest block that may be needed while others are in use.
        places: Counts successful allocations; at least as often, room was needed.
        more: Makes HBM larger by so many bytes, and returns whether it could.
    """

    def __init__(
        self,
        table: ResidencyTable,
        slots: SlotCache,
        transfers: Transfers,
        planner: Planner,
        holders: dict[int, Holder],
        counters: Counters,
    ) -> None:
        """Works on ``table``, under its lock."""
        self.table = table
        self.slots = slots
        self.transfers = transfers
        self.regions = Regions(table)
        self.rules = LeaveRules(slots, self.regions, transfers.failing, holders)
        self.order = LeavingOrder(table, planner, self.regions, self.rules)
        self.ring = Ring(table, planner, self.regions, self.order)
        self.largest_later = 0
        self.places = 0
        self._settling = Settling(table, self.regions)
        self._compactor = Compactor(table, slots, transfers, self.rules, self.regions, counters)
        self.more: Callable[[int], bool] = lambda nbytes: False
        self._counters = counters
        self._orphans: list[Left] = []

    # -- residents -------------------------------------------------------

    @property
    def residents(self) -> frozenset[int]:
        """Blocks that should stay during the present loop."""
        return self.regions.residents

    @property
    def _streams(self) -> bool:
        """Whether blocks stream beside those that stay, through slots or in a ring."""
        return self.regions.slot > 0 or self.ring.uses > 0

    def keep(self, residents: frozenset[int], slot: int) -> None:
        """Makes blocks residents, and divides HBM accordingly; see :meth:`Regions.keep`."""
        if self.regions.keep(residents, slot):
            self._settling.try_again()

    def rearrange(self, loop: object) -> None:
        """Evicts blocks that are in the wrong region, after a round of the loop.

        They are fetched into the right one when they are used.

        Args:
            loop: The current loop; nothing moves before its second round.
        """
        misplaced, loose = self._settling.misplaced(loop, streams=self._streams)
        for record in misplaced:  # dirty ones are written first, and leave in a later round
            if record.in_hbm is State.VALID and self.rules.let_loose(record):
                self.evict(record)
        if loose:  # a copy within the device costs far less than a fetch
            self.pack()

    def pack(self) -> None:
        """Slides the blocks that stay together, so that the others fit beside them."""
        self.transfers.settle_all()
        self._compactor.pack(self.regions.border)

    def expect(self, nbytes: int) -> None:
        """Notes that a block of ``nbytes`` bytes may be needed while others are in use."""
        self.largest_later = max(self.largest_later, nbytes)

    # -- in --------------------------------------------------------------

    def place(self, block: Block, position: int | None) -> Room | None:
        """Makes room for a block.

        Args:
            block: The block.
            position: Uses until it is needed, for a prefetch, which must not wait and must not
                evict what is needed sooner; None if it is needed now.

        Raises:
            CapacityError: If it is needed now and there is no room.
            StorageError: If a block to be evicted cannot be written.
        """
        self.places += 1
        self.order.left.clear()
        size, regions = -(-block.nbytes // ALIGNMENT) * ALIGNMENT, self.regions
        stays = block.id in regions.residents
        if self.ring.uses and not stays:
            extent = self._next_in_ring(size, position)
            if extent is not None:
                return Room(extent)
        parts = regions.parts_for(block) if stays else regions.parts
        last: list[Record] = []
        if not self._orphans and not self.table.hbm.has_gap(size):
            last = self.order.last(1, position)
            room = self._hand_over(last[0], size, parts) if last else None
            if room is not None:
                return room
        extent = self._search(block, size, position, parts, last)
        if extent is None:
            self.places -= 1  # no room was found
            return None
        return Room(extent)

    def place_in_ring(self, block: Block, position: int) -> Extent | None:
        """Makes room for a block at the ring's position, if nothing there is needed soon.

        Args:
            block: The block.
            position: Uses until it is needed.
        """
        self.order.left.clear()
        size = align_up(block.nbytes)
        return self._next_in_ring(size, position) if self.ring.uses else None

    def place_for_good(self, block: Block) -> Extent | None:
        """Makes room for a permanent block, at the lowest address where all blocks can leave.

        So permanent blocks are side by side: a hole between them would be too small for a slot.

        Args:
            block: The block, which will never leave.

        Returns:
            Its place; None if there is none, so that any other place has to do.
        """
        hbm, size = self.table.hbm, align_up(block.nbytes)
        start, victims = 0, list[int]()
        for extent in hbm.extents():
            if extent.offset >= start + size:
                break
            record = self.table.at(extent.offset)
            if record is not None and self.rules.may_leave(record, Why.NEEDED):
                victims.append(extent.offset)
            else:
                start, victims = extent.end, []
        if start + size > hbm.capacity:
            return None
        try:
            self.clear(victims, wait=True)
        except (CapacityError, StorageError):
            return None  # it stays until it can be written
        return hbm.take_at(start, size)

    def _next_in_ring(self, nbytes: int, position: int | None) -> Extent | None:
        """Makes room at the ring's position, if nothing there is needed soon."""
        found = self.ring.next_run(nbytes, position)
        if found is None or (found[1] and not self.clear(found[1], wait=position is None)):
            return None
        extent = self.table.hbm.take_at(found[0], nbytes)
        if extent is not None:
            self.ring.at = extent.offset + nbytes
        return extent

    def _search(
        self,
        block: Block,
        size: int,
        position: int | None,
        parts: list[tuple[int, int]],
        last: list[Record],
    ) -> Extent | None:
        """Finds a free place, or creates one; see :meth:`place`.

        Every iteration either returns, raises, evicts a block, ends a transfer, or finds a block
        that is in use or has no home to be written to.

        Args:
            block: The block.
            size: Its size in bytes.
            position: As for :meth:`place`.
            parts: The runs of HBM for such blocks.
            last: The block that is needed last, if that is known.
        """
        hbm, resorts = self.table.hbm, 0
        while True:
            extent = hbm.allocate_in(size, parts)
            if extent is not None:
                return extent
            if self.reap():
                continue
            window, last = self._window(size, position, parts, last), []
            anywhere = position is None or block.id in self.residents
            # if nothing streams, it may be anywhere
            dearest = FAILING if self._streams else RESIDENT
            dear = window is None or window.cost >= dearest
            if dear and anywhere and parts != [(0, hbm.capacity)]:
                parts = [(0, hbm.capacity)]  # better there than in the place of another resident
                continue
            if window is not None:
                used, failing = hbm.used, len(self.transfers.failing)
                if not self.clear(window.victims, wait=position is None):
                    return None
                if hbm.used < used or len(self.transfers.failing) > failing:
                    continue
            if position is not None:
                return None
            if not self.transfers.flights and self.more(block.nbytes):
                parts = [(0, hbm.capacity)]
                continue
            resorts = self._last_resort(block, resorts)

    def _hand_over(
        self, record: Record, size: int, parts: Sequence[tuple[int, int]]
    ) -> Room | None:
        """Evicts the block that is needed last, if that yields exactly the place that is wanted.

        This is the case in a loop that streams through slots of one size. The result is that of the
        search for a window, without searching, and the place is handed over without being freed.

        Args:
            record: The block, which may leave.
            size: Bytes of the place.
            parts: The runs of HBM that it may be in.
        """
        extent = record.extent
        if extent is None or extent.nbytes != size or record.in_hbm is not State.VALID:
            return None
        low, high = self._part_of(extent.offset, parts)
        if extent.offset < low or extent.offset + size > high:
            return None
        if not self.rules.let_loose(record, wanted=False):
            return None
        self.evict(record, free=False)
        return Room(extent, record)

    def _window(
        self,
        size: int,
        position: int | None,
        parts: Sequence[tuple[int, int]],
        known: list[Record],
    ) -> Window | None:
        """Finds what to evict: around the blocks that are needed last, otherwise anywhere.

        Args:
            size: Bytes that are needed.
            position: As for :meth:`place`.
            parts: The runs of HBM to search.
            known: The block that is needed last, if that is known.
        """
        hbm, order = self.table.hbm, self.order
        price = partial(order.price, position=position)
        best: Window | None = None
        tried: list[Record] = []
        last: list[Record] = []
        for most in (1, _CANDIDATES):  # usually the first one is enough
            last = known if known and most == 1 else order.last(most, position)
            for record in last:
                extent = record.extent
                if extent is None or record in tried:
                    continue
                tried.append(record)
                part = self._part_of(extent.offset, parts)
                window = hbm.window_around(extent.offset, size, price, *part)
                if window is not None and (best is None or window.cost < best.cost):
                    best = window
                alone = best is not None and best.cost < WANTED and len(best.victims) == 1
                if best is not None and alone and not self._dirty(best.victims[0]):
                    return best  # one clean block, needed last: hardly anything is cheaper
        if best is not None and best.cost >= WANTED:
            best = None  # others may do, further from what is needed last
        if best is None and (position is None or last):
            found = (hbm.cheapest_window(size, price, *part) for part in parts)
            windows = [window for window in found if window is not None]
            best = min(windows, key=lambda window: window.cost, default=None)
        return best

    def _part_of(self, offset: int, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Returns the bounds of the run of HBM that contains an offset, or precedes it."""
        return parts[max(0, bisect_right(parts, (offset, self.table.hbm.capacity)) - 1)]

    def _dirty(self, offset: int) -> bool:
        record = self.table.at(offset)
        return record is not None and record.in_hbm is State.DIRTY

    def _last_resort(self, block: Block, tried: int) -> int:
        """Makes room if no block can leave: waits, joins gaps, collects cycles that hold views.

        Args:
            block: The block that needs room now.
            tried: How many of these resorts have been tried for it.

        Returns:
            How many have been tried after this call.

        Raises:
            CapacityError: If there is none left.
        """
        if self.transfers.flights:
            self.transfers.settle(next(iter(self.transfers.flights)))
            return tried
        if tried == 3:
            raise too_small(block, self.table, self.slots)
        if tried == 1:
            if self._orphans or any(map(self._is_viewed, self.table)):
                gc.collect()  # takes seconds in a large process
        else:
            self._gather(block.nbytes)
        return tried + 1

    def _gather(self, nbytes: int, keep: Record | None = None) -> None:
        """Makes one gap of ``nbytes`` by evicting and moving blocks, except ``keep``."""
        stretch = self._compactor.best_stretch(nbytes, keep)
        if stretch is None and keep is None:  # it is needed: failed write-backs are retried
            stretch = self._compactor.best_stretch(nbytes, failing=True)
        if stretch is not None:
            self.clear(stretch.leaving, wait=True)
            self._compactor.join(stretch)

    def _is_viewed(self, record: Record) -> bool:
        """Whether only a view of the user's keeps a block where it is."""
        return not (record.leases or record.fixed) and self.rules.is_held(record)

    def tidy(self, record: Record, later: int) -> None:
        """Moves a block out of the middle before it is leased, if it would be in the way.

        A block in use often cannot be moved. So it has to be where the blocks that are needed
        at the same time still find a place.

        Args:
            record: A block in HBM that has no lease.
            later: Bytes of the largest block that may be needed while it is in use.
        """
        extent = record.extent
        if extent is None or extent.offset >= later or record.leases or record.fixed:
            return
        before, behind = extent.offset, self.table.hbm.capacity - extent.end
        if behind < later and max(before, behind) < min(later, before + behind):
            self.transfers.settle_all()
            if record.usable and self.rules.movable(record):
                self._gather(min(later, before + behind), keep=record)

    # -- out -------------------------------------------------------------

    def clear(self, victims: Sequence[int], *, wait: bool) -> bool:
        """Evicts the blocks at these offsets; returns whether all that was possible has been done.

        If a modified block of a checkpoint finds no room for a new home, this stops the
        first time: the block counts as failing, so that others are evicted before it from then on.

        Args:
            victims: Offsets.
            wait: Whether to wait for write-backs; otherwise they are only begun.

        Raises:
            CapacityError: If a failing block is waited for that has no room for a home.
            StorageError: If a block is waited for that cannot be written.
        """
        loose, pending = [], []
        for offset in victims:
            record = self.table.at(offset)
            if record is None or not self.rules.let_loose(record):
                continue
            if record.in_hbm is State.DIRTY:
                failing, block_id = self.transfers.failing, record.block.id
                try:
                    self.transfers.drain(record)
                except CapacityError:
                    if wait and block_id in failing:
                        raise
                    failing.add(block_id)
                    return wait
            loose.append(record)
            if record.in_hbm is State.DRAINING:
                pending.append(record)
        if pending and not wait:
            return False
        for record in pending:
            error = self.transfers.settle(record.block.id)
            if error is not None:
                raise error
        for record in loose:
            if record.in_hbm is State.VALID and (not pending or self.rules.let_loose(record)):
                self.evict(record)
        return True

    def evict(self, record: Record, *, free: bool = True) -> None:
        """Evicts a clean block.

        Args:
            record: The block.
            free: Whether to free its place; otherwise the caller hands it over.
        """
        block_id = record.block.id
        slot = self.slots.current.get(block_id)
        if slot is not None and slot.pointed:
            self.rules.unpoint(record)
        extent = self.table.drop(block_id, free=free)
        self.order.left.append((record, extent.offset))
        self.order.note_change(block_id)
        self.transfers.leave(block_id)
        self._counters.evictions += 1

    def forget(self, record: Record, *, gone: bool) -> None:
        """Discards a block's data; aliases of the bytes keep them as they are.

        Args:
            record: The block; it is not in transfer and not leased.
            gone: Whether the block itself is removed, too.
        """
        block_id = record.block.id
        self.rules.unpoint(record)
        self.order.note_change(block_id)
        slot = self.slots.current.get(block_id)
        seen = slot is not None and slot.aliased and (gone or not record.fixed)
        keep = seen and record.annexed is None  # an annexed block has no place in HBM
        if keep and slot is not None:
            self._orphans.append(slot)  # first: if interrupted, the bytes must stay as well
        if gone:
            if record.fixed:
                self.regions.divide_anew()
            self.table.remove(block_id, keep=keep)
        else:
            self.table.discard(block_id, keep=keep)
        if gone or not record.fixed:
            self.transfers.leave(block_id, seen=seen)

    def leave_behind(self, extent: Extent, parts: Sequence[Left]) -> None:
        """Frees the place of a block that has left while it had aliases, except for parts of it.

        Args:
            extent: The place.
            parts: Parts that stay as long as they have aliases.
        """
        self._orphans.extend(parts)  # first: if interrupted, the bytes must stay as well
        self._orphans = [left for left in self._orphans if left.extent != extent]
        self.table.reclaim(extent)
        for part in parts:
            self.table.adopt(part.extent)

    def repair(self) -> None:
        """Makes table, slots and orphaned places consistent after an exception anywhere.

        Leases are not changed.
        """
        self._compactor.finish()
        self.table.repair(slot.extent for slot in self._orphans if slot.aliased)
        left = self.table.orphans()
        self._orphans = [slot for slot in self._orphans if slot.extent in left]
        inside = [(r.block, r.extent) for r in self.table if r.extent is not None]
        self.slots.repair(inside)
        self.order.repair()
        self.rules.unseen.clear()
        self._settling.repair()
        self.regions.reset()

    def reclaim_lost(self) -> None:
        """Frees places that were kept as a transfer might write there; none is in progress."""
        seen = {slot.extent for slot in self._orphans}
        for extent in self.table.orphans():
            if extent not in seen:
                self.table.reclaim(extent)

    def reap(self) -> bool:
        """Frees places without block and without aliases; returns whether there were any.

        They belonged to blocks that are gone, or were allocated for a block that did not get them
        because of a Ctrl-C in between.
        """
        gone = [slot for slot in self._orphans if not slot.aliased]
        for slot in gone:
            self._orphans.remove(slot)
            self.table.reclaim(slot.extent)
        if len(self.slots.current) != self.table.present:
            for block_id in list(self.slots.current):
                record = self.table.get(block_id)
                if record is None or record.extent is None:
                    self.transfers.leave(block_id, seen=True)
        strays = self.table.strays()
        for extent in strays:
            self.table.hbm.free(extent)
        return bool(gone or strays)
