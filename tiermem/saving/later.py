"""``tier.save(wait=False)``: the present state is written while training continues.

At the call, dirty copies in HBM are written home. From then on the homes are the state
that is saved, and a thread writes them. Another one copies those in DRAM to free DRAM,
ahead of the steps that will overwrite them: first those that were written longest ago. Only the
host accesses these copies, so their pages are not locked. A home that is about to be overwritten
earlier (:class:`~tiermem.runtime.memory.homes.HomeKeeper`) is copied then; if there is no room, the
overwriting thread first writes it to the checkpoint. Everything else is copied at the call:
numbers, settings, generators, tensors outside the tiers, and blocks whose home is HBM or that have
aliases.

Locks are taken in this order: the manager's, ``_guard``, ``_writing``. The thread only tries to
take the first, since ``close()`` holds it while waiting for the thread. Bytes are copied without
any of them: a write of these bytes waits for the copy.
"""

from __future__ import annotations

import enum
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import torch

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.residency import Record
from tiermem.core.residency import State as Residency
from tiermem.errors import CapacityError, ClosedError, InvariantError, StorageError, TierError
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.runtime.base.forks import generation
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.transfers.block_io import view_of
from tiermem.saving.copies import MemoryCopier
from tiermem.saving.save import Plan, write_source, writing
from tiermem.saving.sources import BlockSource, MasterSource, Source
from tiermem.saving.writer import TensorWriter

_PATIENCE = 0.05
_all: weakref.WeakSet[SaveHandle] = weakref.WeakSet()


def _end_all() -> None:
    """Waits for running saves when the interpreter ends; later no pool accepts any work."""
    for handle in list(_all):
        if not handle._is_parents():
            handle.wait()
            handle._warn()


# no other hook comes before those of ``concurrent.futures``, which were registered by the import
threading._register_atexit(_end_all)  # type: ignore[attr-defined]


class _State(enum.Enum):
    """State of a block to be saved: where its bytes are, and whether a thread reads its home."""

    AT_HOME = enum.auto()
    COPYING = enum.auto()
    COPIED = enum.auto()
    WRITING = enum.auto()
    """Being written from its home to the checkpoint."""
    DONE = enum.auto()


@dataclass(slots=True, eq=False)
class _Entry:
    """A block to be saved.

    Attributes:
        block: The block.
        picks: Number of each tensor of it, its key in the checkpoint, and its first byte there.
        place: Its home in DRAM at the call; None if that is a file.
        home: The bytes of that home.
        copy: DRAM for a copy of them.
        fresh: Whether pages of the copy may have to be faulted in.
        state: The progress.
    """

    block: Block
    picks: list[tuple[int, str, int]] = field(default_factory=list)
    place: Extent | None = None
    home: torch.Tensor | None = None
    copy: Extent | None = None
    fresh: bool = False
    state: _State = _State.AT_HOME


