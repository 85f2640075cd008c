"""Reads that begin before HBM has room: from a file into spare DRAM, and up from there later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiermem.core.block import Extent, align_up
from tiermem.core.residency import Record
from tiermem.core.schedule import Schedule
from tiermem.core.victims import NextUseQueue
from tiermem.runtime.homes import Homes
from tiermem.transfer.copy import Event
from tiermem.transfer.filemover import FileMover, FileTransfer

_MOST_VICTIMS = 4


@dataclass(slots=True, eq=False)
class Staged:
    """A block's bytes in DRAM, or on their way there.

    Attributes:
        extent: Where in DRAM.
        home: Where in the files.
        version: Of the bytes there when the read was asked for.
        transfer: The read; None where a Ctrl-C came while it was asked for, so that its bytes
            may still be written to and are not used again.
        copied: Event of the last copy up.
    """

    extent: Extent
    home: Extent
    version: int
    transfer: FileTransfer | None = None
    copied: Event | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing writes or reads these bytes any more."""
        there = self.transfer is not None and self.transfer.finished
        return there and (self.copied is None or self.copied.done())


class ReadAhead:
    """What the disk has read, or is reading, for blocks that HBM has no room for yet.

    A disk that works only while HBM has a free slot stands still while the device computes, and
    between two passes. So what comes next by the schedule is read into DRAM that nobody else
    needs, and goes up as soon as there is room. It stays there until its place is wanted for
    something that is used sooner: a block that comes back before that is not read again. The
    residency table knows nothing of it: these bytes are a copy of a home that is valid, to be
    lost at any time.

    Attributes:
        staged: By block.
        reading: Reads whose end nobody has taken up yet.
    """

    def __init__(self, homes: Homes, wait: Callable[[FileTransfer], None]) -> None:
        """Takes places from ``homes``, under whose owner's lock every call is made.

        Args:
            homes: Where spare DRAM is, and who asks for it back.
            wait: Makes the host wait for a transfer.
        """
        self._homes = homes
        self._wait = wait
        self.staged: dict[int, Staged] = {}
        self.reading: list[tuple[Record, FileTransfer]] = []
        self._queue = NextUseQueue()
        self._dying: list[Staged] = []
        homes.reclaimers.append(self.drop_all)

    # -- in --------------------------------------------------------------

    def begin(
        self, record: Record, mover: FileMover, schedule: Schedule, cursor: int, position: int
    ) -> bool:
        """Begins to read a block whose home is a file, if there is a place for it.

        Args:
            record: A block whose data are at home only.
            mover: Reads it.
            schedule: What comes next.
            cursor: Where in it the compute is.
            position: Of the use that it is for; only what is used later makes way.

        Returns:
            Whether the read has begun.
        """
        home, swap = record.home_extent, self._homes.swap
        if home is None or swap is None:
            return False
        block = record.block
        if self._queue.schedule is not schedule:
            self._queue.rebuild(schedule, cursor, self.staged)
        extent = self._place(align_up(block.nbytes), position)
        if extent is None:
            return False
        entry = self.staged[block.id] = Staged(extent, home, swap.version(home))
        self._queue.put(block.id, position)
        target = self._homes.arena.bytes_of(Extent(extent.offset, home.nbytes))
        try:
            entry.transfer = mover.read(home, target, label=block.name, in_place=True)
        except Exception:  # nothing was begun
            del self.staged[block.id]
            self._queue.drop(block.id)
            self._homes.dram.free(extent)
            raise
        self.reading.append((record, entry.transfer))
        return True

    def landed(self) -> list[tuple[Record, FileTransfer]]:
        """Returns the reads that have ended since the last call."""
        done = [entry for entry in self.reading if entry[1].finished]
        if done:
            self.reading = [entry for entry in self.reading if not entry[1].finished]
        return done

    def look(self, record: Record) -> Staged | None:
        """Returns what there is of a block, unless it is of no use any more.

        It is of none when its read failed, or its home has been written since.
        """
        entry = self.staged.get(record.block.id)
        if entry is None:
            return None
        if self._is_good(entry, record):
            return entry
        self.drop(record.block.id)
        return None

    def _is_good(self, entry: Staged, record: Record) -> bool:
        swap, transfer = self._homes.swap, entry.transfer
        if swap is None or transfer is None or (transfer.finished and transfer.error is not None):
            return False
        return record.home_extent == entry.home and swap.version(entry.home) == entry.version

    def copied(self, block_id: int, event: Event | None) -> None:
        """Says that a copy up has been submitted, which is over when ``event`` has passed."""
        self.staged[block_id].copied = event

    def used(self, block_id: int, cursor: int) -> None:
        """Says that a block was used, so that its next use is another."""
        if block_id in self.staged:
            self._queue.put(block_id, cursor)

    # -- out -------------------------------------------------------------

    def drop(self, block_id: int) -> None:
        """Forgets a block; its place is free when nothing reads or writes it any more."""
        entry = self.staged.pop(block_id, None)
        if entry is not None:
            self._queue.drop(block_id)
            self._dying.append(entry)
            self._bury()

    def drop_all(self) -> bool:
        """Gives up the DRAM that it has; returns whether that was any.

        What is under way is waited for only where there is nothing else to give up.
        """
        before = len(self.staged) + len(self._dying)
        for block_id in list(self.staged):
            self.drop(block_id)
        if before and len(self._dying) == before:
            for entry in self._dying:
                if entry.transfer is not None:
                    self._wait(entry.transfer)
                    if entry.copied is not None:
                        entry.copied.synchronize()
            self._bury()
        return len(self._dying) < before

    def settle(self) -> None:
        """Waits for every read under way."""
        for _, transfer in self.reading:
            self._wait(transfer)
        self._bury()

    def _place(self, nbytes: int, position: int) -> Extent | None:
        """Returns a place for a use at ``position``; never waits."""
        self._bury()
        dram = self._homes.dram
        found = dram.allocate(nbytes)
        if found is None:
            for block_id in self._queue.last(_MOST_VICTIMS, position, self._may_go):
                self.drop(block_id)
                found = dram.allocate(nbytes)
                if found is not None:
                    break
        return found

    def _may_go(self, block_id: int) -> bool:
        entry = self.staged.get(block_id)
        return entry is not None and entry.idle

    def _bury(self) -> None:
        """Gives the places back of what was dropped and is over."""
        for entry in [entry for entry in self._dying if entry.idle]:
            self._dying.remove(entry)
            self._homes.dram.free(entry.extent)
