"""The one that joins the residency table and the movers.

All blocks, whatever their role, go through here: :meth:`BlockManager.acquire`
brings a block into HBM and leases it, :meth:`BlockManager.release` gives the
lease back. The table is written by nobody else. Completions come up only when
something here polls; no transfer calls back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from tiermem.config import Settings
from tiermem.core.block import Block, Role, Tier
from tiermem.core.forecast import timed
from tiermem.core.layout import TensorShape, pack
from tiermem.core.residency import Record, ResidencyTable
from tiermem.core.schedule import Planner
from tiermem.errors import REFUSALS, ClosedError, InvariantError
from tiermem.io.engine import IoEngine
from tiermem.runtime.acquire import Acquirer
from tiermem.runtime.base.forks import generation, tell_of_forks
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.loans.zero_copy import ZeroCopy
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.replay import Replay
from tiermem.runtime.memory.homes import HomeRequest, Homes, StoredBlock, ranges_of
from tiermem.runtime.memory.hostheap import HostHeap
from tiermem.runtime.memory.opening import OpenHbm, open_hbm, open_homes, open_mover
from tiermem.runtime.memory.slots import Holder, Slot, SlotCache
from tiermem.runtime.metrics.counters import Counters, ResidencyRow, Stats, row_of, stats_of
from tiermem.runtime.metrics.pass_timer import open_pass_timer
from tiermem.runtime.metrics.timeline import Timeline
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.evictor import Evictor
from tiermem.runtime.placement.limit import HbmLimit
from tiermem.runtime.placement.no_room import too_much_for_good
from tiermem.runtime.repair import repair_blocks
from tiermem.runtime.transfers.block_io import BlockIo
from tiermem.runtime.transfers.deferred import DeferredWork
from tiermem.runtime.transfers.transfers import TransferLog, Transfers
from tiermem.transfer.copy import CopyEngine, CudaCopyEngine, HostCopyEngine
from tiermem.transfer.file.mover import FileMover

_IN_BACKWARD = (Role.GRAD, Role.ACTIVATION)


class BlockManager:
    """Blocks in three tiers, under one roof and one lock."""

    homes: Homes
    io_engine: str
    io_reason: str

    def __init__(
        self,
        settings: Settings,
        engine: Callable[[], IoEngine] | None = None,
        hbm: Callable[[Settings, torch.device], OpenHbm] = open_hbm,
    ) -> None:
        """Opens the tiers.

        Args:
            settings: Budgets, paths and policy.
            engine: Makes the I/O engine; by default the best that works here.
            hbm: Opens HBM.

        Raises:
            ConfigError: If a path cannot be used.
            CapacityError: If memory or disk space is not there.
        """
        self.settings = settings
        self._engine = engine
        self.device = torch.device(settings.device)
        cuda = self.device.type == "cuda"
        self.lock = threading.RLock()
        self.counters = Counters()
        self.timeline = Timeline()
        self.planner = Planner()
        self.holders: dict[int, Holder] = {}
        self.deferred = DeferredWork()
        self.closers: list[Callable[[], object]] = []  # what others have open, by the time of close
        self._generation = generation()
        self.torn = False  # whether an exception came at a line of ours; see cut_short
        self.unsure = False  # and nobody has looked since who holds what
        self._closed = False
        self._given_back = False
        self._forking = False
        self._next_id = 0
        self.mover: FileMover | None = None
        try:
            open_homes(settings, self.device, partial(setattr, self, "homes"))
            opened = hbm(settings, self.device)
            self.arena = opened.arena
            self.copy: CopyEngine = CudaCopyEngine(self.device) if cuda else HostCopyEngine()
            self.table = ResidencyTable(opened.capacity, self.arena)
            self.slots = SlotCache(self.arena)
            self.by_address = self.slots.by_address
            # what leaves the stand-in for HBM is overwritten, so that a wrong residency shows;
            # on a GPU that costs bandwidth, and is for tests
            poison = not cuda or os.environ.get("TIERMEM_POISON") == "1"
            self.pass_timer = open_pass_timer(self.copy, self.counters, self.device)
            self.transfers = Transfers(
                self.table,
                self.slots,
                self.homes,
                self.copy,
                TransferLog(self.counters, self.timeline, self.pass_timer),
                poison=poison,
            )
            self.evictor = Evictor(
                self.table, self.slots, self.transfers, self.planner, self.holders, self.counters
            )
            self.limit = HbmLimit(
                self.evictor, self.arena, opened.room, most=opened.most, open=opened.open
            )
            self.block_io = BlockIo(self.transfers)
            self.parts = Parts(
                settings, self.device, self.table, self.slots, self.homes, self.copy,
                self.planner, self.pass_timer, self.counters, self.holders, self.deferred,
                self.transfers, self.evictor,
            )  # fmt: skip
            self.host_loans = HostLoans(self.parts)
            self.zero_copy = ZeroCopy(self.parts, self)
            open_mover(self.homes, self.copy, self.device, engine, self._take_mover)
            self.prefetcher = Prefetcher(self.parts, self.host_loans, self.try_fill)
            self.replay = Replay(self.parts, self.prefetcher)
            self.acquirer = Acquirer(self.parts, self, self.prefetcher, self.replay)
            self._heap = None if cuda else HostHeap()
        except BaseException:
            self._give_back()
            raise
        tell_of_forks(self)

    # -- blocks ----------------------------------------------------------

    def add_blocks(
        self,
        wanted: Sequence[tuple[str, Role, Sequence[TensorShape]]],
        *,
        home: str | Sequence[str | None] | None = None,
        stored: Sequence[StoredBlock | None] = (),
    ) -> list[Block]:
        """Packs and enters blocks, with home space for all of them or an error for all.

        Args:
            wanted: Name, role and tensors of each block.
            home: Overrides the policy's home: of all, or of each (None for the policy's).
            stored: Of each block, where files of :meth:`attach_files` have its tensors (one
                sequence of ranges for each); None for a block that gets an ordinary home. By
                default that is all of them.

        Returns:
            The blocks, in order; those that are not ``stored`` hold no data yet.

        Raises:
            CapacityError: Naming the block and the least budget that would do.
        """
        self.guard()
        with self.lock:
            self.guard()
            blocks, requests = [], []
            homes = [home] * len(wanted) if home is None or isinstance(home, str) else home
            files = stored or [None] * len(wanted)
            for (name, role, shapes), own, in_files in zip(wanted, homes, files, strict=True):
                specs, nbytes = pack(shapes)
                blocks.append(Block(self._next_id, name, role, nbytes, specs))
                self._next_id += 1
                where = own or self.settings.policy.home(role)
                ranges = None if in_files is None else ranges_of(specs, in_files)
                requests.append(HomeRequest(name, nbytes, where, ranges))  # type: ignore[arg-type]
            places = self.homes.reserve(requests)
            try:
                for block, request, (tier, extent) in zip(blocks, requests, places, strict=True):
                    self.table.add(block, tier, extent, defined=request.stored is not None)
                self._fix([b for b in blocks if self.table[b.id].home is Tier.HBM])
                later = (block.nbytes for block in blocks if block.role in _IN_BACKWARD)
                self.evictor.expect(max(later, default=0))
            except BaseException as error:
                if not isinstance(error, REFUSALS):
                    self.repair_blocks()  # it may have come anywhere
                self.remove_blocks(blocks)
                for tier, extent in places:
                    if extent is not None and self.homes.holds(tier, extent):
                        self.homes.release(tier, extent)  # no block of the table had it yet
                raise
            return blocks

    def attach_files(
        self, paths: Sequence[Path], check: Callable[[int, int], None] | None = None
    ) -> int:
        """Opens checkpoint files, in which blocks may have their homes from now on.

        Args:
            paths: The files; they are only read.
            check: Called with the descriptor of each file and its index in ``paths``; raises if
                that is not the file it should be.

        Returns:
            The number of the first of them; the others follow.

        Raises:
            CapacityError: If DRAM has no room for the chunks that reads pass through.
            StorageError: If a file cannot be opened.
        """
        self.guard()
        with self.lock:
            self.guard()
            first = self.homes.open_sources().add(paths, check)
            self.flush()
            self.transfers.ahead.cancel()
            before = self.mover
            open_mover(self.homes, self.copy, self.device, self._engine, self._take_mover)
            if before is not None:
                before.close()
            return first

    def make_writable(self, blocks: Sequence[Block]) -> None:
        """Gives blocks at home in checkpoint files homes that may be written, or none of them.

        Others are passed over. Policy ``"auto"`` is taken for ``"nvme"`` where there is no swap
        file.

        Raises:
            CapacityError: If a tier cannot hold them.
            StorageError: If one cannot be read; it and those behind it stay as they were.
        """
        self.guard()
        with self.lock:
            self.guard()
            records = [self.table[block.id] for block in blocks]
            records = [r for r in records if self.homes.read_only(r.home_extent)]
            requests = [self._writable(record) for record in records]
            places = self.homes.reserve(requests)
            try:
                for record, (tier, extent) in zip(records, places, strict=True):
                    self.acquirer.acquire(record.block)
                    try:
                        self.transfers.rehome(record, tier, extent)
                    finally:
                        self.table.release(record.block.id)
            except REFUSALS:  # any other may have come anywhere: a repair frees what nobody has
                for record, (tier, extent) in zip(records, places, strict=True):
                    if extent is not None and record.home_extent != extent:
                        self.homes.release(tier, extent)
                raise

    def _writable(self, record: Record) -> HomeRequest:
        home = self.settings.policy.home(record.block.role)
        if home == "nvme" and self.homes.swap is None:
            home = "auto"
        return HomeRequest(record.block.name, record.block.nbytes, home)

    def remove_blocks(self, blocks: Sequence[Block]) -> None:
        """Takes blocks out and gives their space back; what they hold is lost.

        Blocks that are gone already are passed over.

        Raises:
            InvariantError: If one of them is leased; nothing is changed then.
        """
        if self.closed:
            return
        with self.lock:
            present = [block for block in blocks if self.table.get(block.id) is not None]
            for block in present:
                self.transfers.settle(block.id)
                if self.table[block.id].leases:
                    raise InvariantError(f"block {block.name!r} is in use and cannot be removed")
            if any(self.table[block.id].home is Tier.DRAM for block in present):
                self.copy.wait(self.copy.risen())  # the host may be the next to write at home
            for block in present:
                record = self.table[block.id]
                if self.transfers.keeper is not None:
                    self.transfers.keeper.before_write(record)
                self.transfers.ahead.drop(block.id)
                self.copy.wait(self.transfers.home_ready.pop(block.id, None))
                self.evictor.forget(record, gone=True)
                if record.home_extent is not None:
                    self.homes.release(record.home, record.home_extent)
                self.slots.forget(block.id)
                self.zero_copy.forget(block.id)
                self.transfers.failing.discard(block.id)
            self.planner.forget({block.id for block in present})
            gone = [block.id for block in present]
            self.transfers.waste.forget(gone)
            self.transfers.departures.forget(gone)

    def can_hold(self, nbytes: int) -> bool:
        """Whether HBM can hold so many bytes at one time; it is made larger for that if need be."""
        with self.lock:
            return self.limit.require(nbytes)

    def record(self, block: Block) -> Record:
        """Returns the table's row of a block."""
        return self.table[block.id]

    # -- use -------------------------------------------------------------

    def acquire(self, block: Block) -> Slot:
        """Brings a block into HBM and leases it.

        Where it holds no data yet it gets a blank place, to be written.

        Returns:
            Its slot; the current stream waits for the bytes, the host does not, save for
            bytes that come from a file.

        Raises:
            CapacityError: If HBM cannot hold it beside what is leased.
            StorageError: If its bytes cannot be read, or what must leave cannot be written.
            ConfigError: If a CUDA graph is being captured and the block may move.
            ClosedError: After ``close()``, or in a forked child.
        """
        self.guard()  # before the lock as well: a forked child may find it taken for ever
        with self.lock:
            return self.acquirer.acquire(block)

    def acquire_all(self, blocks: Sequence[Block]) -> list[Slot]:
        """Acquires several blocks that are used together, or none.

        Until all are there nobody has seen an address of theirs, so they may be moved to make
        room for each other.
        """
        self.guard()
        with self.lock:
            unseen = self.evictor.rules.unseen
            taken: list[Block] = []
            try:
                for block in blocks:
                    self.acquire(block)
                    taken.append(block)
                    unseen[block.id] = unseen.get(block.id, 0) + 1
                return [self.slots.current[block.id] for block in blocks]
            except BaseException:
                for block in taken:
                    self.table.release(block.id)
                raise
            finally:
                for block in taken:
                    unseen.pop(block.id, None)

    def release(self, block: Block, *, dirty: bool = False) -> None:
        """Gives a lease back."""
        with self.lock:
            self.table.release(block.id, dirty=dirty)

    def mark_dirty(self, block: Block) -> None:
        """Says that a leased block was written."""
        with self.lock:
            self.table.mark_dirty(block.id)

    def slot_at_hand(self, block: Block) -> Slot | None:
        """Returns the slot of a block that is in HBM and usable, without leasing it."""
        with self.lock:
            self.deferred.pay(block.id)
            return self.slots.current[block.id] if self.table[block.id].usable else None

    def discard(self, block: Block) -> None:
        """Forgets what a block holds; who still looks at its bytes keeps them as they were."""
        with self.lock:
            self.deferred.pay(block.id)
            self.transfers.settle(block.id)
            self.transfers.ahead.drop(block.id)
            self.evictor.forget(self.table[block.id], gone=False)
            self.transfers.failing.discard(block.id)

    def read(self, block: Block) -> list[torch.Tensor]:
        """Returns copies of a block's tensors in ordinary host memory.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        self.guard()
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.guard()
            self.deferred.pay(block.id)
            return self.block_io.read(block)

    def read_home(self, block: Block) -> torch.Tensor:
        """Returns the bytes of a block's file, in ordinary host memory.

        Raises:
            StorageError: If they cannot be read.
            InvariantError: If the block's home is no file.
        """
        self.guard()
        with self.lock:
            self.guard()
            return self.block_io.read_home(block)

    def restore(self, block: Block, begin: int, end: int) -> None:
        """Copies home bytes over a leased copy once more; see :meth:`BlockIo.restore`."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.block_io.restore(block, begin, end)

    def slot_bytes(self, block: Block) -> torch.Tensor:
        """Returns the bytes of a leased block, ordered after what brought them."""
        with self.lock:
            self.copy.use(self.transfers.ready.get(block.id))
            return self.slots.current[block.id].bytes

    def write_home(self, block: Block, tensors: Sequence[torch.Tensor | None]) -> None:
        """Writes a block without data straight to its home; see :class:`BlockIo`."""
        self.guard()
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.guard()
            self.block_io.write_home(block, tensors)

    # -- passes ----------------------------------------------------------

    def begin_pass(
        self, key: Hashable, guess: Sequence[int] = (), *, load: int = 0, again: bool = False
    ) -> None:
        """Says that a new sweep begins; see :class:`~tiermem.core.schedule.Planner`.

        Args:
            key: Which pass this is.
            guess: Order to assume where this pass has not been seen before.
            load: Its tokens, rounded; 0 where they are not known.
            again: Whether to assume that it comes again, where nothing is known to follow it.
        """
        self.guard()
        with self.lock:
            self.guard()
            if self.copy.capturing():
                return  # nothing runs now; replays are not seen at all
            if self._heap is not None:
                self._heap.look()
            if self.limit.follow(key):
                self.replay.repair()
            self.pass_timer.begin(timed(key, load))
            self.prefetcher.end_pass()
            self.planner.begin(key, guess, again=again)
            outlook, number = self.prefetcher.plan(load)
            self.evictor.rearrange(self.planner.schedule)
            if not self.replay.begin(outlook, number):
                self.prefetcher.run()

    def end_pass(self) -> None:
        """Says that the pass under way has ended; without it, it ends when the next begins."""
        if self.pass_timer.sampling:
            with self.lock:
                self.pass_timer.ended()

    def poll(self) -> None:
        """Takes up every transfer that has finished."""
        with self.lock:
            self.transfers.poll()

    def flush(self) -> None:
        """Waits until no transfer is under way, and frees what belongs to no block."""
        with self.lock:
            self.transfers.settle_all()
            self.evictor.reap()

    def try_fill(self, record: Record, position: int) -> bool:
        """Begins to fetch a block ahead of its use, if that evicts nothing needed sooner.

        Args:
            record: A block that is in HBM neither now nor soon.
            position: Uses until it is needed.

        Returns:
            Whether the fetch has begun.
        """
        if record.home is Tier.NVME and not self.prefetcher.disk.staged(record, position):
            return False  # on its way into DRAM: it takes no room here until it is there
        room = self.evictor.place(record.block, position)
        if room is None:
            return False
        self.transfers.fill(record, room.extent)
        self.replay.note(record, room, position)
        self.evictor.order.note_use(record.block.id)
        self.counters.prefetches += 1
        return True

    # -- reports ---------------------------------------------------------

    def stats(self) -> Stats:
        """Returns what happened so far."""
        with self.lock:
            homes, settings = self.homes, self.settings
            on_disk = homes.swap.capacity if homes.swap is not None else 0
            files = homes.swap or homes.sources
            return stats_of(
                self.counters,
                used=(self.table.hbm.used, homes.dram.used, homes.nvme_used),
                budget=(
                    self.table.hbm.capacity
                    if self.limit.open or settings.hbm_auto
                    else settings.hbm,
                    settings.dram,
                    settings.nvme_bytes or on_disk,
                ),
                peak=(self.table.hbm.peak, homes.dram.peak, homes.nvme_peak),
                io=self._io(),
                direct=files is not None and files.direct,
                efficiency=self.pass_timer.efficiency(),
                ahead=(self.prefetcher.disk.reads_into, self.transfers.ahead.kept),
                kept=self.evictor.regions.kept,
                mapped=self.arena.mapped,
            )

    def residency(self) -> list[ResidencyRow]:
        """Returns where every block is."""
        with self.lock:
            if not self.closed:
                self.transfers.poll()
            return [row_of(record) for record in self.table]

    def close(self) -> None:
        """Stops every transfer and gives memory and disk space back; idempotent.

        Cut short (by Ctrl-C), it can be called again.
        """
        if self._given_back or self._generation != generation():
            return
        with self.lock:
            self._closed = True
            if hasattr(self, "replay"):
                self.replay.interrupt()
            self._give_back()
            self._given_back = True

    def stop(self) -> None:
        """Stops every transfer for good; what is in HBM and at home in DRAM can still be read.

        The first half of :meth:`close`: page-locked memory is ordinary memory from here on.
        """
        with self.lock, ExitStack() as steps:  # runs them last first
            self._closed = True
            self.replay.interrupt()
            steps.callback(self.homes.arena.unlock)
            steps.callback(self.copy.synchronize)
            if self.mover is not None:
                steps.callback(self.mover.close)
            steps.callback(self.deferred.wait)

    def _give_back(self) -> None:
        """Closes whatever was opened, each thing however the others fare."""
        with ExitStack() as steps:  # runs them last first
            if hasattr(self, "homes"):
                steps.callback(self.homes.close)
            if hasattr(self, "arena"):
                steps.callback(self.arena.close)
            if hasattr(self, "slots"):
                steps.callback(self.slots.clear)
            if hasattr(self, "in_place"):
                steps.callback(self.zero_copy.clear)
            if hasattr(self, "copy"):
                steps.callback(self.copy.synchronize)
            if self.mover is not None:
                steps.callback(self.mover.close)
            for holder in list(self.holders.values()):
                steps.callback(holder.unpoint)
            for close in self.closers:
                steps.callback(close)
            steps.callback(self.deferred.wait)

    def before_fork(self) -> None:
        """Lets a child see what somebody else looks at in HBM (CPU); the rest it will not have."""
        self._forking = self.lock.acquire(blocking=False)
        if self._forking:
            seen = [slot.extent for slot in self.slots.current.values() if slot.aliased]
            self.arena.show_to_children([*seen, *self.table.orphans()])
        else:  # another thread is at it: nobody knows what is looked at
            self.arena.show_to_children(None)

    def after_fork(self) -> None:
        """Hides HBM from children again."""
        self.arena.show_to_children(())
        if self._forking:
            self._forking = False
            self.lock.release()

    def forked(self) -> None:
        """Sees to it that a forked child is refused, waits for nobody and keeps no file open."""
        # another thread of the parent may have had the lock, and will never give it back here
        self.lock = threading.RLock()
        self.replay.interrupt()
        if self._given_back:
            return
        if self.mover is not None:
            self.mover.forked()
        self.homes.forked()
        for holder in list(self.holders.values()):
            holder.forked()

    @property
    def closed(self) -> bool:
        """Whether this manager can no longer be used from here."""
        return self._closed or self._generation != generation()

    def guard(self) -> None:
        """Raises ClosedError where the manager cannot be used."""
        if self._generation != generation():
            raise ClosedError(
                "this TierManager belongs to the parent process; a forked child cannot use its "
                "tiers: open one of its own, or pass it ordinary tensors"
            )
        if self._closed:
            raise ClosedError(
                "this TierManager is closed: the models that were wrapped in it are ordinary ones "
                "again, unless they were discarded, and the state of its optimizers is gone (take "
                "optimizer.state_dict() before); open a new one and wrap again"
            )

        if self.torn:
            self._repair()

    def cut_short(self) -> None:
        """Says that an exception has passed that came at a line of ours: anything may be half done.

        The next call from outside has :mod:`tiermem.runtime.repair` put it right.
        """
        self.torn = self.unsure = True
        self.replay.interrupt()  # so that the next use asks whether anything is torn

    def repair_blocks(self) -> None:
        """Makes table, slots and transfers agree; see :mod:`tiermem.runtime.repair`."""
        repair_blocks(self.parts, self.host_loans, self.zero_copy, self.prefetcher, self.replay)

    # -- inside ----------------------------------------------------------

    def _repair(self) -> None:
        """Puts the blocks right, unless an operation of this very thread is under way."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return
        with self.lock:
            if self.torn:
                self.repair_blocks()
                self.torn = False

    def _take_mover(self, made: tuple[FileMover | None, str, str]) -> None:
        self.mover, self.io_engine, self.io_reason = made
        self.transfers.mover = self.mover

    def _io(self) -> tuple[str, str]:
        """Returns the name of the I/O engine, and why it is this one."""
        if self.mover is None or self.io_engine == "given":
            return self.io_engine, self.io_reason
        name, note = self.mover.engine
        return name, note or self.io_reason

    def _fix(self, blocks: Sequence[Block]) -> None:
        """Gives blocks whose home is HBM their place for good.

        Raises:
            CapacityError: If it has no room for all of them.
        """
        if not blocks:
            return
        there = self.table.fixed_nbytes()
        if not self.limit.require(there + sum(block.nbytes for block in blocks)):
            raise too_much_for_good(blocks, there, self.table.hbm.capacity)
        for block in blocks:
            record = self.table[block.id]
            self.acquirer.place_blank(record)
            record.fixed = True
