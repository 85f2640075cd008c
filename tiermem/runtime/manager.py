"""The one that joins the residency table and the movers.

All blocks, whatever their role, go through here: :meth:`BlockManager.acquire`
brings a block into HBM and leases it, :meth:`BlockManager.release` gives the
lease back. The table is written by nobody else. Completions come up only when
something here polls; no transfer calls back.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from tiermem.config import Settings, format_size
from tiermem.core.block import Block, Extent, Role, TensorSpec, Tier
from tiermem.core.cost import eviction_cost
from tiermem.core.layout import TensorShape, pack
from tiermem.core.residency import Move, Record, ResidencyTable, State
from tiermem.core.schedule import Planner
from tiermem.errors import CapacityError, ClosedError, InvariantError, StorageError
from tiermem.io.probe import choose_engine
from tiermem.runtime.compact import compact
from tiermem.runtime.homes import HomeRequest, Homes
from tiermem.runtime.prefetch import Prefetcher
from tiermem.runtime.process import generation
from tiermem.runtime.slots import Slot, SlotCache
from tiermem.runtime.stats import Counters, ResidencyRow, Stats
from tiermem.runtime.timeline import Timeline
from tiermem.storage.arena import Arena, DeviceArena, HostArena
from tiermem.transfer.copy import (
    CopyEngine,
    CudaChunkCopier,
    CudaCopyEngine,
    Event,
    HostCopyEngine,
)
from tiermem.transfer.filemover import FileMover, FileTransfer

_SOFT = 1e15
_RESIDENT = 1e12


class Holder(Protocol):
    """Something that points parameters at a block without leasing it."""

    def unpoint(self) -> None:
        """Points them elsewhere; the block is about to leave HBM."""
        ...

    def repoint(self, slot: Slot) -> None:
        """Points them at the block's new place."""
        ...

    def leases(self) -> int:
        """Returns how many leases of the block are this holder's own."""
        ...


