"""The block manager: joins the residency table, the memories and the movers.

All blocks, whatever their role, are managed here: :meth:`BlockManager.acquire`
fetches a block into HBM and leases it, :meth:`BlockManager.release` gives the
lease back. Only the manager's parts write the residency table. The manager polls for completed
transfers; there are no callbacks.
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
"""Stamps per use: begin and end of the use, and of the copy for it."""


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
            engine: Creates the I/O engine; by default the best one that works here.
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
        """Creates blocks and reserves a home for each; if one does not fit, for none.

        Args:
            wanted: Name, role and tensors of each block.
            home: Overrides the policy's home: one for all, or one each (None for the policy's).
            stored: For each block, the ranges of files of :meth:`attach_files` that have its
                tensors (one sequence of ranges per tensor); None for a block that gets an ordinary
                home. By default all blocks get one.

        Returns:
            The blocks, in order; those that are not ``stored`` hold no data yet.

        Raises:
            CapacityError: Naming the block and the smallest budget that would be enough.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            return self._registry.add(wanted, home, stored)

    def annex(self, block: Block) -> bool:
        """Makes kernels use a block permanently where it is in DRAM, as if that were a part of HBM.

        The block takes no room in HBM and is never copied; access to it is as slow as the bus.

        Args:
            block: The block; it holds no data yet.

        Returns:
            Whether this was done: not if its home is elsewhere, or kernels cannot address it.
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
                that is not the expected file.

        Returns:
            The number of the first of them; the others follow.

        Raises:
            CapacityError: If DRAM has no room for the staging chunks of reads.
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
        """Gives blocks whose home is a checkpoint file a writable home; all of them, or none.

        Other blocks are skipped. Policy ``"auto"`` is treated as ``"nvme"`` if there is no swap
        file.

        Raises:
            CapacityError: If a tier cannot hold them.
            StorageError: If one cannot be read; it and the blocks after it are unchanged.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            self._registry.make_writable(blocks)

    def remove_blocks(self, blocks: Sequence[Block]) -> None:
        """Removes blocks and gives their space back; what they hold is lost.

        Blocks that are already removed are skipped.

        Raises:
            InvariantError: If one of them is leased; nothing is changed then.
        """
        if self.gate.closed:
            return
        with self.lock:
            self._registry.remove(blocks)

    def can_hold(self, nbytes: int) -> bool:
        """Whether HBM can hold this many bytes at once; its limit is raised if necessary."""
        with self.lock:
            return self.parts.limit.require(nbytes)

    def record(self, block: Block) -> Record:
        """Returns the table's row of a block."""
        return self.parts.table[block.id]

    # -- use -------------------------------------------------------------

    def acquire(self, block: Block) -> Slot:
        """Fetches a block into HBM and leases it.

        A block that holds no data yet gets a place whose bytes are undefined, to be written.

        Returns:
            Its slot; the current stream waits for the bytes. The host does not wait, except for
            bytes that are read from a file.

        Raises:
            CapacityError: If HBM cannot hold it beside the leased blocks.
            StorageError: If its bytes cannot be read, or those of a block to be evicted cannot be
                written.
            ConfigError: If a CUDA graph is being captured and the block may move.
            ClosedError: After ``close()``, or in a forked child.
        """
        if self.gate.closed or self.gate.torn:
            self.gate.guard()  # also before the lock, which may be held for ever in a forked child
        with self.lock:
            return self.acquirer.acquire(block)

    def again(self, block: Block) -> Slot:
        """Leases a block as a part of its last use, just before; see :meth:`Acquirer.again`.

        If its state has changed since then, it is acquired.
        """
        if self.gate.closed or self.gate.torn:
            self.gate.guard()
        with self.lock:
            return self.acquirer.again(block) or self.acquirer.acquire(block)

    def acquire_all(self, blocks: Sequence[Block]) -> list[Slot]:
        """Acquires several blocks that are used together, or none.

        Until all of them are in HBM, no caller has seen an address of theirs, so they may be moved
        to make room for each other.
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

        A block in a file is fetched for it if HBM has room, as its other tensors may be read next.

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
        """Copies home bytes over a leased copy again; see :meth:`BlockIo.restore`."""
        with self.lock, outside_inference(), torch.no_grad():
            self.block_io.restore(block, begin, end)

    def write_home(self, block: Block, tensors: Sequence[torch.Tensor | None]) -> None:
        """Writes a block without data directly to its home; see :class:`BlockIo`."""
        self.gate.guard()
        with self.lock, outside_inference(), torch.no_grad():
            self.gate.guard()
            self.block_io.write_home(block, tensors)

    def fill_from_files(self, wanted: Sequence[tuple[Block, StoredBlock]]) -> None:
        """Reads blocks without data from files directly to their homes; see :class:`FileFills`."""
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
            key: Identifies the pass.
            guess: Order to assume if this pass has not been seen before.
            like: Another pass, whose order is assumed rather than ``guess`` if it has been seen.
            load: Its tokens, rounded; 0 if unknown.
            again: Whether to assume that it is repeated, if it is not known what follows it.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            self.threads.note()
            if self.parts.copy.capturing():
                return  # no kernel runs during capture, and replays are not seen at all
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
        """Whether a pass that uses no block counts as a part of the last one, which used none.

        Then it is not recorded, planned or measured; under the manager's lock.
        """
        planner, parts = self.parts.planner, self.parts
        if planner.key is None or planner.last != -1 or parts.pass_timer.pending:
            return False
        if self._heap is not None:
            self._heap.trim_if_grown()
        return not parts.limit.follow(planner.key)

    def fill_ahead(self, order: Sequence[int], held: Collection[int]) -> None:
        """Begins to fetch what the first pass of a model uses first; see :class:`FirstFill`.

        Args:
            order: Ids of its blocks, in the order of the modules.
            held: Ids of those that are held while others are used.
        """
        self.gate.guard()
        with self.lock:
            self.gate.guard()
            FirstFill(self.parts, self.prefetcher, self.replay.arranger).fill(order, held)

    def prepare_stamps(self, uses: int) -> None:
        """Creates the stamps beforehand that measuring a first pass needs, if blocks move in it.

        Args:
            uses: How many uses of blocks it has.
        """
        with self.lock:
            if not self.parts.table.all_fit:
                self.parts.pass_timer.clock.prepare(_STAMPS * uses)

    def end_pass(self) -> None:
        """Ends the current pass; without this call it ends when the next one begins."""
        pass_timer, prefetcher = self.parts.pass_timer, self.prefetcher
        prefetcher.ended = True
        with self.lock:
            pass_timer.left()
            if pass_timer.ended() or prefetcher.overdue:
                prefetcher.plan_next()

    def flush(self) -> None:
        """Waits until no transfer is in progress, and frees memory that belongs to no block."""
        with self.lock:
            self.parts.transfers.settle_all()
            self.parts.evictor.reap()

    def try_fill(self, record: Record, position: int) -> bool:
        """Begins to prefetch a block, if nothing that is needed sooner has to be evicted for it.

        A block that holds no data gets its place.

        Args:
            record: A block that is neither in HBM nor being fetched.
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
            return False  # being copied to DRAM: it takes no HBM before that is done
        room = self.parts.evictor.place(record.block, position)
        if room is None:
            return False
        self.parts.transfers.fill(record, room.extent)
        if room.left is not None or not self.parts.evictor.ring.uses:
            self.replay.recordings.note(record, room, position)  # otherwise it is not replayed
        self.parts.evictor.order.note_change(record.block.id)
        self.parts.counters.prefetches += 1
        return True

    # -- reports ---------------------------------------------------------

    def stats(self) -> Stats:
        """Returns the counters."""
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

        If it is interrupted (by Ctrl-C), it can be called again.
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
        """Stops every transfer for good; the bytes in HBM and in DRAM can still be read.

        The first half of :meth:`close`: page-locked memory is ordinary memory after it.
        """
        with self.lock, ExitStack() as steps:  # run in reverse order
            self.gate.closed = True
            self.replay.interrupt()
            steps.callback(self.parts.homes.arena.unlock)
            steps.callback(self.parts.copy.synchronize)
            if self.parts.mover is not None:
                steps.callback(self.parts.mover.close)
            steps.callback(self.parts.deferred.wait)

    def _give_back(self) -> None:
        """Closes everything that was opened, even if closing one of them fails."""
        first = ExitStack()  # run in reverse order
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
        """Makes the HBM bytes that have aliases visible to forked children (CPU), and no others."""
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
        # another thread of the parent may have held the lock, and cannot release it in the child
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
        """Notes that an exception was raised in tiermem's own code: any operation may be half done.

        The next call from outside repairs that with :mod:`tiermem.runtime.repair`.
        """
        self.gate.torn = self.gate.unsure = True
        self.replay.interrupt()  # so that the next use checks the gate

    def repair_blocks(self) -> None:
        """Makes table, slots and transfers consistent; see :mod:`tiermem.runtime.repair`."""
        repair_blocks(self.parts, self.host_loans, self.zero_copy, self.prefetcher, self.replay)

    # -- inside ----------------------------------------------------------

    def _repair(self) -> None:
        """Repairs the blocks, unless this thread is in an operation on them."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return
        with self.lock:
            if self.gate.torn:
                self.repair_blocks()
                self.gate.torn = False
