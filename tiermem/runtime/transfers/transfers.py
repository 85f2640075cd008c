"""Transfers of blocks: begins copies, completes them, and waits where necessary.

A copy between HBM and DRAM counts as complete once it is submitted (streams order
it); one between HBM and a file is a *flight* until its transfer has finished:
a read when all of it has been submitted, a write when the disk has it.
Completions are noticed only when something here polls; there are no callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.pace import Waste
from tiermem.core.residency import Move, Record, ResidencyTable, State
from tiermem.errors import InvariantError, StorageError
from tiermem.runtime.base.undisturbed import undisturbed
from tiermem.runtime.memory.homes import HomeRequest, Homes
from tiermem.runtime.memory.slots import Slot, SlotCache
from tiermem.runtime.transfers.comparing import same_bytes
from tiermem.runtime.transfers.departures import Departures
from tiermem.runtime.transfers.early_reads import ReadAhead
from tiermem.runtime.transfers.packed_copies import PackedCopies
from tiermem.runtime.transfers.packed_homes import PackedHomes
from tiermem.runtime.transfers.transfer_log import TransferLog
from tiermem.transfer.copy import CopyEngine, Event
from tiermem.transfer.file.mover import FileMover, FileTransfer

_STAGED = "nvme->dram"


@dataclass(frozen=True, slots=True)
class Flight:
    """A file transfer in progress, and the change of residency that it makes."""

    transfer: FileTransfer
    move: Move


class Transfers:
    """Moves blocks between HBM and their homes, and keeps the table informed.

    Attributes:
        flights: File transfers in progress, by block.
        ready: Event of the last copy of a block to HBM, if there is something to wait for.
        home_ready: Event of the last copy of a block to its home.
        failing: Blocks whose last write-back failed; they are not written ahead of need.
        departures: Which blocks have left HBM.
        log: The statistics of transfers.
        waste: Tracks prefetches, and blocks that leave without being used.
        ahead: What has been read from files and waits in DRAM for room.
        packed: Packed copies of homes in DRAM.
        packed_homes: Homes in DRAM that are stored packed.
        unclaimed: Blocks without data that have a place which compute has not waited for yet.
        poisons: Whether the bytes of blocks that have left HBM are overwritten.
    """

    def __init__(
        self,
        table: ResidencyTable,
        slots: SlotCache,
        homes: Homes,
        copy: CopyEngine,
        log: TransferLog,
        *,
        poison: bool,
    ) -> None:
        """Works on ``table``, whose only writer it shares a lock with."""
        self.table = table
        self.slots = slots
        self.homes = homes
        self.copy = copy
        self.mover: FileMover | None = None
        self.flights: dict[int, Flight] = {}
        self.ready: dict[int, Event] = {}
        self.home_ready: dict[int, Event] = {}
        self.failing: set[int] = set()
        self.departures = Departures()
        self.log = log
        self.waste = Waste()
        self.ahead = ReadAhead(homes, self.wait)
        self.packed = PackedCopies(table, homes, copy)
        self.packed_homes = PackedHomes(homes, copy)
        self.unclaimed: set[int] = set()
        self._patient = False
        self.poisons = poison

    # -- beginning -------------------------------------------------------

    def fill(
        self, record: Record, extent: Extent, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Begins to fetch a block into ``extent``, which is freed again if that fails.

        Args:
            record: The block.
            extent: Room for it in HBM.
            meanwhile: For a block that a caller waits for: what to do before the host waits for
                a disk. Without it, a block whose read into DRAM is in progress must not be passed.
        """
        block, block_id = record.block, record.block.id
        asked = False
        try:
            copied = self.table.hbm.copied.was(extent.offset)
            move = self.table.begin_fill(block_id, extent)
            slot = self.slots.enter(block, extent)
            self.ready.pop(block_id, None)
            staged = self._staged(record, meanwhile) if self.ahead.staged else None
            if staged is not None:
                source = self.homes.arena.bytes_of(staged)
                self.copy_up(record, slot, source, staged=True, copied=copied)
            elif record.home is Tier.DRAM:
                self.copy_up(record, slot, self._home_bytes(move.source_extent), copied=copied)
            else:
                guards = self.copy.guards(extent)
                parked = self.ahead.parking(record) if self.ahead.parked else None
                start = self._reading(move, parked, meanwhile is not None and not self._patient)
                asked = True
                transfer = start(target=slot.bytes, after=guards)
                self.flights[block_id] = Flight(transfer, move)
                if parked is not None:
                    self.ahead.has_place(block_id)
        except BaseException as error:
            if record.extent is None:
                self._give_back(extent)
            elif record.in_hbm is State.FILLING and block_id not in self.flights:
                self.unfill(block_id, lost=asked and not isinstance(error, Exception))
            raise

    def in_dram(self, record: Record) -> torch.Tensor | None:
        """Returns a block's bytes in DRAM, 1-D uint8: of its home, or read from its file."""
        extent = record.home_extent
        if record.home is not Tier.DRAM:
            extent = self.ahead.at_rest(record)
            return None if extent is None else self.homes.arena.bytes_of(extent)
        return None if extent is None else self._home_bytes(extent)

    def _home_bytes(self, extent: Extent) -> torch.Tensor:
        """Returns the bytes of a home in DRAM, 1-D uint8; usually cached."""
        source = self.homes.bytes.get(extent.offset)
        return self.homes.bytes_of(extent) if source is None else source

    def copy_up(
        self,
        record: Record,
        slot: Slot,
        source: torch.Tensor,
        again: Event | None = None,
        *,
        staged: bool = False,
        copied: bool = False,
    ) -> None:
        """Submits the copy of a block from host memory to its slot, which ends its fill.

        Args:
            record: The block, being filled.
            slot: The target.
            source: Its bytes in DRAM, 1-D uint8.
            again: An event that nothing waits for any more, to be recorded again.
            staged: Whether ``source`` is not a home, but was read ahead from a file.
            copied: Whether only copies from the slot have used it since the last compute.
        """
        block, started = record.block, time.perf_counter_ns()
        after, timer = self.home_ready.get(block.id), self.log.pass_timer
        sampling, nbytes = timer.sampling, block.nbytes
        packed = None if staged or not self.packed.used else self.packed.of(record)
        home = record.home_extent
        if sampling:
            timer.rising(slot.extent, after)
        if self.homes.packed and not staged and home and home.offset in self.homes.packed:
            form = self.packed_homes.form_of(home)
            nbytes = form.moved
            event = self.copy.up_home(slot.bytes, form, slot.extent, after, copied=copied)
        elif packed is not None:
            nbytes = packed.moved
            event = self.copy.up_packed(slot.bytes, packed, slot.extent)
        else:
            event = self.copy.up(slot.bytes, source, slot.extent, after, again, copied=copied)
        if sampling:
            timer.risen(block, nbytes)
        if event is not None:
            self.ready[block.id] = event
        if staged:
            self.ahead.copied(block.id, event)
        self._copied("dram->hbm", block, started, nbytes)
        record.in_hbm = State.VALID

    def _reading(
        self, move: Move, parked: FileTransfer | None, urgent: bool
    ) -> Callable[..., FileTransfer]:
        """Returns a function that begins to read a block from its file, or lands a parked read."""
        mover = self.need_mover()
        if parked is not None:
            return partial(mover.land, parked, urgent=urgent)
        return partial(mover.read, move.source_extent, label=move.block.name, urgent=urgent)

    def blank(self, record: Record, extent: Extent, *, ahead: bool = False) -> None:
        """Gives a block without data its place in ``extent``, to be written there.

        Args:
            record: The block.
            extent: Room for it in HBM.
            ahead: Whether it is written later: until :meth:`claim`, compute does not wait for other
                users of the place.
        """
        block = record.block
        try:
            if ahead:
                self.unclaimed.add(block.id)
            else:
                self.copy.claim(extent)
            self.slots.enter(block, extent)
            self.ready.pop(block.id, None)
            self.table.place_blank(block.id, extent)
        except BaseException:
            if record.extent is None:
                self.slots.leave(block.id)
                self._give_back(extent)
            raise

    def claim(self, record: Record) -> None:
        """Makes compute wait for other users of a block's place, if it has not done so yet.

        Args:
            record: The block; it is in HBM, and about to be used.
        """
        if record.block.id in self.unclaimed and record.extent is not None:
            self.copy.claim(record.extent)
            self.unclaimed.remove(record.block.id)

    def drain(self, record: Record) -> None:
        """Begins to write a dirty block back to its home.

        A block whose home is in a checkpoint gets another home, unless it still has the bytes of
        the
        files: then it is clean again, and nothing is written.

        Raises:
            CapacityError: If there is no room for another home; the block stays dirty.
        """
        block = record.block
        slot = self.slots.current[block.id]
        if record.home is Tier.NVME:
            if self.homes.read_only(record.home_extent):
                if self._is_as_in_files(record):
                    record.at_home = State.VALID
                    record.in_hbm = State.VALID  # last: if interrupted before it, it is still dirty
                    self.failing.discard(block.id)
                    return
                self._make_writable(record)
            self.ahead.drop(block.id)
        if self.homes.keeper is not None:
            self.homes.keeper.before_write(record)
        try:
            move = self.table.begin_drain(block.id)
            if record.home is Tier.DRAM:
                event = self._copy_down(record, slot, move.target_extent)
                record.at_home = State.VALID  # ResidencyTable.end_drain, in line
                record.in_hbm = State.VALID  # last: if interrupted before it, it still drains
                record.copied = event is not None and _is_alone(slot)
                self.log.counters.write_backs += 1
                self.failing.discard(block.id)
            else:
                self.copy.prepare_down()
                transfer = self.need_mover().write(move.target_extent, slot.bytes, label=block.name)
                self.flights[block.id] = Flight(transfer, move)
        except BaseException:
            # A write that was submitted in spite of this (Ctrl-C at that very moment) does no
            # harm: the home copy is stale, and later writes of these bytes are ordered after it.
            if record.in_hbm is State.DRAINING and block.id not in self.flights:
                self.copy.synchronize()
                self.table.end_drain(block.id, ok=False)
            raise

    def copy_home(self, record: Record) -> None:
        """Copies a leased block home as it is; in the table the copy in HBM remains the newer one.

        Later writes at the home wait for the copy.

        Args:
            record: The block; it is in HBM and at home in DRAM.
        """
        block, extent = record.block, record.extent
        if record.home is not Tier.DRAM or record.home_extent is None or extent is None:
            raise InvariantError(f"block {block.name!r} is not in HBM, or not at home in DRAM")
        if self.homes.keeper is not None:
            self.homes.keeper.before_write(record)
        self._copy_down(record, self.slots.current[block.id], record.home_extent)
        self.copy.claim(extent)

    def _copy_down(self, record: Record, slot: Slot, home: Extent) -> Event | None:
        """Submits the copy of a block from its slot to its home in DRAM; returns its event."""
        block, started = record.block, time.perf_counter_ns()
        after, form, nbytes = self.ready.get(block.id), None, block.nbytes
        if record.packs or self.homes.packed:
            form = self.packed_homes.form_for(record, home)
        if form is not None:
            nbytes = form.moved
            event = self.copy.down_home(form, slot.bytes, slot.extent, after)
        else:
            target = self.homes.bytes.get(home.offset)
            if target is None:
                target = self._home_bytes(home)
            event = self.copy.down(target, slot.bytes, slot.extent, after)
        if event is not None:
            self.home_ready[block.id] = event
        self._copied("hbm->dram", block, started, nbytes)
        return event

    def rehome(self, record: Record, home: Tier, extent: Extent | None) -> None:
        """Gives a block whose home is in a checkpoint a writable home.

        Args:
            record: The block; it is in HBM, not in transfer.
            home: Its new home.
            extent: Address there, which is the block's from now on.
        """
        if extent is None:
            raise InvariantError(f"block {record.block.name!r} cannot get its home in HBM later")
        if self.homes.keeper is not None:
            self.homes.keeper.before_write(record)
        self.ahead.drop(record.block.id)
        former = record.home_extent
        # tier and address change together, so that after a Ctrl-C it has one home or the other
        undisturbed(partial(self.table.rehome, record.block.id, home, extent))
        if former is not None:
            self.homes.release(Tier.NVME, former)
        self.departures.add_move()  # plans for its former home are dropped

    def _make_writable(self, record: Record) -> None:
        """Gives a modified block of a checkpoint another home wherever there is room."""
        request = HomeRequest(record.block.name, record.block.nbytes, "auto")
        [(tier, extent)] = self.homes.reserve([request])
        self.rehome(record, tier, extent)

    def _is_as_in_files(self, record: Record) -> bool:
        """Whether a block of a checkpoint that is marked as written is in fact unchanged.

        Usually nobody has written it: it was only exposed to code that could have, such as
        a ``state_dict()``. Comparing requires a read that costs as much as a later fetch, while
        another home would take DRAM permanently. If the block was written, it gets a writable home
        after this, so this is not called for it again.
        """
        block, extent = record.block, record.home_extent
        if extent is None:
            return False
        home = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
        transfer = self.need_mover().read(extent, home, label=block.name, urgent=True)
        self.wait(transfer)
        if transfer.error is not None:
            return False  # the copy in HBM is all there is: it is written elsewhere
        slot = self.slots.current[block.id]
        self.copy.use(self.ready.get(block.id))
        self.copy.claim(slot.extent)  # every stream that may write it is waited for
        return same_bytes(block, slot.bytes, home)

    # -- ending ----------------------------------------------------------

    def poll(self) -> None:
        """Completes every transfer that has finished."""
        if self.mover is None:
            return
        self.mover.poll()  # a Ctrl-C may lose the result, so only the flights count
        for block_id, flight in list(self.flights.items()):
            if flight.transfer.finished:
                self._land(block_id, flight)
        if self.ahead.reading:
            for record, transfer in self.ahead.take_landed():
                self.log.landed(_STAGED, record.block, transfer)

    def settle(self, block_id: int) -> StorageError | None:
        """Waits for the flight of a block, if there is one; returns its error."""
        flight = self.flights.get(block_id)
        if flight is None:
            self._mend(block_id)
            return None
        self.wait(flight.transfer)
        self.poll()
        return flight.transfer.error

    def settle_all(self) -> None:
        """Waits until no transfer is in progress."""
        for block_id in list(self.flights):
            self.settle(block_id)
        self.ahead.settle()
        self.poll()

    def repair(self) -> None:
        """Waits until no transfer runs, and completes those in progress by the table alone.

        For use after an exception anywhere, with the table repaired; see
        :mod:`tiermem.runtime.repair`.
        """
        self._patient = False
        if self.mover is not None:
            self.ahead.cancel()
            self.mover.wait_all()
            self.mover.poll()
        for block_id, flight in list(self.flights.items()):
            if self.table.get(block_id) is None:
                del self.flights[block_id]
            elif flight.transfer.finished:
                self._land(block_id, flight)
        self.copy.synchronize()
        self.unclaimed.clear()
        for record in self.table:
            if record.in_hbm is State.FILLING:
                self.table.end_fill(record.block.id, ok=False)
                self.slots.leave(record.block.id)
            elif record.in_hbm is State.DRAINING:
                self.table.end_drain(record.block.id, ok=False)
        for block_id in [*self.ready, *self.home_ready]:
            if self.table.get(block_id) is None:
                self.ready.pop(block_id, None)
                self.home_ready.pop(block_id, None)
        self.ahead.reset()
        self.departures.skip()
        self.departures.add_move()

    @contextmanager
    def sharing_disk(self) -> Iterator[None]:
        """Gives transfers that are waited for no priority over others, inside ``with``.

        In a sweep that reads and writes every block, prioritized transfers only delay others that
        have to be made as well.
        """
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    def wait(self, transfer: FileTransfer) -> None:
        """Waits for one transfer, and counts that as a stall."""
        if transfer.finished:
            return
        started = time.perf_counter_ns()
        try:
            self.need_mover().wait(transfer, hurry=not self._patient)
        finally:
            self.log.stalled(started)

    def wait_or_raise(self, transfer: FileTransfer) -> None:
        """Waits for a transfer that is not a flight, and raises its error."""
        self.wait(transfer)
        self.poll()
        if transfer.error is not None:
            self.log.counters.errors += 1
            raise transfer.error

    def leave(self, block_id: int, *, seen: bool = False) -> None:
        """Drops the slot of a block that has left HBM, and overwrites its bytes.

        Args:
            block_id: The block.
            seen: Whether there may be aliases of the bytes, so that they must stay.
        """
        if self.poisons and not seen and block_id in self.slots.current:
            slot, record = self.slots.current[block_id], self.table.get(block_id)
            copied = record is not None and record.copied
            self.copy.poison(slot.bytes, slot.extent, copied=copied)
        self.slots.leave(block_id)
        self.ready.pop(block_id, None)
        self.unclaimed.discard(block_id)
        self.departures.count += 1
        self.departures.unread.add(block_id)
        if block_id in self.waste.pending:  # its prefetch was useless
            self.log.counters.prefetch_wasted += self.waste.left(block_id)

    def left_unused(self, block_id: int, slot: Slot, extent: Extent) -> None:
        """Overwrites the bytes of a block that has left, and counts it if it was never used.

        Args:
            block_id: The block.
            slot: Its slot.
            extent: Its place.
        """
        if self.poisons:
            self.copy.poison(slot.bytes, extent)
        if block_id in self.waste.pending:
            self.log.counters.prefetch_wasted += self.waste.left(block_id)

    def relocated(self, block_id: int) -> None:
        """Notifies observers that a block was moved within HBM, with its bytes."""
        self.ready.pop(block_id, None)
        self.departures.add_move()

    def need_mover(self) -> FileMover:
        """Returns the file mover.

        Raises:
            InvariantError: If there is no NVMe tier.
        """
        if self.mover is None:
            raise InvariantError("there is no NVMe tier")
        return self.mover

    # -- inside ----------------------------------------------------------

    def _copied(self, link: str, block: Block, started: int, nbytes: int | None = None) -> None:
        """Enters a copy between HBM and DRAM that has just been submitted.

        Args:
            link: The link.
            block: The block.
            started: Begin, by the host's clock in nanoseconds.
            nbytes: Bytes copied; by default those of the whole block.
        """
        ended, nbytes = time.perf_counter_ns(), block.nbytes if nbytes is None else nbytes
        counters, elapsed = self.log.counters, ended - started
        moved = counters.moved_by.setdefault(link, [0, 0, 0])  # Counters.moved, in line
        moved[0] += nbytes
        moved[1] += 1
        moved[2] += elapsed
        counters.copy_ns += elapsed
        self.log.enter((link, block.name, started, ended, nbytes))

    def _land(self, block_id: int, flight: Flight) -> None:
        """Enters one finished transfer into the table.

        The flight is removed last: after a Ctrl-C in between, the next poll repeats this.
        """
        transfer, move = flight.transfer, flight.move
        state = self.table[block_id].in_hbm
        ok = transfer.error is None
        link = "nvme->hbm"
        if state is State.FILLING and move.target is Tier.HBM:
            if ok:
                if transfer.event is not None:
                    self.copy.landed(move.target_extent, transfer.event)
                    self.ready[block_id] = transfer.event
                self.table.end_fill(block_id, ok=True)
            else:
                self.unfill(block_id)
        elif state is State.DRAINING and move.source is Tier.HBM:
            link = "hbm->nvme"
            self.table.end_drain(block_id, ok=ok)
            if ok:
                self.log.counters.write_backs += 1
                self.failing.discard(block_id)
            else:
                self.failing.add(block_id)
        del self.flights[block_id]
        self.log.landed(link, move.block, transfer)

    def _staged(self, record: Record, meanwhile: Callable[[], None] | None) -> Extent | None:
        """Returns where in DRAM a block has been read to, once all of it is there."""
        entry = self.ahead.look(record)
        if entry is None or entry.transfer is None:
            return None
        if meanwhile is not None and not entry.transfer.finished:
            meanwhile()
        self.wait(entry.transfer)
        if self.ahead.look(record) is None:
            return None  # the read has failed: when repeated, it raises
        return Extent(entry.extent.offset, record.block.nbytes)

    def unfill(self, block_id: int, *, lost: bool = False) -> None:
        """Undoes a fill that failed.

        Args:
            block_id: The block.
            lost: Whether a transfer into it may be in progress, without a record of it
                (Ctrl-C while it was submitted): then its bytes are not used again.
        """
        self.copy.synchronize()
        self.table.end_fill(block_id, ok=False, keep=lost)
        self.leave(block_id, seen=lost)

    def _mend(self, block_id: int) -> None:
        """Repairs a block that is in transfer according to the table while nothing moves it.

        Only a second Ctrl-C, during the handling of the first, leaves a block in that state.
        """
        state = self.table[block_id].in_hbm
        if state is State.FILLING:
            self.unfill(block_id, lost=True)
        elif state is State.DRAINING:
            self.table.end_drain(block_id, ok=False)

    def _give_back(self, extent: Extent) -> None:
        """Frees space that was allocated for a block which did not get it."""
        if self.table.at(extent.offset) is None and self.table.hbm.holds(extent):
            self.table.hbm.free(extent)


def _is_alone(slot: Slot) -> bool:
    """Whether nothing uses the bytes of a block without a lease, now or until it is leased again.

    The count of aliases may hide one if a parameter was given other data.
    """
    if slot.wanted or slot.aliased:
        return False
    pointer = slot.pointer
    if not slot.pointed or pointer is None:
        return not slot.pointed
    with torch._C.DisableTorchFunctionSubclass():
        return pointer.all_at(slot)