class BlockManager:
    """Blocks in three tiers, under one roof and one lock."""

    def __init__(self, settings: Settings) -> None:
        """Opens the tiers.

        Raises:
            ConfigError: If a path cannot be used.
            CapacityError: If memory or disk space is not there.
        """
        self.settings = settings
        self.device = torch.device(settings.device)
        cuda = self.device.type == "cuda"
        self.homes = Homes(settings.dram, settings.nvme, settings.nvme_bytes, page_lock=cuda)
        self.lock = threading.RLock()
        self.counters = Counters()
        self.timeline = Timeline()
        self.planner = Planner()
        self.holders: dict[int, Holder] = {}
        self.unseen: dict[int, int] = {}
        self._generation = generation()
        self._closed = False
        # what leaves the stand-in for HBM is overwritten, so that a wrong residency shows; on a
        # GPU that costs bandwidth, and is for tests
        self.poison = not cuda or os.environ.get("TIERMEM_POISON") == "1"
        self._next_id = 0
        self._slots_by_id: dict[int, Slot] = {}
        self.by_address: dict[int, Slot] = {}
        self._ready: dict[int, Event] = {}
        self._home_ready: dict[int, Event] = {}
        self._flights: dict[int, tuple[FileTransfer, Move]] = {}
        self._flight_of: dict[int, int] = {}
        self.copy: CopyEngine = CudaCopyEngine(self.device) if cuda else HostCopyEngine()
        self.mover: FileMover | None = None
        self.io_engine, self.io_reason = "none", "there is no NVMe tier"
        try:
            self.arena = self._open_hbm(settings.hbm)
            self.table = ResidencyTable(self.arena.capacity)
            self.slots = SlotCache(self.arena)
            self._open_mover()
        except BaseException:
            self.homes.close()
            raise
        self.prefetcher = Prefetcher(self)

    # -- blocks ----------------------------------------------------------

    def add_blocks(
        self, wanted: Sequence[tuple[str, Role, Sequence[TensorShape]]], *, home: str | None = None
    ) -> list[Block]:
        """Packs and enters blocks, with home space for all of them or an error for all.

        Args:
            wanted: Name, role and tensors of each block.
            home: Overrides the policy's home.

        Returns:
            The blocks, in order; they hold no data yet.

        Raises:
            CapacityError: Naming the block and the least budget that would do.
        """
        with self.lock:
            self.guard()
            blocks, requests = [], []
            for name, role, shapes in wanted:
                specs, nbytes = pack(shapes)
                blocks.append(Block(self._next_id, name, role, nbytes, specs))
                self._next_id += 1
                tier = home or self.settings.policy.home(role)
                requests.append(HomeRequest(name, nbytes, tier))  # type: ignore[arg-type]
            places = self.homes.reserve(requests)
            for block, (tier, extent) in zip(blocks, places, strict=True):
                self.table.add(block, tier, extent)
            self._fix([b for b, (tier, _) in zip(blocks, places, strict=True) if tier is Tier.HBM])
            return blocks

    def remove_blocks(self, blocks: Sequence[Block]) -> None:
        """Takes blocks out and gives their space back; what they hold is lost."""
        with self.lock:
            for block in blocks:
                self._settle(block.id)
                record = self.table[block.id]
                record.fixed = False
                self._unpoint(record)
                self.table.remove(block.id)
                if record.home_extent is not None:
                    self.homes.release(record.home, record.home_extent)
                self.slots.forget(block.id)
                self._forget(block.id)
            self.planner.forget({block.id for block in blocks})

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
            ClosedError: After ``close()``, or in a forked child.
        """
        with self.lock:
            self.guard()
            record = self.table[block.id]
            moved_on = self.planner.touch(block.id)
            if record.usable:
                self.counters.hits += 1
            else:
                self._bring(record)
            self.table.lease(block.id)
            self.copy.use(self._ready.get(block.id))
            if moved_on:
                try:
                    self.prefetcher.run()
                except BaseException:
                    self.table.release(block.id)
                    raise
            return self._slots_by_id[block.id]

    def acquire_all(self, blocks: Sequence[Block]) -> list[Slot]:
        """Acquires several blocks that are used together, or none.

        Until all are there nobody has seen an address of theirs, so they may be moved to make
        room for each other.
        """
        with self.lock:
            taken: list[Block] = []
            try:
                for block in blocks:
                    self.acquire(block)
                    taken.append(block)
                    self.unseen[block.id] = self.unseen.get(block.id, 0) + 1
                return [self._slots_by_id[block.id] for block in blocks]
            except BaseException:
                for block in taken:
                    self.table.release(block.id)
                raise
            finally:
                for block in taken:
                    self.unseen[block.id] -= 1
                    if not self.unseen[block.id]:
                        del self.unseen[block.id]

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
        record = self.table[block.id]
        return self._slots_by_id[block.id] if record.usable else None

    def discard(self, block: Block) -> None:
        """Forgets what a block holds."""
        with self.lock:
            self._settle(block.id)
            record = self.table[block.id]
            self._unpoint(record)
            self.table.discard(block.id)
            if record.extent is None:
                self._forget(block.id)

    def read(self, block: Block) -> list[torch.Tensor]:
        """Returns copies of a block's tensors in ordinary host memory.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        with self.lock, torch.inference_mode(False):
            self.guard()
            record = self.table[block.id]
            if record.in_hbm is State.FILLING:
                self._settle(block.id)
            host = torch.empty(block.nbytes, dtype=torch.uint8)
            if record.in_hbm in (State.VALID, State.DIRTY, State.DRAINING):
                self.copy.use(self._ready.get(block.id))
                host.copy_(self._slots_by_id[block.id].bytes)
            elif record.home is Tier.DRAM and record.home_extent is not None:
                self.copy.wait(self._home_ready.get(block.id))
                host.copy_(self.homes.arena.bytes_of(record.home_extent))
            elif record.home_extent is not None:
                transfer = self._need_mover().read(record.home_extent, host, label=block.name)
                self._wait(transfer)
                if transfer.error is not None:
                    raise transfer.error
            return [_view(host, spec) for spec in block.tensors]

    def write_home(self, block: Block, tensors: Sequence[torch.Tensor | None]) -> None:
        """Writes a block that is not in HBM straight to its home.

        Args:
            block: The block; its home is not HBM.
            tensors: One per spec; None leaves that part undefined.

        Raises:
            StorageError: If the home is a file and cannot be written.
        """
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.guard()
            record = self.table[block.id]
            extent = record.home_extent
            if extent is None or record.in_hbm is not State.ABSENT:
                raise InvariantError(f"block {block.name!r} is not at home below HBM")
            in_dram = record.home is Tier.DRAM
            target = (
                self.homes.arena.bytes_of(extent)
                if in_dram
                else torch.zeros(block.nbytes, dtype=torch.uint8)
            )
            for spec, tensor in zip(block.tensors, tensors, strict=True):
                if tensor is not None:
                    _view(target, spec).copy_(tensor)
            if not in_dram:
                transfer = self._need_mover().write(extent, target, label=block.name)
                self._wait(transfer)
                if transfer.error is not None:
                    raise transfer.error
            self.table.home_written(block.id)

    # -- passes ----------------------------------------------------------

    def begin_pass(self, key: Hashable, guess: Sequence[int] = ()) -> None:
        """Says that a new sweep begins; see :class:`~tiermem.core.schedule.Planner`."""
        with self.lock:
            self.guard()
            self.planner.begin(key, guess)
            self.poll()
            self.prefetcher.run()

    def poll(self) -> None:
        """Takes up every transfer that has finished."""
        if self.mover is None:
            return
        for transfer in self.mover.poll():
            self._land(transfer)

    def flush(self) -> None:
        """Waits until no transfer is under way."""
        with self.lock:
            for block_id in list(self._flights):
                self._settle(block_id)

    def try_fill(self, record: Record, position: int) -> bool:
        """Begins to fetch a block ahead of its use, if that evicts nothing needed sooner.

        Args:
            record: A block that is in HBM neither now nor soon.
            position: Uses until it is needed.

        Returns:
            Whether the fetch has begun.
        """
        extent = self._place(record.block, position)
        if extent is None:
            return False
        self._start_fill(record, extent, urgent=False)
        self.counters.prefetches += 1
        return True

    # -- reports ---------------------------------------------------------

    def stats(self) -> Stats:
        """Returns what happened so far."""
        with self.lock:
            counters = self.counters
            busy = counters.busy_ns
            lost = min(busy, counters.stall_ns + counters.copy_ns)
            homes = self.homes
            on_disk = homes.swap.capacity if homes.swap is not None else 0
            nvme_budget = self.settings.nvme_bytes or on_disk
            return Stats(
                links=counters.links(),
                hits=counters.hits,
                misses=counters.misses,
                prefetches=counters.prefetches,
                evictions=counters.evictions,
                write_backs=counters.write_backs,
                relocations=counters.relocations,
                stalls=counters.stalls,
                stall_seconds=counters.stall_ns / 1e9,
                errors=counters.errors,
                used={
                    "hbm": self.table.hbm.used,
                    "dram": homes.dram.used,
                    "nvme": homes.nvme_used,
                },
                budget={
                    "hbm": self.settings.hbm,
                    "dram": self.settings.dram,
                    "nvme": nvme_budget,
                },
                peak={
                    "hbm": self.table.hbm.peak,
                    "dram": homes.dram.peak,
                    "nvme": homes.nvme_peak,
                },
                io_engine=self.io_engine,
                io_reason=self.io_reason,
                direct_io=homes.swap is not None and homes.swap.direct,
                compute_seconds=(busy - lost) / 1e9,
                efficiency=(busy - lost) / busy if busy else None,
            )

    def residency(self) -> list[ResidencyRow]:
        """Returns where every block is."""
        with self.lock:
            self.poll()
            rows = []
            for record in self.table:
                tiers = {"hbm": record.in_hbm.value}
                if record.home is not Tier.HBM:
                    tiers[record.home.value] = record.at_home.value
                block = record.block
                rows.append(
                    ResidencyRow(
                        block.name,
                        block.role.value,
                        record.home.value,
                        block.nbytes,
                        tiers,
                        record.leases,
                    )
                )
            return rows

    def close(self) -> None:
        """Stops every transfer and gives memory and disk space back; idempotent."""
        if self._closed or self._generation != generation():
            return
        with self.lock:
            self._closed = True
            for holder in list(self.holders.values()):
                holder.unpoint()
            if self.mover is not None:
                self.mover.close()
            self.copy.synchronize()
            self._slots_by_id.clear()
            self.by_address.clear()
            self.slots.clear()
            self.arena.close()
            self.homes.close()

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
            raise ClosedError("this TierManager is closed; open a new one and wrap again")

    # -- inside: in ------------------------------------------------------

    def _open_hbm(self, nbytes: int) -> Arena:
        if self.device.type == "cuda":
            return DeviceArena(nbytes // 4096 * 4096, self.device)
        return HostArena(Tier.HBM, nbytes // 4096 * 4096)

    def _open_mover(self) -> None:
        if self.homes.swap is None or self.homes.staging is None:
            return
        factory, self.io_engine, self.io_reason = choose_engine()
        copier = CudaChunkCopier(self.copy) if isinstance(self.copy, CudaCopyEngine) else None
        self.mover = FileMover(
            self.homes.swap, factory, self.homes.staging, self.homes.chunk, copier
        )

    def _fix(self, blocks: Sequence[Block]) -> None:
        """Gives blocks whose home is HBM their place for good."""
        for block in blocks:
            try:
                extent = self._place(block, None)
            except CapacityError:
                self.remove_blocks(blocks)
                raise
            if extent is not None:
                self.copy.claim(extent)
                self.table.place_blank(block.id, extent)
                self.table[block.id].fixed = True
                self._enter(block, extent)

    def _bring(self, record: Record) -> None:
        """Makes the HBM copy usable, waiting for what has to be waited for."""
        self.counters.misses += 1
        block = record.block
        while not record.usable:
            if record.in_hbm is not State.ABSENT:
                filling = record.in_hbm is State.FILLING
                error = self._settle(block.id)
                if error is not None and filling:
                    raise error
                continue
            extent = self._place(block, None)
            if extent is None:
                raise InvariantError(f"no place for block {block.name!r}")
            if record.defined:
                self._start_fill(record, extent, urgent=True)
            else:
                self.copy.claim(extent)
                self.table.place_blank(block.id, extent)
                self._enter(block, extent)

    def _start_fill(self, record: Record, extent: Extent, *, urgent: bool) -> None:
        block = record.block
        move = self.table.begin_fill(block.id, extent)
        slot = self._enter(block, extent)
        try:
            if record.home is Tier.DRAM:
                started = time.perf_counter_ns()
                source = self.homes.arena.bytes_of(move.source_extent)
                event = self.copy.up(slot.bytes, source, extent, self._home_ready.get(block.id))
                if event is not None:
                    self._ready[block.id] = event
                self._copied("dram->hbm", block, started)
            else:
                self.copy.prepare_up(extent)
                transfer = self._need_mover().read(
                    move.source_extent, slot.bytes, label=block.name, urgent=urgent
                )
                self._flights[block.id] = (transfer, move)
                self._flight_of[id(transfer)] = block.id
                return
        except BaseException:
            self.table.end_fill(block.id, ok=False)
            raise
        self.table.end_fill(block.id, ok=True)

    # -- inside: out -----------------------------------------------------

    def _place(self, block: Block, position: int | None) -> Extent | None:
        """Makes room for a block.

        Args:
            block: What needs it.
            position: Uses until then, for a fetch ahead, which may not wait and may not evict
                what is needed sooner; None where it is needed now.
        """
        tried_gc = False
        while True:
            extent = self.table.hbm.allocate(block.nbytes)
            if extent is not None:
                return extent
            window = self.table.hbm.cheapest_window(
                block.nbytes, lambda offset: self._price(offset, position)
            )
            if window is None:
                if position is not None:
                    return None
                if self._flights:
                    self._settle(next(iter(self._flights)))
                elif not tried_gc:
                    tried_gc = True
                    gc.collect()  # a cycle may hold the last alias of something
                else:
                    extent = compact(self, block.nbytes)
                    if extent is None:
                        raise self._too_small(block)
                    return extent
                continue
            if not self._clear(window.victims, wait=position is None):
                return None
            if all(offset not in self._offsets() for offset in window.victims):
                return self.table.hbm.take(window.extent)

    def _offsets(self) -> dict[int, Record]:
        return self.table._at

    def _price(self, offset: int, position: int | None) -> float | None:
        """What evicting the block at ``offset`` costs; None where it has to stay."""
        record = self.table.at(offset)
        if record.leases or record.fixed or not record.usable:
            return None
        block = record.block
        slot = self._slots_by_id[block.id]
        if slot.aliased:
            return None
        distance = self.planner.distance(block.id)
        if position is not None and (distance <= position or slot.pointed):
            return None
        price = eviction_cost(block.nbytes, distance, dirty=record.in_hbm is State.DIRTY)
        if block.id in self.prefetcher.residents:
            if position is not None:
                return None
            price += _RESIDENT
        return price + _SOFT if slot.pointed else price

    def _clear(self, victims: Sequence[int], *, wait: bool) -> bool:
        """Evicts victims; returns whether it may go on at once."""
        records = [self.table.at(offset) for offset in victims]
        pending = []
        for record in records:
            if record.in_hbm is State.DIRTY:
                self._unpoint(record)
                self._start_drain(record)
            if record.in_hbm is State.DRAINING:
                pending.append(record)
        if pending and not wait:
            return False
        for record in pending:
            error = self._settle(record.block.id)
            if error is not None:
                raise error
        for record in records:
            if record.in_hbm is State.VALID and not record.leases:
                self.evict(record)
        return True

    def evict(self, record: Record) -> None:
        """Takes a clean block out of HBM."""
        self._unpoint(record)
        extent = self.table.drop(record.block.id)
        self.counters.evictions += 1
        if self.poison:
            self.copy.poison(self._slots_by_id[record.block.id].bytes, extent)
        self._forget(record.block.id, home=False)

    def _start_drain(self, record: Record) -> None:
        block = record.block
        slot = self._slots_by_id[block.id]
        move = self.table.begin_drain(block.id)
        self.counters.write_backs += 1
        try:
            if record.home is Tier.DRAM:
                started = time.perf_counter_ns()
                target = self.homes.arena.bytes_of(move.target_extent)
                event = self.copy.down(
                    target, slot.bytes, move.source_extent, self._ready.get(block.id)
                )
                if event is not None:
                    self._home_ready[block.id] = event
                self._copied("hbm->dram", block, started)
            else:
                self.copy.prepare_down()
                transfer = self._need_mover().write(
                    move.target_extent, slot.bytes, label=block.name
                )
                self._flights[block.id] = (transfer, move)
                self._flight_of[id(transfer)] = block.id
                return
        except BaseException:
            self.table.end_drain(block.id, ok=False)
            raise
        self.table.end_drain(block.id, ok=True)

    # -- inside: completions ---------------------------------------------

    def _settle(self, block_id: int) -> StorageError | None:
        """Waits for the transfer of a block, if there is one; returns its error."""
        flight = self._flights.get(block_id)
        if flight is None:
            return None
        self._wait(flight[0])
        self.poll()
        return flight[0].error

    def _wait(self, transfer: FileTransfer) -> None:
        mover = self._need_mover()
        if not transfer.finished:
            started = time.perf_counter_ns()
            try:
                mover.wait(transfer)
            finally:
                ended = time.perf_counter_ns()
                self.counters.stalls += 1
                self.counters.stall_ns += ended - started
                self.timeline.add("stall", "wait", started, ended)
        self.poll()

    def _land(self, transfer: FileTransfer) -> None:
        """Enters one finished transfer into the table."""
        if transfer.error is not None:
            self.counters.errors += 1
        block_id = self._flight_of.pop(id(transfer), None)
        if block_id is None:
            return
        _, move = self._flights.pop(block_id)
        ok = transfer.error is None
        filled = move.target is Tier.HBM
        if filled:
            self.table.end_fill(block_id, ok=ok)
        else:
            self.table.end_drain(block_id, ok=ok)
        if ok:
            link = "nvme->hbm" if filled else "hbm->nvme"
            begun = transfer.started_ns or transfer.submitted_ns
            self.counters.moved(link, move.block.nbytes, transfer.finished_ns - begun)
            self.timeline.add(
                link, move.block.name, begun, transfer.finished_ns, move.block.nbytes
            )

    def _copied(self, link: str, block: Block, started: int) -> None:
        ended = time.perf_counter_ns()
        self.counters.moved(link, block.nbytes, ended - started)
        self.counters.copy_ns += ended - started
        self.timeline.add(link, block.name, started, ended, block.nbytes)

    # -- inside: small things --------------------------------------------

    def _unpoint(self, record: Record) -> None:
        slot = self._slots_by_id.get(record.block.id)
        holder = self.holders.get(record.block.id)
        if holder is not None and slot is not None and slot.pointed:
            holder.unpoint()

    def _enter(self, block: Block, extent: Extent) -> Slot:
        slot = self._slots_by_id[block.id] = self.slots.slot(block, extent)
        self.by_address[slot.address] = slot
        self._ready.pop(block.id, None)
        return slot

    def _forget(self, block_id: int, *, home: bool = True) -> None:
        slot = self._slots_by_id.pop(block_id, None)
        if slot is not None and self.by_address.get(slot.address) is slot:
            del self.by_address[slot.address]
        self._ready.pop(block_id, None)
        if home:
            self._home_ready.pop(block_id, None)

    def _need_mover(self) -> FileMover:
        if self.mover is None:
            raise InvariantError("there is no NVMe tier")
        return self.mover

    def _too_small(self, block: Block) -> CapacityError:
        held = []
        for record in self.table:
            slot = self._slots_by_id.get(record.block.id)
            if record.extent is None or slot is None:
                continue
            if record.leases or record.fixed or slot.aliased:
                why = "leased" if record.leases else "fixed" if record.fixed else "still referred to"
                held.append((record.block.nbytes, record.block.name, why))
        held.sort(reverse=True)
        total = sum(entry[0] for entry in held)
        names = ", ".join(f"{name!r} ({format_size(n)}, {why})" for n, name, why in held[:6])
        return CapacityError(
            f"block {block.name!r} ({format_size(block.nbytes)}) does not fit in tier hbm "
            f"({format_size(self.table.hbm.capacity)}) beside {names or 'nothing'}; give hbm= at "
            f"least {total + block.nbytes}, or wrap with smaller blocks"
        )


def _view(whole: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the tensor of ``spec`` inside a block's bytes."""
    dtype = spec.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{spec.name}: {dtype!r} is not a torch dtype")
    storage = whole.untyped_storage()
    base = whole.storage_offset()
    empty = torch.empty(0, dtype=dtype, device=whole.device)
    return empty.set_(storage, (base + spec.offset) // dtype.itemsize, spec.shape, spec.stride)
