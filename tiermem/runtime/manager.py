"""The block manager: joins the residency table, the memories and the movers.

All blocks, whatever their role, go through here: :meth:`BlockManager.acquire`
brings a block into HBM and leases it, :meth:`BlockManager.release` gives the
lease back. The residency table is written by the manager's parts alone. A completed transfer is
noticed when the manager polls; no transfer calls back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from tiermem.config import Settings
from tiermem.core.block import ANNEX, Block, Role, Tier
from tiermem.core.forecast import timed
from tiermem.core.layout import TensorShape
from tiermem.core.residency import Record, State
from tiermem.errors import CapacityError
from tiermem.io.engine import IoEngine
from tiermem.runtime.acquire import Acquirer
from tiermem.runtime.assembly import OpenTiers
from tiermem.runtime.base.forks import tell_of_forks
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.base.gate import CallGate
from tiermem.runtime.base.threads import UserThreads
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.loans.zero_copy import ZeroCopy
from tiermem.runtime.lookahead.first_fill import FirstFill
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.replay import Replay
from tiermem.runtime.memory.homes import StoredBlock
from tiermem.runtime.memory.hostheap import HostHeap
from tiermem.runtime.memory.opening import OpenHbm, open_hbm
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.metrics.counters import ResidencyRow, Stats, row_of, stats_of
from tiermem.runtime.registry import BlockRegistry
from tiermem.runtime.repair import repair_blocks
from tiermem.runtime.transfers.block_io import BlockIo
from tiermem.runtime.transfers.file_fills import FileFills
from tiermem.storage.checkpointstore import SourceRange

_STAMPS = 4
"""For a use: its begin and end, and those of the copy for it."""


class BlockManager:
    """Manages the blocks of three tiers under one lock."""

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
        self.lock = threading.RLock()
        self.gate = CallGate(self._repair)
        self.threads = UserThreads(self.lock)
        self.closers: list[Callable[[], object]] = []  # called by close(), for other components
        self._opened = OpenTiers(settings, engine)
        self._given_back = False
        self._forking = False
        try:
            self.parts = self._opened.make_parts(hbm)
            self.block_io = BlockIo(self.parts.transfers)
            self.host_loans = HostLoans(self.parts)
            self.zero_copy = ZeroCopy(self.parts, self.gate)
            self._opened.open_mover(self.parts)
            self.prefetcher = Prefetcher(self.parts, self.host_loans, self.try_fill)
            self.replay = Replay(self.parts, self.prefetcher)
            self.acquirer = Acquirer(self.parts, self.gate, self.prefetcher, self.replay)
            self._registry = BlockRegistry(
                self.parts, self.acquirer, self.zero_copy, self.repair_blocks
            )
            self._heap = None if self.parts.device.type == "cuda" else HostHeap()
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
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            return self._registry.add(wanted, home, stored)

    def annex(self, block: Block) -> bool:
        """Has kernels use a block where it lies in DRAM, for good, as if that were a part of HBM.

        It takes no room of HBM and comes and goes no more, and is as slow as the bus.

        Args:
            block: The block; it holds no data yet.

        Returns:
            Whether it is so from now on: not where its home is elsewhere, or kernels do not see it.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            return self._registry.annex(block)

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
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            first = self.parts.homes.open_sources().add(paths, check)
            self.flush()
            self.parts.transfers.ahead.cancel()
            before = self.parts.mover
            self._opened.open_mover(self.parts)
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
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            self._registry.make_writable(blocks)

    def remove_blocks(self, blocks: Sequence[Block]) -> None:
        """Takes blocks out and gives their space back; what they hold is lost.

        Blocks that are gone already are passed over.

        Raises:
            InvariantError: If one of them is leased; nothing is changed then.
        """
        if self.gate.closed:
            return
        with self.lock:
            self._registry.remove(blocks)

    def can_hold(self, nbytes: int) -> bool:
        """Whether HBM can hold so many bytes at one time; it is made larger for that if need be."""
        with self.lock:
            return self.parts.limit.require(nbytes)

    def record(self, block: Block) -> Record:
        """Returns the table's row of a block."""
        return self.parts.table[block.id]

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
        if self.gate.closed or self.gate.torn:
            self.gate.guard()  # before the lock as well: a forked child may find it taken for ever
        with self.lock:
            return self.acquirer.acquire(block)

    def again(self, block: Block) -> Slot:
        """Leases a block as a part of its last use, just before; see :meth:`Acquirer.again`.

        Where it is not as it was then, it is acquired.
        """
        if self.gate.closed or self.gate.torn:
            self.gate.guard()
        with self.lock:
            return self.acquirer.again(block) or self.acquirer.acquire(block)

    def acquire_all(self, blocks: Sequence[Block]) -> list[Slot]:
        """Acquires several blocks that are used together, or none.

        Until all are there no caller has seen an address of theirs, so they may be moved to make
        room for each other.
        """
        if self.gate.closed or self.gate.torn:
            self.gate.guard()
        with self.lock:
            return self.acquirer.acquire_all(blocks)

    def release(self, block: Block, *, dirty: bool = False) -> None:
        """Gives a lease back."""
        with self.lock:
            self.parts.table.release(block.id, dirty=dirty)

    def mark_dirty(self, block: Block) -> None:
        """Marks a leased block as written."""
        with self.lock:
            self.parts.table.mark_dirty(block.id)

    def slot_at_hand(self, block: Block) -> Slot | None:
        """Returns the slot of a block that is in HBM and usable, without leasing it."""
        with self.lock:
            self.parts.deferred.pay(block.id)
            record = self.parts.table[block.id]
            record.copied = False  # compute may read it
            return self.parts.slots.current[block.id] if record.usable else None

    def discard(self, block: Block) -> None:
        """Discards a block's contents; aliases of its bytes keep them as they were."""
        with self.lock:
            self.parts.deferred.pay(block.id)
            self.parts.transfers.settle(block.id)
            self.parts.transfers.ahead.drop(block.id)
            self.parts.evictor.forget(self.parts.table[block.id], gone=False)
            self.parts.transfers.failing.discard(block.id)

    def read(self, block: Block) -> list[torch.Tensor]:
        """Returns copies of a block's tensors in ordinary host memory.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        self.gate.guard()
        with self.lock, outside_inference(), torch.no_grad():
            self.gate.guard()
            self.parts.deferred.pay(block.id)
            return self.block_io.read(block)

    def read_one(self, block: Block, index: int) -> torch.Tensor:
        """Returns a copy of one of a block's tensors in ordinary host memory.

        A block in a file is brought up for it, if HBM has room: others of it may be asked for next.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        self.gate.guard()
        with self.lock, outside_inference(), torch.no_grad():
            self.gate.guard()
            self.parts.deferred.pay(block.id)
            record, leased = self.parts.table[block.id], False
            if record.home is Tier.NVME and record.in_hbm is State.ABSENT:
                with suppress(CapacityError):
                    self.acquire(block)
                    leased = True
            try:
                return self.block_io.views(block)[index].to("cpu", copy=True)
            finally:
                if leased:
                    self.release(block)

    def restore(self, block: Block, begin: int, end: int) -> None:
        """Copies home bytes over a leased copy once more; see :meth:`BlockIo.restore`."""
        with self.lock, outside_inference(), torch.no_grad():
            self.block_io.restore(block, begin, end)

    def write_home(self, block: Block, tensors: Sequence[torch.Tensor | None]) -> None:
        """Writes a block without data straight to its home; see :class:`BlockIo`."""
        self.gate.guard()
        with self.lock, outside_inference(), torch.no_grad():
            self.gate.guard()
            self.block_io.write_home(block, tensors)

    def fill_from_files(self, wanted: Sequence[tuple[Block, StoredBlock]]) -> None:
        """Reads blocks without data from files straight to their homes; see :class:`FileFills`."""
        self.gate.guard()
        with self.lock, outside_inference(), torch.no_grad():
            self.gate.guard()
            FileFills(self.parts.transfers).fill(wanted)

    def read_files(self, ranges: Sequence[SourceRange], nbytes: int) -> torch.Tensor:
        """Returns runs of bytes of files in fresh host memory; see :class:`FileFills`."""
        self.gate.guard()
        with self.lock, outside_inference(), torch.no_grad():
            self.gate.guard()
            return FileFills(self.parts.transfers).read(ranges, nbytes)

    # -- passes ----------------------------------------------------------

    def begin_pass(
        self,
        key: Hashable,
        guess: Sequence[int] = (),
        *,
        like: Hashable = None,
        load: int = 0,
        again: bool = False,
    ) -> None:
        """Begins a pass; see :class:`~tiermem.core.schedule.Planner`.

        Args:
            key: Which pass this is.
            guess: Order to assume where this pass has not been seen before.
            like: Another pass, whose order is assumed rather than ``guess`` if it has been seen.
            load: Its tokens, rounded; 0 where they are not known.
            again: Whether to assume that it comes again, where nothing is known to follow it.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            self.threads.note()
            if self.parts.copy.capturing():
                return  # nothing runs now; replays are not seen at all
            if self._heap is not None:
                self._heap.trim_if_grown()
            if self.parts.limit.follow(key):
                self.replay.repair()
            self.parts.pass_timer.begin(timed(key, load))
            self.prefetcher.end_pass()
            self.replay.end()
            self.parts.planner.begin(key, guess, like=like, again=again)
            outlook, number = self.prefetcher.plan(load)
            packed = self.parts.transfers.packed
            if packed.hold_dram:
                longest = self.parts.pass_timer.estimates.longest(timed(key, load))
                packed.begin(load, link_binds=outlook.link_binds(longest))
            self.parts.evictor.rearrange(self.parts.planner.schedule)
            if not self.replay.begin(outlook, number):
                self.prefetcher.run()

    def goes_on(self) -> bool:
        """Whether a pass that uses no block may be taken for a part of the last one, which did not.

        Then nothing is learned, planned or measured of it; under the manager's lock.
        """
        planner, parts = self.parts.planner, self.parts
        if planner.key is None or planner.last != -1 or parts.pass_timer.pending:
            return False
        if self._heap is not None:
            self._heap.trim_if_grown()
        return not parts.limit.follow(planner.key)

    def fill_ahead(self, order: Sequence[int], held: Collection[int]) -> None:
        """Begins to bring up what the first pass of a model begins with; see :class:`FirstFill`.

        Args:
            order: Ids of its blocks, in the order of the modules.
            held: Ids of those that are held while others are used.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            FirstFill(self.parts, self.prefetcher, self.replay.arranger).fill(order, held)

    def prepare_stamps(self, uses: int) -> None:
        """Makes ahead what measuring a first pass takes, where blocks move in it.

        Args:
            uses: How many uses of blocks it has.
        """
        with self.lock:
            if not self.parts.table.all_fit:
                self.parts.pass_timer.clock.prepare(_STAMPS * uses)

    def end_pass(self) -> None:
        """Ends the pass under way; without this call it ends when the next begins."""
        pass_timer, prefetcher = self.parts.pass_timer, self.prefetcher
        prefetcher.ended = True
        with self.lock:
            pass_timer.left()
            if pass_timer.ended() or prefetcher.overdue:
                prefetcher.plan_next()

    def flush(self) -> None:
        """Waits until no transfer is under way, and frees what belongs to no block."""
        with self.lock:
            self.parts.transfers.settle_all()
            self.parts.evictor.reap()

    def try_fill(self, record: Record, position: int) -> bool:
        """Begins to fetch a block ahead of its use, if that evicts nothing needed sooner.

        One that holds no data gets its place.

        Args:
            record: A block that is in HBM neither now nor soon.
            position: Uses until it is needed.

        Returns:
            Whether the fetch has begun.
        """
        if not record.defined:
            extent = self.parts.evictor.place_in_ring(record.block, position)
            if extent is None:
                return False
            self.parts.transfers.blank(record, extent, ahead=True)
            self.parts.evictor.order.note_change(record.block.id)
            return True
        if record.home is Tier.NVME and not self.prefetcher.disk.staged(record, position):
            return False  # on its way into DRAM: it takes no room here until it is there
        room = self.parts.evictor.place(record.block, position)
        if room is None:
            return False
        self.parts.transfers.fill(record, room.extent)
        if room.left is not None or not self.parts.evictor.ring.uses:
            self.replay.recordings.note(record, room, position)  # else it is not replayed
        self.parts.evictor.order.note_change(record.block.id)
        self.parts.counters.prefetches += 1
        return True

    # -- reports ---------------------------------------------------------

    def stats(self) -> Stats:
        """Returns what happened so far."""
        with self.lock:
            homes, settings = self.parts.homes, self.parts.settings
            on_disk = homes.swap.capacity if homes.swap is not None else 0
            files = homes.swap or homes.sources
            self.replay.add_up()
            return stats_of(
                self.parts.counters,
                used=(self.parts.table.hbm.used, homes.dram.used, homes.nvme_used),
                budget=(
                    self.parts.table.hbm.capacity
                    if self.parts.limit.open or settings.hbm_auto
                    else settings.hbm,
                    settings.dram,
                    settings.nvme_bytes or on_disk,
                ),
                peak=(self.parts.table.hbm.peak, homes.dram.peak, homes.nvme_peak),
                io=self._opened.io(),
                direct=files is not None and files.direct,
                efficiency=self.parts.pass_timer.efficiency(),
                ahead=(self.prefetcher.disk.reads_into, self.parts.transfers.ahead.kept),
                packed=self.parts.transfers.packed.nbytes,
                kept=self.parts.evictor.regions.kept,
                mapped=self.parts.slots.arena.mapped,
            )

    def residency(self) -> list[ResidencyRow]:
        """Returns where every block is."""
        with self.lock:
            if not self.gate.closed:
                self.parts.transfers.poll()
            return [row_of(record) for record in self.parts.table]

    def close(self) -> None:
        """Stops every transfer and gives memory and disk space back; idempotent.

        Cut short (by Ctrl-C), it can be called again.
        """
        if self._given_back or self.gate.forked:
            return
        with self.lock:
            self.gate.closed = True
            if hasattr(self, "replay"):
                self.replay.interrupt()
            self._give_back()
            self._given_back = True

    def stop(self) -> None:
        """Stops every transfer for good; what is in HBM and at home in DRAM can still be read.

        The first half of :meth:`close`: page-locked memory is ordinary memory from here on.
        """
        with self.lock, ExitStack() as steps:  # runs them last first
            self.gate.closed = True
            self.replay.interrupt()
            steps.callback(self.parts.homes.arena.unlock)
            steps.callback(self.parts.copy.synchronize)
            if self.parts.mover is not None:
                steps.callback(self.parts.mover.close)
            steps.callback(self.parts.deferred.wait)

    def _give_back(self) -> None:
        """Closes everything that was opened, also where closing one of them fails."""
        first = ExitStack()  # runs them last first
        if hasattr(self, "parts"):
            for holder in list(self.parts.holders.values()):
                first.callback(holder.unpoint)
        if hasattr(self, "zero_copy"):
            first.callback(self.zero_copy.clear)
        for close in self.closers:
            first.callback(close)
        if hasattr(self, "parts"):
            first.callback(self.parts.deferred.wait)
        self._opened.close(first)

    def before_fork(self) -> None:
        """Shares with forked children the HBM bytes that have aliases (CPU), and no others."""
        self._forking = self.lock.acquire(blocking=False)
        if self._forking:
            slots = self.parts.slots.current.values()
            seen = [s.extent for s in slots if s.aliased and s.extent.offset < ANNEX]
            self.parts.slots.arena.show_to_children([*seen, *self.parts.table.orphans()])
        else:  # another thread has the lock: which bytes have aliases is unknown
            self.parts.slots.arena.show_to_children(None)

    def after_fork(self) -> None:
        """Hides HBM from children again."""
        self.parts.slots.arena.show_to_children(())
        if self._forking:
            self._forking = False
            self.lock.release()

    def forked(self) -> None:
        """In a forked child: refuses further calls, closes the files and waits for no thread."""
        # another thread of the parent may have had the lock, and will never give it back here
        self.lock = threading.RLock()
        self.gate.closed = self.gate.forked = True
        self.replay.interrupt()
        if self._given_back:
            return
        if self.parts.mover is not None:
            self.parts.mover.forked()
        self.parts.homes.forked()
        for holder in list(self.parts.holders.values()):
            holder.forked()

    def cut_short(self) -> None:
        """Notes that an exception was raised at a line of tiermem's own: anything may be half done.

        The next call from outside has :mod:`tiermem.runtime.repair` put it right.
        """
        self.gate.torn = self.gate.unsure = True
        self.replay.interrupt()  # so that the next use checks the gate

    def repair_blocks(self) -> None:
        """Makes table, slots and transfers agree; see :mod:`tiermem.runtime.repair`."""
        repair_blocks(self.parts, self.host_loans, self.zero_copy, self.prefetcher, self.replay)

    # -- inside ----------------------------------------------------------

    def _repair(self) -> None:
        """Puts the blocks right, unless an operation of this very thread is under way."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return
        with self.lock:
            if self.gate.torn:
                self.repair_blocks()
                self.gate.torn = False
