"""Staging of blocks in files for host code: the next are read while the last are written.

Host code processes one load of blocks after another, in one thread. Its staging is a part of the
DRAM budget that holds four consecutive loads: two are read, one is processed, one is written.
Reads and writes use the manager's file mover, like all others.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tiermem.core.allocator import Allocator
from tiermem.core.block import Block, Extent, Tier, align_up
from tiermem.errors import CapacityError, InvariantError
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.homes import HomeRequest
from tiermem.runtime.transfers.block_io import view_of
from tiermem.transfer.file.mover import FileMover, FileTransfer

if TYPE_CHECKING:
    from tiermem.runtime.manager import BlockManager

MOST_LOADS = 4
"""Two that are read, one that is processed, one that is written."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Blocks in files that are processed together.

    Attributes:
        own: Those of this load alone.
        shared: Those that other loads have, too; they stay from one load to the next.
    """

    own: Sequence[Block]
    shared: Sequence[Block]

    @property
    def blocks(self) -> list[Block]:
        """All of them."""
        return [*self.own, *self.shared]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A load that was asked for.

    Attributes:
        load: The load.
        homes: For each block by its id, where it is in the files, and whether it holds data.
    """

    load: Load
    homes: dict[int, tuple[Extent, bool]]


@dataclass(slots=True, eq=False)
class Cargo:
    """One block in staging.

    Attributes:
        block: The block.
        home: Where it is in the files.
        place: Where it is in its pool.
        pool: The pool.
        bytes: All of it, 1-D uint8.
        views: One tensor per spec.
        read: The transfer that reads it; None if it held no data.
        write: The transfer that writes it home.
        dirty: Whether its bytes differ from the files.
    """

    block: Block
    home: Extent
    place: Extent
    pool: Pool
    bytes: torch.Tensor
    views: list[torch.Tensor]
    read: FileTransfer | None = None
    write: FileTransfer | None = None
    dirty: bool = False

    @property
    def moving(self) -> FileTransfer | None:
        """The current transfer, if there is one."""
        for transfer in (self.read, self.write):
            if transfer is not None and not transfer.finished:
                return transfer
        return None


class Pool:
    """A run of DRAM, allocated in pieces.

    Args:
        whole: The memory.
        unit: Minimal bytes of a piece, so that pieces of many sizes that stay for
            long leave no holes.
    """

    def __init__(self, whole: torch.Tensor, unit: int = 0) -> None:
        self._whole = whole
        self._unit = unit
        self._evictor = Allocator(whole.numel())

    def take(self, nbytes: int) -> Extent | None:
        """Returns room for a block, or None."""
        return self._evictor.allocate(max(nbytes, self._unit))

    def bytes_of(self, place: Extent, nbytes: int) -> torch.Tensor:
        """Returns the memory of a piece."""
        return self._whole.narrow(0, place.offset, nbytes)

    def free(self, place: Extent) -> None:
        """Takes a piece back."""
        self._evictor.free(place)

    def keep_only(self, places: Iterable[Extent]) -> None:
        """Sets which pieces are allocated, after an exception anywhere."""
        self._evictor.rebuild(places)


