"""Files that lag behind as far as the order of their work allows, below links that lag.

The file mover's own pump runs in the threads that wait for it, a piece of work at a time, drawn at
random: the disk ends one operation, a helper is done with one chunk, or one copy of a chunk is
made. Nothing happens that nobody waits for, but by chance. What is let go is overwritten: chunks of
staging, and DRAM.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch

from tiermem.core.block import Extent
from tiermem.io.engine import IoCompletion, IoEngine, IoOp, IoRequest, Progress, memory_view
from tiermem.runtime.memory.homes import Homes
from tiermem.storage.arena import HostArena
from tiermem.testing.helpers import ScriptedHelpers
from tiermem.testing.io import Fault, ScriptedEngine
from tiermem.transfer.copy import POISON
from tiermem.transfer.file.fenced import FencedCopies
from tiermem.transfer.file.jobs import Job
from tiermem.transfer.file.mover import FileMover
from tiermem.transfer.file.pump import Pump
from tiermem.transfer.streams import CudaChunkCopier, StreamCopyEngine

CHUNK = 4096
_PATIENCE = 100
DISK, FENCE, HELPER = "disk", "fence", "helper"
Faults = Callable[[IoRequest, int], Fault | None]


def covers(arena: HostArena, tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in an arena."""
    return arena.address <= tensor.data_ptr() < arena.address + arena.capacity


class MemoryDisk(ScriptedEngine):
    """An engine whose swap files are in memory: a real disk takes longer than all the rest.

    Args:
        content: What has been written to each file, by descriptor.
        random: Of which operation ends next.
        fault: What goes wrong with one.
    """

    def __init__(self, content: dict[int, bytearray], random: Random, fault: Faults | None) -> None:
        super().__init__(random.randrange, fault)
        self._content = content

    def _move(self, progress: Progress, fault: Fault) -> int:
        request, file = progress.request, self._files[progress.request.file]
        if request.op is IoOp.READ and file not in self._content:
            return super()._move(progress, fault)
        held, end = self._content.setdefault(file, bytearray()), request.offset + request.nbytes
        held.extend(bytes(max(0, end - len(held))))
        memory = memory_view(request.address, request.nbytes)
        if request.op is IoOp.READ:
            memory[:] = held[request.offset : end]
        else:
            held[request.offset : end] = memory
        return request.nbytes


class Turns:
    """Stands in for the thread of a pump, and for what tells other threads that it got on."""

    ident = None

    def __init__(self, pump: LaggingPump) -> None:
        self._pump = pump
        self.over = False

    def is_alive(self) -> bool:
        """Whether the pump has not ended."""
        return not self.over

    def wait(self, timeout: float | None = None) -> None:
        """Does one piece of work."""
        self._pump.turn()

    def notify_all(self) -> None:
        """Nobody sleeps."""


class PoisonedChunks(list[int]):
    """Numbers of spare chunks, whose bytes are overwritten as they become that."""

    def __init__(self, numbers: list[int], chunks: list[torch.Tensor]) -> None:
        super().__init__(numbers)
        self._chunks = chunks

    def append(self, number: int) -> None:
        chunk = self._chunks[number]
        ctypes.memset(chunk.data_ptr(), POISON, chunk.numel())
        super().append(number)


class DeviceCopies(FencedCopies):
    """Knows what is a device's memory where that is the host's as well."""

    def __init__(self, copier: CudaChunkCopier, hbm: HostArena, dram: HostArena) -> None:
        super().__init__(copier)
        self._hbm, self._dram = hbm, dram

    def in_host(self, job: Job) -> bool:
        """Whether the bytes of a job lie in DRAM, or are read outside the device's order."""
        if job.tensor is None or covers(self._hbm, job.tensor):
            return False
        return covers(self._dram, job.tensor) or (job.transfer.is_read and not job.after)


