"""Copies of saved tensors below HBM: made in forward, fetched ahead in backward.

HBM here is memory of torch's own allocator, not of the arena: saved tensors are allocated there,
and so are fetched ones. Three rules keep it safe without the host ever waiting for a stream:

1. The source of a copy from HBM is held until the compute stream waits for the copy.
   Its memory is next allocated on the same stream, so it is reused only after the copy.
2. The target of a copy to HBM is allocated on the compute stream and filled on the up stream, after
   an event of the compute stream; it is neither read nor freed before compute waits for the copy.
3. A copy that is garbage-collected adds itself to a queue, in whichever thread and at whatever
   moment that happens; the queue is emptied when the next copy is requested.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from tiermem.config import Home
from tiermem.core.block import ALIGNMENT, Extent, Tier
from tiermem.errors import StorageError
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.extent_pool import ExtentPool, Place
from tiermem.runtime.memory.slots import typed_view, use_count
from tiermem.runtime.metrics.counters import ActivationCounters
from tiermem.runtime.services.activation_copies import CopiesInHbm, Copy, SavingOrder
from tiermem.transfer.copy import POISON, Event
from tiermem.transfer.file.mover import FileTransfer

__all__ = ["ActivationStore", "Copy"]

_NOWHERE = Extent(0, 0)
"""For copy engines: the bytes are not in the HBM arena."""
_GAP = 512
"""How many dead neighbours a look-ahead skips before it stops."""


def _afresh(error: StorageError) -> StorageError:
    """Returns an equal error object, without the traceback of the first.

    A traceback refers to the frames of a whole pass, and what was saved in it; the I/O thread may
    keep the error of a transfer until its next job.
    """
    fresh = type(error).__new__(type(error))
    fresh.args = error.args
    fresh.__dict__.update(error.__dict__)
    fresh.errno = error.errno
    return fresh


class ActivationStore:
    """Copies storages below HBM, and fetches them when they are needed.

    Every call is made under the manager's lock.

    Attributes:
        window: Returns how many bytes may be in HBM beyond what is in use: being copied out, or
            prefetched.
        pool: Where copies are kept below HBM.
    """

    def __init__(self, manager: BlockManager, home: Home, window: Callable[[], int]) -> None:
        """Starts empty.

        Args:
            manager: The manager whose tiers and transfers are used.
            home: ``"dram"`` or ``"nvme"``.
            window: See the attribute.
        """
        self.manager = manager
        self.home = home
        self.window = window
        self.pool = ExtentPool(manager.parts.homes, self._settle)
        self._order = SavingOrder()
        self._of_storage: WeakValueDictionary[int, Copy] = WeakValueDictionary()
        self._held = CopiesInHbm()
        self._fetched = CopiesInHbm()
        self._dropped: deque[Any] = deque()
        self._leaving: list[tuple[Any, Event | None, FileTransfer | None]] = []
        self._looked_to: float = float("inf")

    @property
    def counters(self) -> ActivationCounters:
        """The counters."""
        return self.manager.parts.counters.activations

    # -- down ------------------------------------------------------------

    def known(self, storage: torch.UntypedStorage, low: int, high: int) -> Copy | None:
        """Returns the copy that covers these bytes of a storage, if there is one."""
        found = self._of_storage.get(storage._cdata)
        return found if found is not None and found.covers(low, high) else None

    def again(self, copy: Copy) -> None:
        """Notes that another saved tensor is covered by ``copy``, so backward needs it sooner."""
        self._order.add_again(copy)
        self._looked_to = float("inf")
        self.counters.shared += 1

    def send(self, storage: torch.UntypedStorage, low: int, nbytes: int, name: str) -> Copy | None:
        """Begins to copy bytes of a storage from HBM, and holds the storage until that is done.

        Returns:
            The copy; None if there is no room for it, so that the tensor stays.
        """
        body = nbytes if self.home == "dram" else nbytes // ALIGNMENT * ALIGNMENT
        place = self.pool.take(body, self.home, name) if body else None
        if place is None:
            self.counters.kept += 1
            return None
        copy = Copy(self._dropped, storage, low, nbytes, name)
        copy.place = place
        try:
            self._write(copy, place, body)
        except BaseException:
            copy.place = None
            self.pool.give_back(place)
            raise
        self._order.add(copy)
        self._looked_to = float("inf")
        self._of_storage[storage._cdata] = copy
        self._held.add(copy)
        self.counters.offloaded += 1
        self.counters.offloaded_bytes += nbytes
        self._trim_held()
        return copy

    def _write(self, copy: Copy, place: Place, body: int) -> None:
        manager = self.manager
        if copy.source is None:
            raise RuntimeError("nothing to write")
        with outside_inference(), torch.no_grad():
            bytes_ = typed_view(copy.source, torch.uint8, copy.low, (copy.nbytes,), (1,))
            if place.tier is Tier.DRAM:
                started = time.perf_counter_ns()
                target = manager.parts.homes.arena.bytes_of(Extent(place.extent.offset, body))
                place.written = manager.parts.copy.down(target, bytes_, _NOWHERE, place.read)
                self._moved("hbm->dram", copy, started)
                return
            manager.parts.copy.prepare_down()
            mover = manager.parts.transfers.need_mover()
            place.transfer = mover.write(place.extent, bytes_[:body], label=copy.name)
            if body < copy.nbytes:
                copy.tail = bytes_[body:].clone()

    def _trim_held(self) -> None:
        """Frees the sources beyond the window, the oldest first."""
        window = self.window()
        while self._held.nbytes > window and self._held:
            copy = self._held.take_first()
            if copy is not None:
                self._let_go(copy)

    def _let_go(self, copy: Copy) -> None:
        """Frees the source of a copy, once reuse of its memory is ordered after the copy."""
        place = copy.place
        if place is None:
            return
        if place.transfer is not None:
            self._wait(place.transfer)
            self._landed(place.transfer)
            if place.transfer.error is not None:  # it cannot leave, so it stays
                copy.place = None
                self.pool.give_back(place)
                self.counters.kept += 1
                return
        else:
            self.manager.parts.copy.use(place.written)
        source, copy.source = copy.source, None
        if (
            source is not None
            and self.manager.parts.device.type == "cpu"
            and use_count(source._cdata) == 1
            and sys.getrefcount(source) == 2  # other copies of the storage share this object
        ):
            with torch.no_grad():  # nothing may read it any more; if something does, it is noticed
                typed_view(source, torch.uint8, 0, (source.nbytes(),), (1,)).fill_(POISON)

    # -- up --------------------------------------------------------------

    def begin_sweep(self) -> None:
        """Begins a backward pass."""
        self._looked_to = float("inf")

    def open(self, copy: Copy) -> tuple[torch.UntypedStorage, int]:
        """Fetches a copy into HBM, ordered before the next work of the current stream.

        Returns:
            A storage, and the byte of the saved storage at which it begins.

        Raises:
            StorageError: If its bytes cannot be read.
            ClosedError: If the manager is closed, so that they no longer exist.
        """
        self.reap()
        found = copy.alive()
        if found is not None:
            self.counters.reused += 1
            self._look_ahead(copy)
            return found, 0
        self.manager.gate.guard()
        ahead = copy.fetched is not None
        if not ahead:
            self._fetch(copy, urgent=True)
            self.counters.fetched_late += 1
        self._look_ahead(copy)
        self._arrive(copy, again=ahead)
        if copy.fetched is None:
            raise RuntimeError(f"{copy.name!r} did not arrive")
        found, low = copy.fetched, copy.low
        self._trim_fetched(copy)
        return found, low

    def _look_ahead(self, copy: Copy) -> None:
        """Begins to fetch what was saved before ``copy``, as far as the window allows."""
        window = self.window()
        if not window:
            return
        order, position = self._order, self._order.position(copy)
        seq, left = int(min(position, self._looked_to)) - 1, _GAP
        first = seq == position - 1
        while True:
            begin = seq
            seq, other, left = order.back(seq, left)
            if seq < begin:
                self._looked_to = seq + 1
            if other is None or (order.between(seq, position) > window and not first):
                return
            first = False
            if other.fetched is None and other.alive() is None:
                try:
                    self._fetch(other, urgent=False)
                except torch.OutOfMemoryError:
                    return
                self.counters.fetched_ahead += 1
            self._looked_to = seq
            seq -= 1

    def _fetch(self, copy: Copy, *, urgent: bool) -> None:
        """Begins to fetch a copy."""
        manager, place = self.manager, copy.place
        if place is None:
            raise RuntimeError(f"{copy.name!r} is nowhere")
        with outside_inference(), torch.no_grad():
            target = torch.empty(copy.nbytes, dtype=torch.uint8, device=manager.parts.device)
            if place.tier is Tier.DRAM:
                started = time.perf_counter_ns()
                source = manager.parts.homes.arena.bytes_of(
                    Extent(place.extent.offset, copy.nbytes)
                )
                copy.up = place.read = manager.parts.copy.up(
                    target, source, _NOWHERE, place.written
                )
                self._moved("dram->hbm", copy, started)
            else:
                guards = manager.parts.copy.guards(_NOWHERE)
                mover = manager.parts.transfers.need_mover()
                body = place.extent.nbytes
                copy.reading = place.transfer = mover.read(
                    place.extent, target[:body], label=copy.name, urgent=urgent, after=guards
                )
                if copy.tail is not None:
                    target[body:].copy_(copy.tail)
            copy.fetched = target.untyped_storage()
        self._fetched.add(copy)

    def _arrive(self, copy: Copy, *, again: bool) -> None:
        """Makes compute wait for a copy to HBM, or the host wait for a file.

        Args:
            copy: The copy.
            again: Whether a failed read is repeated, since errors of prefetches are not raised.
        """
        self.manager.parts.copy.use(copy.up)
        reading = copy.reading
        if reading is None:
            return
        if not reading.finished:
            self.counters.waits += 1
        self._wait(reading)
        copy.reading = None
        self._landed(reading)
        if reading.error is None:
            copy.up = reading.event
            self.manager.parts.copy.use(copy.up)
            return
        self._forget_fetched(copy)
        if not again:
            raise _afresh(reading.error)
        self._fetch(copy, urgent=True)
        self._arrive(copy, again=False)

    def _trim_fetched(self, current: Copy) -> None:
        """Frees what was fetched long ago; otherwise a graph that is kept would hold all of it."""
        limit = 4 * self.window()
        while self._fetched.nbytes > limit and len(self._fetched) > 1:
            ident, copy = self._fetched.first_but(current)
            if copy is None:
                self._fetched.remove(ident)
            elif copy.reading is not None and not copy.reading.finished:
                return
            else:
                self.manager.parts.copy.use(copy.up if copy.reading is None else copy.reading.event)
                self._forget_fetched(copy)

    def _forget_fetched(self, copy: Copy) -> None:
        copy.fetched = None
        copy.up = None
        copy.reading = None
        self._fetched.remove(copy.ident)

    # -- the end ---------------------------------------------------------

    def reap(self) -> None:
        """Frees the memory of dropped copies. Called where compute work is submitted."""
        self.collect()
        waiting: list[tuple[Any, Event | None, FileTransfer | None]] = []
        for what, event, transfer in self._leaving:
            if transfer is not None and not transfer.finished:
                waiting.append((what, event, transfer))
                continue
            if transfer is not None:
                self._landed(transfer)
                event = event or transfer.event
            self.manager.parts.copy.use(event)
        self._leaving = waiting

    def collect(self) -> None:
        """Frees the places of dropped copies; their bytes in HBM are freed by ``reap``."""
        while self._dropped:
            ident, place, source, fetched, up, reading = self._dropped.popleft()
            self._order.remove(ident)
            self._held.remove(ident)
            self._fetched.remove(ident)
            if place is None:
                continue
            if fetched is not None:
                self._leaving.append((fetched, up, reading))
            if source is not None and place.transfer is not None:
                self._leaving.append((source, None, place.transfer))
            self.pool.give_back(place)

    def repair(self) -> None:
        """Counts again what is held and fetched, after an exception anywhere."""
        self.collect()
        self.pool.repair()
        self._held.repair()
        self._fetched.repair()
        self._looked_to = float("inf")

    def copies(self) -> list[Copy]:
        """Returns the existing copies, in the order of saving."""
        self.collect()
        return self._order.copies()

    def _settle(self, place: Place) -> None:
        """Makes the host wait until nothing reads or writes a place."""
        if place.transfer is not None:
            self._wait(place.transfer)
        self.manager.parts.copy.wait(place.written)
        self.manager.parts.copy.wait(place.read)

    def _wait(self, transfer: FileTransfer) -> None:
        self.manager.parts.transfers.wait(transfer)
        self.manager.parts.transfers.poll()

    # -- counting --------------------------------------------------------

    def _moved(self, link: str, copy: Copy, started: int) -> None:
        ended = time.perf_counter_ns()
        self.manager.parts.counters.moved(link, copy.nbytes, ended - started)
        self.manager.parts.counters.copy_ns += ended - started
        self.manager.parts.timeline.add(link, copy.name, started, ended, copy.nbytes)

    def _landed(self, transfer: FileTransfer) -> None:
        if transfer.error is not None:
            self.manager.parts.counters.errors += 1
            return
        link = "nvme->hbm" if transfer.is_read else "hbm->nvme"
        begun, ended = transfer.started_ns or transfer.submitted_ns, transfer.finished_ns
        self.manager.parts.counters.moved(link, transfer.nbytes, ended - begun)
        self.manager.parts.timeline.add(link, transfer.label, begun, ended, transfer.nbytes)