class HostStage:
    """Reads loads into staging and writes them home.

    :meth:`announce` and :meth:`settle` are called under the manager's lock, the others by the
    thread that does the work.

    An exception may occur anywhere. After it, the orders that were announced and not ended and the
    cargo are trusted; how often each block is wanted and what is free are recomputed from these by
    the next call.
    """

    def __init__(self, manager: BlockManager, loads: Sequence[Load]) -> None:
        """Reserves the staging.

        Args:
            manager: The manager of the blocks.
            loads: The loads in the order in which they will be processed.

        Raises:
            CapacityError: If the DRAM budget has no room for the largest load.
        """
        self._manager = manager
        manager.parts.transfers.need_mover()
        self._lock = threading.Lock()
        self._cargo: dict[int, Cargo] = {}
        self._orders: dict[Order, None] = {}  # announced, and not ended
        self._users: Counter[int] = Counter()  # how many of them need each block
        self._torn = False  # whether a change under the lock was interrupted
        self._ahead: deque[Order] = deque()
        self._moves: list[FileTransfer] = []
        self._reserved: list[Extent] = []
        self._own, self._shared = self._open(loads)

    @property
    def _mover(self) -> FileMover:
        """The manager's file mover, which is replaced when more files are opened."""
        return self._manager.parts.transfers.need_mover()

    @property
    def nbytes(self) -> int:
        """Bytes of DRAM that it occupies."""
        return sum(extent.nbytes for extent in self._reserved)

    def close(self) -> None:
        """Frees the memory, which is empty."""
        while self._reserved:
            self._manager.parts.homes.release(Tier.DRAM, self._reserved.pop())

    def owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the memory that it has."""
        return [(Tier.DRAM, extent) for extent in self._reserved]

    # -- under the manager's lock ----------------------------------------

    def order(self, load: Load) -> Order:
        """Returns the order of a load for :meth:`announce`; the blocks of the load are lent."""
        host_loans, table = self._manager.host_loans, self._manager.parts.table
        homes: dict[int, tuple[Extent, bool]] = {}
        for block in load.blocks:
            extent = table[block.id].home_extent
            if extent is None:
                raise InvariantError(f"block {block.name!r} has its home in no file")
            homes[block.id] = (extent, host_loans.defined(block))
        return Order(load, homes)

    def announce(self, order: Order) -> None:
        """Announces a load, to be processed after earlier ones; a second call does nothing."""
        if order in self._orders:
            return
        with self._lock:
            self._begin_change()
            self._orders[order] = None
            self._users.update(list(order.homes))
            self._ahead.append(order)
            self._read_ahead()
            self._torn = False

    def settle(self, blocks: Iterable[Block]) -> None:
        """Waits until the files have all changes of blocks.

        Raises:
            StorageError: If one cannot be written. It is kept here, and the next call tries again.
        """
        ids = [block.id for block in blocks]
        with self._lock:
            self._begin_change()
            self._reap()
            cargo = [self._cargo[i] for i in ids if i in self._cargo]
            for each in cargo:
                if each.dirty and each.moving is None:
                    self._write(each)
            self._torn = False
        try:
            for each in cargo:
                write = each.write  # the other thread may see that it has ended
                if write is not None:
                    self._mover.wait(write, hurry=False)
        finally:
            with self._lock:
                self._begin_change()
                self._reap()
                moves, self._moves = self._moves, []
                self._torn = False
            for move in moves:
                link = "nvme->dram" if move.is_read else "dram->nvme"
                elapsed = move.finished_ns - (move.started_ns or move.submitted_ns)
                self._manager.parts.counters.moved(link, move.nbytes, elapsed)
        for each in cargo:
            if each.write is not None and each.write.error is not None:
                raise each.write.error

    def at_home(self, blocks: Iterable[Block]) -> bool:
        """Whether the files have all changes of blocks."""
        with self._lock:
            self._begin_change()
            self._reap()
            self._torn = False
            return not any(b.id in self._cargo and self._cargo[b.id].dirty for b in blocks)

    # -- in the thread that works ----------------------------------------

    def bring(self, order: Order) -> dict[int, Cargo]:
        """Returns a load when it has been read; meanwhile others are read ahead.

        Raises:
            StorageError: If it cannot be read, or a block in its way cannot be written.
        """
        wanted = set(order.homes)
        while True:
            with self._lock:
                self._begin_change()
                if order in self._ahead:
                    self._ahead.remove(order)
                self._reap()
                begun = self._begin(order)
                if begun:
                    self._read_ahead()
                    cargo = {block_id: self._cargo[block_id] for block_id in order.homes}
                transfer = None if begun else self._make_room(wanted)
                self._torn = False
            if begun:
                break
            if transfer is not None:
                self._mover.wait(transfer, hurry=False)
        while under_way := [t for each in cargo.values() if (t := each.moving) is not None]:
            with self._lock:  # writes that end meanwhile make room for the next reads
                others = [t for each in self._cargo.values() if (t := each.moving) is not None]
            self._mover.wait_any([*under_way, *others])
            with self._lock:
                self._begin_change()
                self._reap()
                self._read_ahead()
                self._torn = False
        for each in cargo.values():
            if each.read is not None and each.read.error is not None:
                raise each.read.error
        return cargo

    def write_home(self, order: Order, written: Collection[int]) -> None:
        """Begins to write home a load that has been processed; a second call does nothing.

        Args:
            order: The load.
            written: Ids of the blocks that were changed.
        """
        with self._lock:
            if order not in self._orders:
                return
            self._begin_change()
            for block_id in order.homes:  # before any block of it may leave
                each = self._cargo[block_id]
                each.dirty = each.dirty or block_id in written
            self._end(order)
            for block_id in order.homes:
                each = self._cargo[block_id]
                if not self._users[block_id] and each.dirty:
                    self._write(each)
            self._reap()
            self._read_ahead()
            self._torn = False

    def give_up(self, order: Order) -> None:
        """Drops a load that was not processed, or whose work failed; the files still have it.

        The thread has undone its own changes to blocks shared with other loads.
        """
        for block_id in order.homes:  # no read may be in progress into memory that is freed
            each = self._cargo.get(block_id)
            while each is not None and (transfer := each.moving) is not None:
                self._mover.wait(transfer, hurry=False)
        own = {block.id for block in order.load.own}
        with self._lock:
            if order not in self._orders:
                return
            self._begin_change()
            self._end(order)
            for block_id in order.homes:
                each = self._cargo.get(block_id)
                if each is None:
                    continue
                unread = each.read is not None and each.read.error is not None
                if unread or block_id in own:
                    self._drop(each)
                elif each.dirty and not self._users[block_id]:
                    self._write(each)
            self._reap()
            self._read_ahead()
            self._torn = False

    # -- inside, with the lock -------------------------------------------

    def _open(self, loads: Sequence[Load]) -> tuple[Pool, Pool]:
        """Reserves room for four loads in a row, or for as many as the budget holds."""
        own = [sum(align_up(block.nbytes) for block in load.own) for load in loads]
        unit = max((align_up(b.nbytes) for load in loads for b in load.shared), default=0)
        for count in range(MOST_LOADS, 0, -1):
            most = max(sum(own[i : i + count]) for i in range(len(own)))
            windows = [loads[i : i + count] for i in range(len(loads))]
            slots = unit * max(len({b.id for w in window for b in w.shared}) for window in windows)
            sizes = [nbytes for nbytes in (most, slots) if nbytes]
            requests = [HomeRequest("staging of steps on the host", n, "dram") for n in sizes]
            try:
                places = self._manager.parts.homes.reserve(requests)
            except CapacityError:
                if count == 1:
                    raise
                continue
            self._reserved = [extent for _, extent in places if extent is not None]
            break
        arena = self._manager.parts.homes.arena
        memory = [arena.bytes_of(extent) for extent in self._reserved]
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return (
            Pool(memory[0] if most else empty),
            Pool(memory[-1] if slots else empty, unit),
        )

    def _begin_change(self) -> None:
        """Repairs what an earlier call left half done; the caller resets ``_torn`` at its end."""
        if self._torn:
            self._mover.wait_all()  # reads that are not recorded may write to free memory
            self._users = Counter(i for order in self._orders for i in order.homes)
            self._ahead = deque(order for order in self._ahead if order in self._orders)
            for pool in (self._own, self._shared):
                pool.keep_only(c.place for c in self._cargo.values() if c.pool is pool)
        self._torn = True

    def _end(self, order: Order) -> None:
        """Forgets an order that was processed, or will not be."""
        if order in self._ahead:
            self._ahead.remove(order)
        del self._orders[order]
        self._users.subtract(list(order.homes))

    def _read_ahead(self) -> None:
        """Begins to read the next loads, as far as there is room."""
        while self._ahead and self._begin(self._ahead[0]):
            self._ahead.popleft()

    def _begin(self, order: Order) -> bool:
        """Begins to read what is missing of a load, all of it or nothing."""
        shared = {block.id for block in order.load.shared}
        taken: list[Cargo] = []
        for block in order.load.blocks:
            if block.id in self._cargo:
                continue
            pool = self._shared if block.id in shared else self._own
            place = pool.take(block.nbytes)
            if place is None:
                for each in taken:
                    each.pool.free(each.place)
                return False
            memory = pool.bytes_of(place, block.nbytes)
            with outside_inference():
                views = [view_of(memory, spec) for spec in block.tensors]
            home = order.homes[block.id][0]
            taken.append(Cargo(block, home, place, pool, memory, views))
        for each in taken:
            if order.homes[each.block.id][1]:
                label = each.block.name
                each.read = self._mover.read(each.home, each.bytes, label=label, in_place=True)
            self._cargo[each.block.id] = each
        return True

    def _make_room(self, wanted: set[int]) -> FileTransfer | None:
        """Determines what is in the way of a load.

        Returns:
            The transfer to wait for, or None if a block has left.

        Raises:
            StorageError: If a block in the way cannot be written.
        """
        others = [each for block_id, each in self._cargo.items() if block_id not in wanted]
        for each in others:  # those being written leave by themselves
            if each.write is not None and not each.write.finished:
                return each.write
        for each in others:
            if each.moving is not None:
                return each.moving
            if each.write is not None and each.write.error is not None:
                raise each.write.error
            if each.dirty:
                self._write(each)
                return each.write
            self._drop(each)
            return None
        raise InvariantError("the staging of steps on the host does not hold one of them")

    def _write(self, cargo: Cargo) -> None:
        cargo.write = self._mover.write(cargo.home, cargo.bytes, label=cargo.block.name)

    def _reap(self) -> None:
        """Ends finished transfers, and drops cargo that is home and not needed."""
        for block_id, each in list(self._cargo.items()):
            write = each.write
            if write is not None and write.finished and write.error is None:
                self._moves.append(write)
                each.write, each.dirty = None, False
            read = each.read
            if read is not None and read.finished and read.error is None:
                self._moves.append(read)
                each.read = None
            if not self._users[block_id] and not each.dirty and each.moving is None:
                self._drop(each)

    def _drop(self, cargo: Cargo) -> None:
        del self._cargo[cargo.block.id]
        cargo.pool.free(cargo.place)
