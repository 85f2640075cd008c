"""Reads that begin before HBM has room: from a file into spare DRAM, and later to HBM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

from tiermem.core.block import Extent, align_up
from tiermem.core.residency import Record
from tiermem.core.schedule import Schedule
from tiermem.core.victims import NextUseQueue
from tiermem.errors import ClosedError
from tiermem.runtime.memory.homes import Homes
from tiermem.runtime.transfers.staged import Parked, Staged
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileMover, FileTransfer

_MOST_VICTIMS = 4


class ReadAhead:
    """Reads blocks from files before HBM has room for them.

    If a disk worked only while HBM has a free slot, it would be idle while the device computes, and
    between two passes. So the next blocks of the schedule are read into DRAM that no home
    needs, and copied to HBM as soon as there is room. They stay in DRAM until their place is needed
    for a block that is used sooner: a block that is used again before that is not read again. The
    residency table does not know about it: these bytes are a copy of a valid home, and may be
    dropped at any time.

    A plan may divide that DRAM (:meth:`share`): some blocks have places of their own there, so
    that they are read once, and others that stream are read directly into HBM. Without a plan
    the blocks that are used soonest have places.

    Attributes:
        staged: Staged copies by block.
        parked: The reads that have no place yet, at most one; by block.
        reading: Reads whose end has not been processed yet.
        begun: How many reads into DRAM have begun so far.
        nbytes: Bytes of DRAM that it has.
        unsettled: Whether a plan's places are still to be allocated.
    """

    def __init__(self, homes: Homes, wait: Callable[[FileTransfer], None]) -> None:
        """Takes places from ``homes``; every call is made under the manager's lock.

        Args:
            homes: Lends spare DRAM, and reclaims it.
            wait: Makes the host wait for a transfer.
        """
        self._homes = homes
        self._wait = wait
        self.staged: dict[int, Staged] = {}
        self.parked: dict[int, Parked] = {}
        self.reading: list[tuple[Record, FileTransfer]] = []
        self._queue = NextUseQueue()
        self._dying: list[Staged] = []
        self.begun = 0
        self.nbytes = 0
        self.unsettled = False
        self._patient = False
        self._cancelled: set[FileTransfer] = set()
        self._shared: tuple[Mapping[int, int], Set[int]] | None = None
        self._places: dict[int, Extent] = {}
        homes.reclaimers.append(self.drop_all)

    @property
    def kept(self) -> int:
        """Bytes of the places that blocks have of their own."""
        return sum(extent.nbytes for extent in self._places.values())

    def keeps(self, block_id: int) -> bool:
        """Whether a block has a place of its own."""
        return block_id in self._places

    # -- sharing ---------------------------------------------------------

    def share(
        self,
        kept: Mapping[int, int] | None,
        mover: FileMover | None = None,
        inside: Set[int] = frozenset(),
    ) -> None:
        """Sets how spare DRAM is used from now on; copies that do not fit that are dropped.

        What has already been read of the blocks that are kept is not read again: it stays where it
        is, unless it is in the way of the rest. What was read before the first plan and has
        not been copied to HBM yet is copied from where it is; after that the plan's places are
        allocated.

        Args:
            kept: Bytes of the blocks that have places of their own; None if the order of use
                alone decides.
            mover: Makes the reads in progress, some of which are no longer needed.
            inside: Blocks that stay in HBM. Existing copies of them stay as well,
                while there is room: another plan may need them.
        """
        wanted = None if kept is None else (kept, inside)
        if wanted == self._shared:
            return
        self._shared = wanted
        self._forget_places()
        self.unsettled = wanted is not None
        if wanted is not None:
            self._patient = not any(entry.risen for entry in self.staged.values())
            for block_id in list(self.staged):
                if block_id in wanted[0] or block_id in inside:
                    self._adopt(block_id)
                else:
                    self._let_go(block_id)
            self._hasten(mover)
            self.lay_out(mover)

    def _hasten(self, mover: FileMover | None) -> None:
        """Cancels reads that are no longer needed: urgent ones could delay them for ever."""
        for entry in self._dying:
            if mover is not None and entry.transfer is not None and not entry.transfer.finished:
                self._cancelled.add(entry.transfer)
                mover.cancel(entry.transfer)

    def _adopt(self, block_id: int) -> None:
        """Makes a block's present place its own."""
        self._places[block_id] = self.staged[block_id].extent

    def lay_out(self, mover: FileMover | None = None) -> bool:
        """Allocates the places of a plan, once the transfers of earlier ones have ended.

        All at once: if they were allocated one by one, as earlier places become free, there would
        be holes between them. If earlier copies that stay cause such holes, they are dropped as
        well: first those of blocks that stay in HBM, then all. Returns whether the places have been
        allocated.

        Args:
            mover: Makes the reads in progress.
        """
        self._drop_risen()
        if self._shared is None or self._is_clearing():
            return False
        if not self._take_places(self._shared[0]):
            for inside in (True, False):
                goes = self._adopted(inside=inside)
                if goes and not self._clear(goes, mover):
                    return False  # they are being read or copied, or not in HBM yet: later
                if goes and self._take_places(self._shared[0]):
                    break
        self.unsettled = False
        return True

    def begin_pass(self) -> None:
        """Notes that a pass begins: a copy that was not used for a whole pass no longer waits."""
        for block_id, entry in list(self.staged.items()):
            entry.passes += entry.leaves
            if entry.passes > 1:
                self.drop(block_id)

    def _is_clearing(self) -> bool:
        """Whether a copy without a place in the plan is still in transfer."""
        if any(entry.transfer is not None for entry in self._dying):
            return True
        return any(entry.leaves for entry in self.staged.values())

    def _adopted(self, *, inside: bool) -> list[int]:
        """Returns the blocks that keep their earlier places: those that stay in HBM, or all."""
        kept = self._shared[0] if self._shared is not None else {}
        return [b for b in self._places if b in self.staged and not (inside and b in kept)]

    def _let_go(self, block_id: int) -> None:
        """Drops a block, or has it dropped after its copy to HBM if it precedes any plan."""
        entry = self.staged[block_id]
        entry.leaves = True
        begun = entry.transfer is not None and entry.transfer.started_ns
        if entry.risen or not begun or not self._patient:
            self.drop(block_id)

    def _clear(self, block_ids: Sequence[int], mover: FileMover | None) -> bool:
        """Drops blocks, with their empty places; returns whether all are gone."""
        for block_id in block_ids:
            del self._places[block_id]
            self._let_go(block_id)
        used = {entry.extent for entry in (*self._dying, *self.staged.values())}
        for block_id, extent in list(self._places.items()):
            if extent not in used:
                del self._places[block_id]
                self._give_back(extent)
        self._hasten(mover)
        return not self._is_clearing()

    def _drop_risen(self) -> None:
        """Drops blocks without a place in the plan that have been copied to HBM."""
        for block_id, entry in list(self.staged.items()):
            if entry.leaves and entry.risen:
                self.drop(block_id)
        self._bury()

    def _take_places(self, kept: Mapping[int, int]) -> bool:
        """Allocates places for the blocks that have none; returns whether all have one."""
        for block_id in sorted(kept, key=lambda block: (-kept[block], block)):
            if block_id in self._places:
                continue
            extent = self._allocate(kept[block_id])
            if extent is not None:
                self._places[block_id] = extent
        return kept.keys() <= self._places.keys()

    def _forget_places(self) -> None:
        """Gives places up; those in use are freed when their transfers have ended."""
        used = {entry.extent for entry in (*self._dying, *self.staged.values())}
        extents = set(self._places.values()) - used
        self._places.clear()
        for extent in extents:
            self._give_back(extent)

    def _allocate(self, nbytes: int) -> Extent | None:
        found = self._homes.lend(nbytes)
        if found is not None:
            self.nbytes += found.nbytes
        return found

    def _give_back(self, extent: Extent) -> None:
        if extent not in self._places.values():
            self.nbytes -= extent.nbytes
            self._homes.dram.free(extent)

    # -- in --------------------------------------------------------------

    def begin(
        self, record: Record, mover: FileMover, schedule: Schedule, cursor: int, position: int
    ) -> bool:
        """Begins to read a block whose home is a file, if there is a place for it.

        Args:
            record: A block whose data are only at home.
            mover: Reads it.
            schedule: The order of the next uses.
            cursor: The position of the compute in it.
            position: The position of the use; only blocks that are used later are dropped for it.

        Returns:
            Whether the read has begun.
        """
        home = record.home_extent
        if home is None:
            return False
        block = record.block
        if self._queue.schedule is not schedule:
            self._queue.rebuild(schedule, cursor, self.staged)
        extent = self._place(block.id, align_up(block.nbytes), position)
        if extent is None:
            return False
        entry = self.staged[block.id] = Staged(extent, home, self._homes.version(home))
        self._queue.put(block.id, position)
        target = self._homes.arena.bytes_of(Extent(extent.offset, home.nbytes))
        try:
            entry.transfer = mover.read(home, target, label=block.name, in_place=True)
        except Exception:  # no read was begun
            del self.staged[block.id]
            self._queue.remove(block.id)
            self._give_back(extent)
            raise
        self.begun += 1
        self.reading.append((record, entry.transfer))
        return True

    def park(self, record: Record, mover: FileMover) -> None:
        """Begins to read a block into free staging chunks, until HBM has room for it.

        Otherwise the disk would be idle: between two reads directly into HBM there are the use of a
        block, which makes the room, and the latency of the disk.
        """
        home = record.home_extent
        if home is None:
            return
        for block_id in list(self.parked):
            self._unpark(block_id)
        version = self._homes.version(home)
        transfer = mover.park(home, label=record.block.name)
        self.parked[record.block.id] = Parked(transfer, mover, home, version)

    def parking(self, record: Record) -> FileTransfer | None:
        """Returns the read of a block that is about to have a place; see :meth:`has_place`."""
        entry = self.parked.get(record.block.id)
        if entry is None:
            return None
        if entry.taken or entry.transfer.finished or not self._is_at_home(entry, record):
            self._unpark(record.block.id)
            return None
        entry.taken = True
        return entry.transfer

    def has_place(self, block_id: int) -> None:
        """Hands over the read of a block that now has a place in HBM."""
        self.parked.pop(block_id, None)

    def _unpark(self, block_id: int) -> None:
        """Cancels the parked read of a block."""
        entry = self.parked.pop(block_id, None)
        if entry is not None:
            with suppress(ClosedError):  # closing ends it as well
                entry.mover.cancel(entry.transfer)

    def take_landed(self) -> list[tuple[Record, FileTransfer]]:
        """Returns the reads that have ended since the last call, and are still needed."""
        done = [entry for entry in self.reading if entry[1].finished]
        if done:
            self.reading = [entry for entry in self.reading if not entry[1].finished]
            if self._cancelled:
                given_up = self._cancelled.intersection(transfer for _, transfer in done)
                self._cancelled -= given_up
                done = [entry for entry in done if entry[1] not in given_up]
        return done

    def look(self, record: Record) -> Staged | None:
        """Returns the staged copy of a block, if it is usable.

        It is not when its read failed, or the home has been written since.
        """
        entry = self.staged.get(record.block.id)
        if entry is None:
            return None
        if self._is_good(entry, record):
            return entry
        self.drop(record.block.id)
        return None

    def _is_good(self, entry: Staged, record: Record) -> bool:
        transfer = entry.transfer
        if transfer is None or (transfer.finished and transfer.error is not None):
            return False
        return self._is_at_home(entry, record)

    def _is_at_home(self, entry: Staged | Parked, record: Record) -> bool:
        """Whether the home is the one that was read, and has not been written since."""
        if record.home_extent != entry.home:
            return False
        return self._homes.version(entry.home) == entry.version

    def at_rest(self, record: Record) -> Extent | None:
        """Returns where in DRAM a block's bytes are; None unless all of them are there."""
        entry = self.look(record)
        if entry is None or entry.transfer is None or not entry.transfer.finished:
            return None
        return Extent(entry.extent.offset, record.block.nbytes)

    def lose_track(self) -> None:
        """Notes that uses are not reported from now on: the last use is looked up if needed."""
        if self._queue.schedule is not None:
            self._queue = NextUseQueue()
            for block_id in self.staged:
                self._queue.put(block_id, 0)

    def copied(self, block_id: int, event: Event | None) -> None:
        """Notes that a copy to HBM was submitted; ``event`` marks its end."""
        entry = self.staged[block_id]
        entry.copied, entry.risen = event, True

    def used(self, block_id: int, cursor: int) -> None:
        """Notes that a block was used, so that its next use has changed."""
        if block_id in self.staged:
            self._queue.put(block_id, cursor)

    # -- out -------------------------------------------------------------

    def drop(self, block_id: int) -> None:
        """Forgets a block; its place is freed when no transfer uses it any more."""
        if self.parked:
            self._unpark(block_id)
        entry = self.staged.pop(block_id, None)
        if entry is not None:
            self._queue.remove(block_id)
            self._dying.append(entry)
            self._bury()

    def drop_all(self) -> bool:
        """Frees its DRAM; returns whether there was any.

        Transfers in progress are waited for only if nothing else can be freed.
        """
        before = self.nbytes
        for block_id in list(self.staged):
            self.drop(block_id)
        if self._shared is not None:
            self._shared = ({}, frozenset())  # until the next plan, for what remains
            self._forget_places()
        if before and self.nbytes == before:
            for entry in self._dying:
                if entry.transfer is not None:
                    self._wait(entry.transfer)
                    if entry.copied is not None:
                        entry.copied.synchronize()
            self._bury()
        return self.nbytes < before

    def reset(self) -> None:
        """Forgets everything, after an exception anywhere; no read is in progress.

        The caller frees the places. They held copies, which can be read again.
        """
        for entries in (self.staged, self._places, self._cancelled):
            entries.clear()
        self.parked.clear()
        self.reading = []
        self._dying = []
        self._queue = NextUseQueue()
        self._shared = None
        self.unsettled = False
        self.nbytes = 0

    def cancel(self) -> None:
        """Cancels the reads that have no place, which would otherwise never end."""
        for block_id in list(self.parked):
            self._unpark(block_id)

    def settle(self) -> None:
        """Waits for every read in progress."""
        for _, transfer in self.reading:
            self._wait(transfer)
        for entry in self.parked.values():
            entry.mover.rest(entry.transfer)
        self._bury()

    def _place(self, block_id: int, nbytes: int, position: int) -> Extent | None:
        """Returns a place for a block's use at ``position``; never waits."""
        self._bury()
        if self._shared is None:
            return self._place_by_use(nbytes, position)
        own = self._places.get(block_id)
        return own if all(entry.extent != own for entry in self._dying) else None

    def _place_by_use(self, nbytes: int, position: int) -> Extent | None:
        found = self._allocate(nbytes)
        if found is None:
            for block_id in self._queue.last(_MOST_VICTIMS, position, self._may_go):
                self.drop(block_id)
                found = self._allocate(nbytes)
                if found is not None:
                    break
        return found

    def _may_go(self, block_id: int) -> bool:
        entry = self.staged.get(block_id)
        return entry is not None and entry.idle

    def _bury(self) -> None:
        """Frees the places of dropped entries whose transfers have ended."""
        for entry in [entry for entry in self._dying if entry.idle]:
            self._dying.remove(entry)
            self._give_back(entry.extent)
