"""Links that lag behind compute as far as events allow, under whole programs on the CPU.

Compute is torch's own, in line. Copies run on streams of the engine of CUDA, each only when compute
or the host waits for it, or by chance. So where a wait is missing, a program computes with bytes
that have not come yet, or writes over bytes that have not left. Files lag as well
(:mod:`support_lagging_files`).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from support_lagging_files import CHUNK, Faults, LaggingPump, MemoryDisk, covers, make_mover
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.core.block import Extent
from tiermem.runtime.lookahead.walks import Fetcher
from tiermem.runtime.memory.homes import Homes
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.storage.arena import HostArena
from tiermem.storage.mapped import MappedHostArena
from tiermem.transfer.copy import POISON
from tiermem.transfer.streams import StreamCopyEngine

COMPUTE, UP, DOWN, FILES = 0, 101, 102, 103
MOST = 64
"""Pieces of work that wait at a time on one stream; what waits for what is followed recursively."""


class LateEvent:
    """A point in the work of a stream."""

    def __init__(self, links: LaggingLinks, stream: int, number: int) -> None:
        self._links = links
        self.waiter = -1
        self.at = stream, number

    def done(self) -> bool:
        """Whether it has passed."""
        stream, number = self.at
        return self._links.made[stream] >= number

    def synchronize(self) -> None:
        self._links.reach(*self.at)


class LaggingLinks:
    """Streams whose work is done when it has to be, below a copy engine.

    Attributes:
        made: Pieces of work that each stream has done.
    """

    def __init__(self, seed: int, eager: float) -> None:
        """Starts idle.

        Args:
            seed: Of what is done sooner than it has to be.
            eager: How often something is, whenever a copy is submitted.
        """
        streams = COMPUTE, UP, DOWN, FILES
        self.made = dict.fromkeys(streams, 0)
        self._random, self._eager = Random(seed), eager
        self._queues: dict[int, deque[tuple[tuple[int, int], Callable[[], object]]]] = {
            stream: deque() for stream in streams
        }
        self._lock = threading.RLock()

    def reach(self, stream: int, number: int) -> None:
        """Does what a stream has to do before a point of it, and nothing else."""
        with self._lock:
            while self.made[stream] < number:
                after, run = self._queues[stream].popleft()
                self.reach(*after)
                run()
                self.made[stream] += 1

    def current(self) -> int:
        return COMPUTE

    def record(self, stream: int, again: LateEvent | None = None) -> LateEvent:
        with self._lock:
            at = stream, self.made[stream] + len(self._queues[stream])
            if again is None:
                return LateEvent(self, *at)
            again.at, again.waiter = at, -1
            return again

    def wait(self, stream: int, event: LateEvent) -> None:
        if event.waiter != stream and not event.done():
            event.waiter = stream
            self._submit(stream, lambda: None, event.at)

    def follow(self, stream: int, other: int) -> None:
        self.wait(stream, self.record(other))

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._submit(stream, lambda: ctypes.memmove(target, source, nbytes))

    def copy_behind(
        self,
        stream: int,
        others: Iterable[int],
        target: int,
        source: int,
        nbytes: int,
        again: LateEvent | None = None,
        after: Iterable[LateEvent] = (),
    ) -> LateEvent:
        with self._lock:
            for event in after:
                self.wait(stream, event)
            for other in others:
                self.follow(stream, other)
            self.copy(stream, target, source, nbytes)
            return self.record(stream, again)

    def fill(self, stream: int, target: int, value: int, nbytes: int) -> None:
        self._submit(stream, lambda: ctypes.memset(target, value, nbytes))

    def can_pack(self) -> bool:
        return False

    def can_pack_homes(self) -> bool:
        return False

    def capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        with self._lock:
            for stream, queue in self._queues.items():
                self.reach(stream, self.made[stream] + len(queue))

    def _submit(
        self, stream: int, run: Callable[[], object], after: tuple[int, int] = (COMPUTE, 0)
    ) -> None:
        with self._lock:
            if stream == COMPUTE:  # it is never behind
                self.reach(*after)
                run()
                return
            self._queues[stream].append((after, run))
            early = [stream] * (len(self._queues[stream]) > MOST)
            if self._random.random() < self._eager:
                early.append(self._random.choice([UP, DOWN, FILES]))
            for other in early:
                self.reach(other, self.made[other] + bool(self._queues[other]))


class LaggingEngine(StreamCopyEngine):
    """The engine of CUDA over such links.

    Memory outside the arena is torch's, and no copy keeps it: a copy down of what is gone may read
    anything, and one up to what is gone is a fault.

    Attributes:
        faults: What must not happen and did.
    """

    def __init__(self, seed: int, eager: float, hbm: HostArena) -> None:
        """Starts idle; see :class:`LaggingLinks`.

        Args:
            seed: Of what is done sooner than it has to be.
            eager: How often something is.
            hbm: The arena.
        """
        super().__init__(LaggingLinks(seed, eager), UP, DOWN, FILES)
        self.hbm = hbm
        self.faults: list[str] = []

    def up(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Any, *rest: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        if extent.nbytes:
            return super().up(target, source, extent, after, *rest, **more)
        return self._outside(UP, target, source, target, after)

    def down(self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Any) -> Any:
        if extent.nbytes:
            return super().down(target, source, extent, after)
        return self._outside(DOWN, target, source, source, after)

    def copy_up(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any]) -> Any:
        if covers(self.hbm, target):
            return super().copy_up(target, source, after)
        links: Any = self.calls
        for event in after:
            links.wait(FILES, event)
        links._submit(FILES, self._run(FILES, target, source, target))
        return links.record(FILES)

    def copy_down(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        if covers(self.hbm, source):
            return super().copy_down(target, source)
        links: Any = self.calls
        links._submit(DOWN, self._run(DOWN, target, source, source))
        return links.record(DOWN)

    def _outside(
        self, stream: int, target: torch.Tensor, source: torch.Tensor, ours: torch.Tensor,
        after: Any,
    ) -> LateEvent:  # fmt: skip
        links: Any = self.calls
        if after is not None:
            links.wait(stream, after)
        links._submit(stream, self._run(stream, target, source, ours))
        # as the engine does with its own copies
        fences = self._rising if stream == UP else self._falling
        event: LateEvent = links.record(stream)
        fences.add(Extent(0, 0), event)
        return event

    def _run(
        self, stream: int, target: torch.Tensor, source: torch.Tensor, ours: torch.Tensor
    ) -> Callable[[], object]:
        memory = StorageWeakRef(ours.untyped_storage())
        to, at, nbytes = target.data_ptr(), source.data_ptr(), target.numel()

        def run() -> None:
            if not memory.expired():
                ctypes.memmove(to, at, nbytes)
            elif stream != DOWN:
                self.faults.append("memory was let go while a copy was to be written there")
            else:
                ctypes.memset(to, POISON, nbytes)

        return run


@contextmanager
def lagging(
    seed: int,
    eager: float = 0.0,
    *,
    chunks: int = 16,
    beside: bool = False,
    fault: Faults | None = None,
) -> Iterator[list[LaggingEngine]]:
    """Has managers for the CPU made with links and files that lag; yields their engines.

    Args:
        seed: Of what is done sooner than it has to be, and of what files do next.
        eager: How often something is, whenever a copy is submitted.
        chunks: Of staging, of a page each.
        beside: Whether copies from DRAM are begun ahead, as on a GPU.
        fault: What goes wrong with the disk.
    """
    made: list[LaggingEngine] = []
    arenas: list[MappedHostArena] = []
    content: WeakKeyDictionary[Homes, dict[int, bytearray]] = WeakKeyDictionary()

    def open_arena(*args: Any, **settings: Any) -> MappedHostArena:
        arenas.append(MappedHostArena(*args, **settings))
        return arenas[-1]

    def make() -> LaggingEngine:
        made.append(LaggingEngine(seed + len(made), eager, arenas[-1]))
        return made[-1]

    def open_files(homes: Homes, copy: Any, _: Any) -> tuple[Any, str, str]:
        random = Random(seed)
        disk = partial(MemoryDisk, content.setdefault(homes, {}), random, fault)
        mover = make_mover(homes, copy, copy.hbm, disk, random, eager)
        return mover, "given", "files lag"

    def ahead(kind: type, name: str) -> None:
        begin: Any = kind.__init__  # type: ignore[misc]

        def begins(self: Any, *args: Any) -> None:
            begin(self, *args)
            setattr(self, name, beside)

        patch.setattr(kind, "__init__", begins)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiermem.runtime.assembly.HostCopyEngine", make)
        patch.setattr("tiermem.runtime.memory.opening.MappedHostArena", open_arena)
        patch.setattr("tiermem.runtime.memory.opening.make_mover", open_files)
        patch.setattr("tiermem.transfer.file.mover.Pump", LaggingPump)
        for name, value in (("_LEAST_CHUNK", CHUNK), ("_MOST_CHUNK", CHUNK), ("_CHUNKS", chunks)):
            patch.setattr(f"tiermem.runtime.memory.homes.{name}", value)
        ahead(Fetcher, "beside")
        ahead(BlockSweep, "_dram")
        yield made
