"""Reads that begin before HBM has room: from a file into spare DRAM, and up from there later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiermem.core.block import Extent, align_up
from tiermem.core.residency import Record
from tiermem.runtime.homes import Homes
from tiermem.transfer.copy import Event
from tiermem.transfer.filemover import FileMover, FileTransfer


@dataclass(slots=True, eq=False)
class Staged:
    """A block's bytes in DRAM, or on their way there.

    Attributes:
        extent: Where in DRAM.
        home: Where in the files.
        version: Of the bytes there when the read was asked for.
        transfer: The read; None where a Ctrl-C came while it was asked for, so that its bytes
            may still be written to and are not used again.
    """

    extent: Extent
    home: Extent
    version: int
    transfer: FileTransfer | None = None


class ReadAhead:
    """What the disk has read, or is reading, for blocks that HBM has no room for yet.

    A disk that works only while HBM has a free slot stands still while the device computes, and
    between two passes. So what comes next by the schedule is read into DRAM that nobody else
    needs; it goes up as soon as there is room, and its place is used again. The residency table
    knows nothing of it: these bytes are a copy of a home that is valid, to be lost at any time.

    Attributes:
        staged: By block.
        reading: Reads whose end nobody has taken up yet.
        freed: Grows whenever a place comes free.
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
        self.freed = 0
        self._idle: dict[int, deque[tuple[Extent, Event | None]]] = {}
        self._dying: list[Staged] = []
        homes.reclaimers.append(self.drop_all)

    def begin(self, record: Record, mover: FileMover) -> bool:
        """Begins to read a block whose home is a file; returns whether there was a place."""
        home, swap = record.home_extent, self._homes.swap
        if home is None or swap is None:
            return False
        block = record.block
        extent = self._place(align_up(block.nbytes))
        if extent is None:
            return False
        entry = self.staged[block.id] = Staged(extent, home, swap.version(home))
        target = self._homes.arena.bytes_of(Extent(extent.offset, home.nbytes))
        entry.transfer = mover.read(home, target, label=block.name, in_place=True)
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
        transfer, swap = entry.transfer, self._homes.swap
        stale = record.home_extent != entry.home or swap is None
        if stale or swap is None or swap.version(entry.home) != entry.version or transfer is None:
            self.drop(record.block.id)
            return None
        if transfer.finished and transfer.error is not None:
            self.drop(record.block.id)
            return None
        return entry

    def copied(self, block_id: int, event: Event | None) -> None:
        """Says that a copy up has been submitted; its place is free when that is over."""
        entry = self.staged.pop(block_id)
        self._idle.setdefault(entry.extent.nbytes, deque()).append((entry.extent, event))
        self.freed += 1

    def drop(self, block_id: int) -> None:
        """Forgets a block; its place is free when nothing reads into it any more."""
        entry = self.staged.pop(block_id, None)
        if entry is not None:
            self._dying.append(entry)
            self._bury()

    def drop_all(self) -> bool:
        """Gives up the DRAM that it has; returns whether that was any.

        Reads under way are waited for only where there is nothing else to give up.
        """
        for block_id in list(self.staged):
            self.drop(block_id)
        if not any(self._idle.values()):
            for entry in self._dying:
                if entry.transfer is not None:
                    self._wait(entry.transfer)
            self._bury()
        found = False
        for places in self._idle.values():
            for extent, event in places:
                if event is not None:
                    event.synchronize()
                self._homes.dram.free(extent)
                found = True
        self._idle.clear()
        return found

    def settle(self) -> None:
        """Waits for every read under way."""
        for _, transfer in self.reading:
            self._wait(transfer)
        self._bury()

    def _place(self, nbytes: int) -> Extent | None:
        """Returns a place whose last copy is over; never waits, and takes nobody else's."""
        self._bury()
        idle = self._idle.get(nbytes)
        if idle:
            extent, event = idle[0]
            if event is None or event.done():
                idle.popleft()
                return extent
        found = self._homes.dram.allocate(nbytes)
        if found is None and self._give_up_other(nbytes):
            found = self._homes.dram.allocate(nbytes)
        return found

    def _give_up_other(self, nbytes: int) -> bool:
        """Frees idle places of other sizes, which may lie side by side."""
        found = False
        for size, places in self._idle.items():
            while size != nbytes and places and (places[0][1] is None or places[0][1].done()):
                self._homes.dram.free(places.popleft()[0])
                found = True
        return found

    def _bury(self) -> None:
        """Takes the places back of what was dropped and is over."""
        for entry in list(self._dying):
            if entry.transfer is not None and entry.transfer.finished:
                self._dying.remove(entry)
                self._idle.setdefault(entry.extent.nbytes, deque()).append((entry.extent, None))
                self.freed += 1
