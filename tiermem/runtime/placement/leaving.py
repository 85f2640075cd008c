"""Which blocks may leave HBM, in which order, and which may be moved: all of these rules."""

from __future__ import annotations

import enum
from collections.abc import Callable

from tiermem.core.cost import eviction_cost
from tiermem.core.residency import Record, ResidencyTable, State
from tiermem.core.schedule import Planner
from tiermem.core.victims import NextUseQueue
from tiermem.runtime.memory.slots import Holder, Slot, SlotCache, use_count
from tiermem.runtime.placement.regions import Regions


class Why(enum.Enum):
    """The reason why a block would leave HBM.

    Attributes:
        NEEDED: Its place is needed for a block that compute waits for.
        AHEAD: Its place is needed for a prefetch.
        WRITTEN: It is only written home early, so that its place can be used at once later.
    """

    NEEDED = "needed"
    AHEAD = "ahead"
    WRITTEN = "written"


_VALID, _DIRTY = State.VALID, State.DIRTY
_NEEDED, _AHEAD, _WRITTEN = Why.NEEDED, Why.AHEAD, Why.WRITTEN
RESIDENT = 1e12
"""Price of a block that should stay during the present loop: each round would fetch it again."""
WANTED = 1e15
"""Price of a block to which a parameter without lease points: usually it is used next."""
FAILING = 1e18
"""Price of a block that could not be written home: an error, unless it now can be written."""


class LeaveRules:
    """Decides whether blocks may leave or be moved; under the manager's lock.

    Attributes:
        unseen: Leases that are being taken, whose slots no caller has yet, by block.
    """

    def __init__(
        self,
        slots: SlotCache,
        regions: Regions,
        failing: set[int],
        holders: dict[int, Holder],
    ) -> None:
        """Reads state that other parts keep up to date.

        Args:
            slots: Slots of the blocks in HBM.
            regions: Knows which blocks stay in HBM.
            failing: Blocks whose last write-back failed.
            holders: The holders that point parameters at blocks, by block.
        """
        self.unseen: dict[int, int] = {}
        self._current = slots.current
        self._regions = regions
        self._failing = failing
        self._holders = holders

    def may_leave(self, record: Record, why: Why) -> bool:
        """Whether a block in HBM may leave, as far as the block itself is concerned.

        The caller takes its next use into account. Parameters that point at it without a lease
        are no reason to stay: :meth:`let_loose` points them elsewhere.

        Args:
            record: The block.
            why: The reason. A block that is leased, fixed, in transfer or aliased always stays;
                one that is wanted (:attr:`Slot.wanted`), cannot be written home, or is a resident
                leaves only for a block that is needed now.
        """
        state = record.in_hbm
        if record.leases or record.fixed or (state is not _VALID and state is not _DIRTY):
            return False
        block_id = record.block.id
        slot = self._current.get(block_id)
        if slot is None or (  # Slot.aliased, in line: asked at every streamed use
            use_count(slot.storage) > slot.baseline + slot.pointed
            or use_count(slot.reading) > slot.sight.reading_baseline + len(slot.sight.read)
            or (slot.saved and slot.is_saved())
        ):
            return False
        if slot.viewed:
            self._settle_views(block_id)  # it may have to be written home first
        if why is _NEEDED:
            return True
        if (slot.pointed and not slot.idle) or block_id in self._failing:
            return False
        if block_id not in self._regions.residents:
            return True
        return why is _WRITTEN and not self._regions.stays(record)

    def is_wanted(self, record: Record) -> bool:
        """Whether a parameter that holds no lease expects a block in HBM to stay there."""
        return self._current[record.block.id].wanted

    def is_failing(self, block_id: int) -> bool:
        """Whether the last attempt to write a block home failed."""
        return block_id in self._failing

    def is_held(self, record: Record) -> bool:
        """Whether something uses the copy in HBM: a lease, or a view that is not a parameter."""
        slot = self._current.get(record.block.id)
        return slot is not None and (record.leases > 0 or slot.aliased)

    def let_loose(self, record: Record, *, wanted: bool = True) -> bool:
        """Points unused parameters elsewhere; returns whether the block then has no aliases.

        Called again just before a block leaves: a parameter's reference may hide another alias.

        Args:
            record: The block.
            wanted: Whether a block that is wanted (:attr:`Slot.wanted`) is included.
        """
        if record.leases or record.fixed or record.extent is None:
            return False
        slot = self._current.get(record.block.id)
        if slot is None or slot.aliased:
            return False  # it stays, and the aliases may be used through its parameters
        if not slot.pointed:
            return True
        if not wanted and not slot.idle:
            return False
        self.unpoint(record)
        return not _is_aliased(slot)

    def _settle_views(self, block_id: int) -> None:
        holder = self._holders.get(block_id)
        if holder is not None:
            holder.settle_views()

    def unpoint(self, record: Record) -> None:
        """Points a block's parameters elsewhere, if no lease holds them there."""
        slot = self._current.get(record.block.id)
        if slot is not None and slot.pointed:
            holder = self._holders.get(record.block.id)
            if holder is not None:
                holder.unpoint()

    def repoint(self, record: Record, old: Slot, new: Slot) -> None:
        """Points a block's parameters at its new place, if they pointed at the old one."""
        holder = self._holders.get(record.block.id)
        if holder is not None and (old.pointed or holder.leases()):
            holder.repoint(new)
        old.pointed = 0

    def is_leased_by_holder(self, record: Record) -> bool:
        """Whether a lease of the block is its parameters' own."""
        holder = self._holders.get(record.block.id)
        return holder is not None and holder.leases() > 0

    def movable(self, record: Record) -> bool:
        """Whether a block's address is seen only by parameters that can be pointed anew."""
        slot = self._current.get(record.block.id)
        if slot is None or record.still or not record.usable or slot.aliased:
            return False
        if slot.viewed:
            self._settle_views(record.block.id)  # the next place knows nothing of views of this one
        holder = self._holders.get(record.block.id)
        if holder is not None and holder.read_elsewhere():
            return False
        known = holder.leases() if holder is not None else 0
        return record.leases == known + self.unseen.get(record.block.id, 0)