class SaveHandle:
    """A running save (``tier.save(path, wait=False)``).

    Attributes:
        path: The path of the checkpoint.
    """

    def __init__(self, runtime: ModuleRuntime, plan: Plan) -> None:
        """Stores its arguments.

        Args:
            runtime: The modules' runtime.
            plan: What will be written.
        """
        self.path = plan.folder.path
        self._runtime = runtime
        self._manager = runtime.manager
        self._entries: dict[int, _Entry] = {}
        self._left: deque[_Entry] = deque()
        self._ahead: deque[_Entry] = deque()
        self._copied: deque[_Entry] = deque()
        self._guard = threading.RLock()
        # for Ctrl-C at the end of ``with``: a lock is released first, a condition is Python code
        self._changed = threading.Condition(self._guard)
        self._writing = threading.Lock()
        self._error: BaseException | None = None
        self._told = False
        self._ended = threading.Event()
        self._ended.set()  # nothing to wait for yet
        self._generation = generation()
        self._stack = ExitStack()
        self._writer: TensorWriter
        # whoever takes it, once, ends the save: the thread, or the call if that is interrupted
        self._begun = threading.Lock()

    def begin(self, plan: Plan) -> None:
        """Captures the present state, and begins to write it.

        Args:
            plan: The same as for the constructor.

        Raises:
            CapacityError: If the file system has no room.
            StorageError: If it fails, or a block cannot be read or written home.
        """
        _all.add(self)
        try:
            self._ended.clear()
            self._writer = self._stack.enter_context(writing(plan))
            self._stack.callback(self._let_go)
            self._take(plan)
            threading.Thread(target=self._run, name="tiermem-save").start()
        except BaseException as error:
            if self._begun.acquire(blocking=False):
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Ends a save whose error the call itself raises."""
        try:
            with self._stack:
                raise error
        finally:
            self._told = True
            self._ended.set()

    def __del__(self) -> None:
        # there is no error if __init__ was interrupted
        if getattr(self, "_error", None) is not None and not self._is_parents():
            self._warn()

    # -- what users ask --------------------------------------------------

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._ended.is_set()

    def result(self) -> None:
        """Waits until the checkpoint is complete and on the disk.

        Raises:
            CapacityError: If the file system had no room; the former checkpoint is unchanged.
            StorageError: If it failed, or a block could not be read; likewise.
            ClosedError: If the manager was closed meanwhile, or this is a forked child.
        """
        self.wait()
        self._told = True
        if self._error is not None:
            raise self._error

    def _warn(self) -> None:
        """Warns about an error that was never raised."""
        if self._error is not None and not self._told:
            self._told = True
            warnings.warn(
                f"a checkpoint was not saved: {self._error}", RuntimeWarning, stacklevel=2
            )

    def _is_parents(self) -> bool:
        """Whether this is a forked child, and the save belongs to its parent."""
        return self._generation != generation()

    def wait(self) -> None:
        """Waits until it has ended, with or without an error.

        Raises:
            ClosedError: In a forked child, where no thread writes.
        """
        if self._is_parents() and not self.done():
            raise ClosedError(
                "this save is the parent process's; a forked child cannot wait for it"
            )
        self._ended.wait()

    def settle(self) -> None:
        """Waits until it has ended; raises an error that was not raised before."""
        if not self._told:
            self.result()

    # -- at the call -----------------------------------------------------

    def _take(self, plan: Plan) -> None:
        """Captures everything that is not at home, and registers the rest."""
        manager = self._manager
        with manager.lock, outside_inference(), torch.no_grad():
            for source in plan.sources:
                plain = _in_block(source)
                if plain is None or plain.block is None or not plain.picks:  # no state: unwritten
                    write_source(self._runtime, source, self._writer)
                    continue
                entry = self._entries.setdefault(plain.block.id, _Entry(plain.block))
                entry.picks += plain.picks
            self._send_home([manager.parts.table[i] for i in self._entries])
            for entry in self._entries.values():
                self._enter(entry)
            self._left.extend(self._entries.values())
            self._ahead.extend(self._in_order_of_writes())
            self._make_room()
            manager.parts.homes.owners.append(self._owned)
            manager.parts.homes.reclaimers.append(self._spare_room)
            manager.closers.append(self._cancel)
            manager.parts.homes.keeper = self

    def _send_home(self, records: list[Record]) -> None:
        """Writes dirty copies home, except those that may be written in HBM without a mark."""
        transfers = self._manager.parts.transfers
        going = []
        for record in records:
            transfers.settle(record.block.id)
            slot = transfers.slots.current.get(record.block.id)
            if record.in_hbm is not Residency.DIRTY or slot is None:
                continue
            if record.home_extent is None or record.leases or slot.aliased or slot.wanted:
                continue
            with suppress(CapacityError):  # no room for a home: it is saved from HBM
                transfers.drain(record)
                going.append(record)
        for record in going:
            error = transfers.settle(record.block.id)
            if error is not None:
                raise error

    def _enter(self, entry: _Entry) -> None:
        """Finds the bytes of a block at home; blocks without are copied, or written."""
        manager, record = self._manager, self._manager.parts.table[entry.block.id]
        if record.home_extent is not None and record.at_home is Residency.VALID:
            if record.home is Tier.DRAM:
                manager.parts.copy.wait(manager.parts.transfers.home_ready.get(entry.block.id))
                home = manager.parts.homes.opened(record.home_extent)
                entry.place, entry.home = record.home_extent, home
            return
        whole = manager.block_io.whole(entry.block)
        if not self._copy(entry, whole):
            self._put(entry, whole)
            entry.state = _State.DONE

    def _in_order_of_writes(self) -> list[_Entry]:
        """Returns the blocks with homes in DRAM, those that will be overwritten soon first.

        A loop next overwrites what it has not written for longest.
        """
        written = self._manager.parts.timeline.last("hbm->dram")
        found = [entry for entry in self._left if entry.place is not None]
        return sorted(found, key=lambda entry: written.get(entry.block.name, sys.maxsize))

    def _make_room(self) -> None:
        """Allocates room for copies of as many blocks as possible; the manager's lock is held."""
        with self._guard:
            for entry in self._ahead:
                if entry.state is _State.AT_HOME and entry.copy is None:
                    room = self._manager.parts.homes.lend_spare(entry.block.nbytes)
                    if room is None:
                        return
                    entry.copy, entry.fresh = room

    def _spare_room(self) -> bool:
        """Frees room for copies, which a home needs; the manager's lock is held.

        First all room without a copy yet. Then copies of blocks whose bytes are still at home: they
        are written from there, or copied again before a step writes to it.

        Returns:
            Whether there was any.
        """
        with self._guard:
            entries = self._entries.values()
            found = [e for e in entries if e.state is _State.AT_HOME and e.copy is not None]
            if not found:  # the writer has taken what is not among these
                found = [e for e in self._copied if e.home is not None and e.copy is not None]
            # first: after an interruption, what is not at home is skipped
            self._left.extend(found)
            self._changed.notify_all()
            for entry in found:
                extent = entry.copy
                entry.copy, entry.state = None, _State.AT_HOME
                if extent is not None:
                    self._manager.parts.homes.release(Tier.DRAM, extent)
            self._copied = deque(e for e in self._copied if e.state is _State.COPIED)
        return bool(found)

    # -- while training goes on ------------------------------------------

    def before_write(self, record: Record) -> None:
        """Keeps the bytes of a home before it is overwritten; the manager's lock is held."""
        self.before_reuse(record.block.id, record.home_extent)

    def before_reuse(self, block_id: int, extent: Extent | None) -> None:
        """Keeps the bytes of a place that was a home at the call; the manager's lock is held."""
        entry = self._entries.get(block_id)
        if entry is None or entry.state is _State.DONE:
            return
        if entry.place is not None and entry.place != extent:
            return  # the block has another home now
        mine = False
        try:
            with self._guard:
                while self._reads_home(entry):
                    self._changed.wait()
                if entry.state is not _State.AT_HOME or self._error is not None:
                    entry.home = None  # its copy is all there is from now on
                    return
                whole = self._home_of(entry)
                if self._copy(entry, whole):
                    entry.home = None  # likewise
                    self._changed.notify_all()
                    return
                mine = True
                entry.state = _State.WRITING
            self._put(entry, whole)
            self._finish(entry)
        except (OSError, TierError) as error:  # the save fails, not the training
            self._fail(error)
        except BaseException as error:
            if mine and entry.state is not _State.DONE:  # otherwise all would wait for it
                self._fail(
                    StorageError(
                        f"{type(error).__name__} came while a step wrote to it", kind="checkpoint"
                    )
                )
            raise

    def _reads_home(self, entry: _Entry) -> bool:
        """Whether a thread is reading a block at home."""
        if self._error is not None:
            return False
        return entry.state in (_State.COPYING, _State.WRITING)

    def _home_of(self, entry: _Entry) -> torch.Tensor:
        """Returns the bytes of a home; the manager's lock is held if it is a file."""
        if entry.home is not None:
            return entry.home
        return self._manager.block_io.read_home(entry.block)

    def _copy(self, entry: _Entry, whole: torch.Tensor) -> bool:
        """Copies a block to free DRAM; returns whether there was any."""
        homes, nbytes, extent = self._manager.parts.homes, entry.block.nbytes, entry.copy
        if extent is None and whole.device.type == "cpu":
            extent, _ = homes.lend_spare(nbytes) or (None, False)
        elif extent is None:
            extent = homes.lend(nbytes)
        if extent is None:
            return False
        homes.arena.bytes_of(extent)[:nbytes].copy_(whole[:nbytes])
        self._copied.append(entry)
        # in one assignment, and last: an interrupted copy does not count, and the home is saved
        entry.copy, entry.state = extent, _State.COPIED
        return True

    def _put(self, entry: _Entry, whole: torch.Tensor) -> None:
        """Passes the tensors of a block to the writer."""
        with self._writing, outside_inference(), torch.no_grad():
            for index, key, begin in entry.picks:
                self._writer.put(key, begin, view_of(whole, entry.block.tensors[index]))

    def _finish(self, entry: _Entry) -> None:
        """Marks a block as saved; the manager's lock is held if it has a copy."""
        with self._guard:
            entry.state, entry.home = _State.DONE, None
            extent, entry.copy = entry.copy, None
            self._changed.notify_all()
        if extent is not None:
            self._manager.parts.homes.release(Tier.DRAM, extent)

    def _fail(self, error: BaseException) -> None:
        with self._guard:
            self._error = self._error or error
            self._changed.notify_all()

    # -- the thread that copies ------------------------------------------

    def _copy_ahead(self) -> None:
        """Copies blocks with homes in DRAM to free DRAM, one after the other."""
        try:
            with MemoryCopier() as copier:
                while (entry := self._copied_next()) is not None:
                    with self._guard:
                        home, extent = entry.home, entry.copy
                    if home is None or extent is None:
                        raise InvariantError(f"block {entry.block.name!r} is not being copied")
                    target = self._manager.parts.homes.arena.bytes_of(extent)
                    copier.copy(target, home, fresh=entry.fresh)
                    with self._guard:
                        entry.state = _State.COPIED
                        self._copied.append(entry)
                        self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _copied_next(self) -> _Entry | None:
        """Returns the block to copy next, with room for it; None if there is none left.

        Waits for room, which is freed when blocks are written.
        """
        while True:
            with self._guard:
                while self._ahead and self._ahead[0].state is not _State.AT_HOME:
                    self._ahead.popleft()
                if not self._ahead or self._error is not None:
                    return None
                entry, done = self._ahead[0], self._count_done()
                if entry.copy is not None:
                    entry.state = _State.COPYING
                    return entry
            with self._locked():
                self._make_room()
            with self._guard:
                while entry.copy is None and self._error is None and self._count_done() == done:
                    self._changed.wait()

    def _count_done(self) -> int:
        return sum(entry.state is _State.DONE for entry in self._entries.values())

    # -- the thread that writes ------------------------------------------

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            with self._stack:
                copying = threading.Thread(target=self._copy_ahead, name="tiermem-save-copies")
                copying.start()
                try:
                    self._save_all()
                finally:
                    copying.join()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _save_all(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._save(entry)
        except BaseException as error:
            self._fail(error)  # so that no caller, which may hold the lock, waits for the thread
            raise

    def _next(self) -> _Entry | None:
        """Returns the next block to save; copies first, so that there is room for others."""
        with self._guard:
            while self._error is None:
                if self._copied:
                    return self._copied.popleft()
                while self._left:
                    entry = self._left.popleft()
                    if entry.state is _State.AT_HOME:
                        return entry
                if all(entry.state is _State.DONE for entry in self._entries.values()):
                    return None
                self._changed.wait()  # other threads write the rest
            raise self._error

    def _save(self, entry: _Entry) -> None:
        whole: torch.Tensor | None = None
        if entry.state is _State.AT_HOME and entry.home is None:
            with self._locked():
                if entry.state is _State.AT_HOME:  # and not copied since
                    whole = self._manager.block_io.read_home(entry.block)
        with self._guard:
            if entry.state not in (_State.AT_HOME, _State.COPIED):
                return
            if entry.state is _State.COPIED and entry.copy is not None:
                whole = self._manager.parts.homes.arena.bytes_of(entry.copy)
            elif whole is not None:
                entry.state = _State.COPIED  # the bytes of a file belong to this thread
            elif entry.home is not None and entry.copy is None:
                whole, entry.state = entry.home, _State.WRITING
            if whole is None:
                return  # it has room and will be copied: no step has to wait for the disk
        self._put(entry, whole)
        del whole
        if entry.copy is None:
            self._finish(entry)
            return
        with self._locked():
            self._finish(entry)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Takes the manager's lock, unless the manager is closed meanwhile."""
        lock = self._manager.lock
        while not lock.acquire(timeout=_PATIENCE):
            if self._error is not None:
                raise self._error
        try:
            yield
        finally:
            lock.release()

    # -- the end ---------------------------------------------------------

    def _owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the DRAM that holds copies."""
        return [(Tier.DRAM, e.copy) for e in self._entries.values() if e.copy is not None]

    def _cancel(self) -> None:
        """Gives the save up: the manager is being closed, and its lock is held."""
        if self._is_parents():
            return
        if not self.done():
            self._fail(ClosedError(f"the TierManager was closed while {self.path} was being saved"))
            self._ended.wait()
            self._warn()

    def _let_go(self) -> None:
        """Stops observing writes, and frees its DRAM."""
        lock, held = self._manager.lock, False
        # the thread that closes the manager has the lock, and waits here
        while not held and not self._manager.gate.closed:
            held = lock.acquire(timeout=_PATIENCE)
        try:
            self._forget()
        finally:
            if held:
                lock.release()

    def _forget(self) -> None:
        manager = self._manager
        if manager.parts.homes.keeper is self:
            manager.parts.homes.keeper = None
        if self._owned in manager.parts.homes.owners:
            manager.parts.homes.owners.remove(self._owned)
        if self._spare_room in manager.parts.homes.reclaimers:
            manager.parts.homes.reclaimers.remove(self._spare_room)
        if self._cancel in manager.closers:
            manager.closers.remove(self._cancel)
        for entry in self._entries.values():
            entry.state = _State.DONE
            if entry.copy is not None:
                extent, entry.copy = entry.copy, None
                manager.parts.homes.release(Tier.DRAM, extent)
            entry.home = None
        with self._guard:
            self._changed.notify_all()


def _in_block(source: Source) -> BlockSource | None:
    """Returns a source as tensors of a block, None if it is more than that."""
    if isinstance(source, MasterSource):
        return source.plain()
    return source if isinstance(source, BlockSource) else None