class LaggingPump(Pump):
    """A pump without a thread.

    Attributes:
        random: Of what is done next.
        eager: How often something is done for which nobody waits, whenever something is asked for.
    """

    random: Random
    eager: float

    def __init__(
        self, store: Any, engine: Any, staging: torch.Tensor, chunk: int, copier: Any,
        verify: bool, helpers: Any,
    ) -> None:  # fmt: skip
        helpers = partial(ScriptedHelpers, choose=self._helps)
        super().__init__(store, engine, staging, chunk, copier, verify, helpers)
        self._opens = store.fds, (staging.data_ptr(), staging.numel())
        turns: Any = Turns(self)
        self._thread = self.ended.changed = turns
        self._next: str | None = None
        self._idle = 0
        self._speeds: dict[str, float] = {}
        chunks = self.pieces._staging
        chunks.spare = PoisonedChunks(chunks.spare, chunks._chunks)

    def start(self) -> None:
        """Opens its engine."""
        self.workers.make()
        self.pieces.engine, self.pieces.helpers = self.workers.engine, self.workers.helpers
        self.workers.open(*self._opens)

    def turn(self) -> None:
        """Does one piece of work, if there is any.

        Raises:
            AssertionError: If somebody waits for it and nothing is left to do.
        """
        with self.ended.lock:
            if not self._speeds:
                self._speeds = {
                    kind: self.random.choice((1.0, 1.0, 0.05)) for kind in (DISK, FENCE, HELPER)
                }
            if not self._begin_turn():
                return
            self.pieces.look_at_fences()
            self.pieces.begin()
            kinds = self._possible()
            self._idle = 0 if kinds else self._idle + 1
            assert self._idle < _PATIENCE, f"the pump stands still: {list(self.pieces.queue.jobs)}"
            weights = [self._speeds[kind] for kind in kinds]
            self._next = self.random.choices(kinds, weights)[0] if kinds else None
            self._end_turn(0.0)

    def close(self) -> None:
        """Ends it."""
        super().close()
        turns: Any = self._thread
        if not turns.over:
            turns.over = True
            self._end(None)

    def _post(self, *request: Any) -> bool:
        done = super()._post(*request)
        while self.random.random() < self.eager:
            with self.ended.lock:
                self._begin_turn()
                self.pieces.look_at_fences()
                self.pieces.begin()
                if not self._possible():
                    break
                self.turn()
        return done

    def _possible(self) -> list[str]:
        helpers: Any = self.workers.helpers
        ways = {
            DISK: self.workers.engine.in_flight,
            FENCE: self.pieces.copies.chunks,
            HELPER: helpers._waiting,
        }
        return [kind for kind, left in ways.items() if left]

    def _helps(self, count: int) -> int:
        if self._next != HELPER:
            return -1
        self._next = None
        return self.random.randrange(count)

    def _wait(self, look: float) -> list[IoCompletion]:
        if self._next == FENCE and self.pieces.copies.chunks:
            fence = self.random.choice(self.pieces.copies.chunks).fence
            if fence is not None:
                fence.wait()
        if self._next != DISK:
            return []
        engine: Any = self.workers.engine
        engine._woken = False
        done: list[IoCompletion] = engine.wait(0)
        return done


def make_mover(
    homes: Homes, copy: StreamCopyEngine, hbm: HostArena, disk: Callable[[], IoEngine],
    random: Random, eager: float,
) -> FileMover | None:  # fmt: skip
    """Returns a file mover that lags, which takes HBM for a device's memory."""
    if not isinstance(homes.dram.free, partial):
        free: Any = partial(_poison, homes, homes.dram.free)
        homes.dram.free = free  # type: ignore[method-assign]
    if homes.files is None or homes.staging is None:
        return None
    copier = CudaChunkCopier(copy)
    mover = FileMover(homes.files, disk, homes.staging, homes.chunk, copier)
    pump: Any = mover._pump
    pump.random, pump.eager = random, eager
    pump.pieces.copies = DeviceCopies(copier, hbm, homes.arena)
    return mover


def _poison(homes: Homes, free: Callable[[Extent], None], extent: Extent) -> None:
    free(extent)
    whole = homes.arena.bytes_of(extent)
    ctypes.memset(whole.data_ptr(), POISON, whole.numel())