def _is_aliased(slot: Slot) -> bool:
    """Like :attr:`Slot.aliased` without parameters, which already point elsewhere."""
    readers = slot.sight.reading_baseline + len(slot.sight.read)
    writers = slot.baseline + slot.pointed
    return use_count(slot.storage) > writers or use_count(slot.reading) > readers


class LeavingOrder:
    """Determines which blocks leave first, by their next use, and at what price.

    It keeps a queue by next use that follows the planner, without checking every block.

    Attributes:
        left: The blocks evicted for the last request, and their offsets.
        note_change: Notes that a block was used, or has come into HBM or left it, so that its next
            use has changed.
    """

    def __init__(
        self, table: ResidencyTable, planner: Planner, regions: Regions, rules: LeaveRules
    ) -> None:
        """Starts without a queue.

        Args:
            table: The blocks in HBM.
            planner: Knows the next uses.
            regions: Knows which blocks stay in HBM; these are not in the queue.
            rules: Decide which blocks may leave.
        """
        self._table = table
        self._planner = planner
        self._regions = regions
        self._rules = rules
        self._queue = NextUseQueue()
        self._reached = 0
        self._stale: set[int] = set()
        self.left: list[tuple[Record, int]] = []
        self.note_change: Callable[[int], None] = self._stale.add

    def lose_track(self) -> None:
        """Notes that blocks will change without notice: the next query rebuilds the queue."""
        self._queue.schedule = None

    def repair(self) -> None:
        """Forgets everything, after an exception anywhere."""
        self._stale.clear()
        self.lose_track()

    def last(self, most: int, position: int | None) -> list[Record]:
        """Returns up to ``most`` blocks that may leave, the one that is used last first.

        Args:
            most: How many to look for.
            position: Uses until their place is needed, before which none of them is used; None
                if it is needed now.
        """
        self._catch_up()
        get, may_leave = self._table.get, self._rules.may_leave
        why = _NEEDED if position is None else _AHEAD
        beyond = -1 if position is None else self._planner.cursor + position
        found: list[Record] = []

        def accept(block_id: int) -> bool:
            record = get(block_id)
            if record is None or record.extent is None:
                self._queue.remove(block_id)
                return False
            if not may_leave(record, why):
                return False
            found.append(record)
            return True

        self._queue.last(most, beyond, accept)
        return found

    def price(self, offset: int, position: int | None) -> float | None:
        """What evicting the block at ``offset`` costs; None if it has to stay.

        Args:
            offset: Where the block begins.
            position: As for :meth:`last`.
        """
        record = self._table.at(offset)
        why = _NEEDED if position is None else _AHEAD
        if record is None or not self._rules.may_leave(record, why):
            return None
        block = record.block
        distance = self._planner.distance(block.id)
        if position is not None and distance <= position:
            return None
        price = eviction_cost(block.nbytes, distance, dirty=record.in_hbm is _DIRTY)
        if position is None:
            price += (block.id in self._regions.residents) * RESIDENT
            price += self._rules.is_wanted(record) * WANTED
            price += self._rules.is_failing(block.id) * FAILING
        return price

    def unused_until(self, offset: int, position: int) -> bool:
        """Whether the block at an offset may leave and is not used soon.

        Args:
            offset: Where it begins.
            position: Position in the schedule up to which it is not used.
        """
        record = self._table.at(offset)
        if record is None or not self._rules.may_leave(record, _AHEAD):
            return False
        planner = self._planner
        return planner.schedule.next_use(record.block.id, planner.cursor) > position

    def _catch_up(self) -> None:
        """Orders the blocks in HBM by the current schedule."""
        queue, planner, residents = self._queue, self._planner, self._regions.residents
        if queue.schedule is planner.schedule and planner.cursor >= self._reached:
            get = self._table.get
            for block_id in self._stale:
                record = get(block_id)
                if record is None or record.extent is None:
                    queue.remove(block_id)
                elif block_id not in residents:
                    queue.put(block_id, planner.cursor)
        else:
            inside = (self._table.at(extent.offset) for extent in self._table.hbm.extents())
            loose = (r.block.id for r in inside if r is not None and not r.fixed)
            queue.rebuild(
                planner.schedule, planner.cursor, [b for b in loose if b not in residents]
            )
        self._stale.clear()
        self._reached = planner.cursor
