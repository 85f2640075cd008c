"""A copy engine whose copies of saved tensors are made as late as their order allows."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.core.block import Extent
from tiermem.io import choose_engine
from tiermem.runtime.manager import BlockManager
from tiermem.transfer.copy import POISON, HostCopyEngine
from tiermem.transfer.file.copiers import HostCopier
from tiermem.transfer.file.mover import Fence, FileMover


class LateCopy:
    """One copy that was submitted; also the event that it leaves behind."""

    waiter = -1

    def __init__(
        self, engine: LateCopyEngine, lane: deque[LateCopy], target: torch.Tensor,
        source: torch.Tensor, after: Any, device: torch.Tensor,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.lane = lane
        self.after = after
        self.target, self.source = target.data_ptr(), source.data_ptr()
        self.nbytes = target.numel()
        self.is_up = device is target
        # as on a device, the copy does not keep its memory
        self.memory = StorageWeakRef(device.untyped_storage())
        self.made = False

    def make(self) -> None:
        """Makes every copy of its lane up to this one, the oldest first."""
        with self.engine.lock:
            while not self.made:
                self.lane.popleft()._now()

    def _now(self) -> None:
        if self.after is not None:
            self.after.make()
        if not self.memory.expired():
            ctypes.memmove(self.target, self.source, self.nbytes)
        elif self.is_up:
            self.engine.harm.append("memory was let go while a copy was to be written there")
        else:  # the memory may have been reused and written
            ctypes.memset(self.target, POISON, self.nbytes)
        self.made = True


class LateCopyEngine(HostCopyEngine):
    """Makes copies from and to memory outside the arena at a wait for them, or by chance.

    Attributes:
        harm: What must not happen and did.
    """

    def __init__(self, seed: int, eager: float = 0.2) -> None:
        self.chance = random.Random(seed)
        self.eager = eager
        self.ups: deque[LateCopy] = deque()
        self.downs: deque[LateCopy] = deque()
        self.files: deque[LateCopy] = deque()
        self.harm: list[str] = []
        self.lock = threading.RLock()  # those of files are submitted by the pump

    def up(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        extent: Extent,
        after: Any,
        again: Any = None,
        *,
        copied: bool = False,
    ) -> Any:
        if extent.nbytes:
            return super().up(target, source, extent, after)
        return self.later(LateCopy(self, self.ups, target, source, after, target))

    def down(self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Any) -> Any:
        if extent.nbytes:
            return super().down(target, source, extent, after)
        return self.later(LateCopy(self, self.downs, target, source, after, source))

    def use(self, event: Any) -> None:
        if event is not None:
            event.make()

    def wait(self, event: Any) -> None:
        self.use(event)

    def synchronize(self) -> None:
        for lane in (self.ups, self.downs, self.files):
            if lane:
                lane[-1].make()

    def later(self, copy: LateCopy) -> LateCopy:
        with self.lock:
            copy.lane.append(copy)
        if self.chance.random() < self.eager:
            copy.make()
        return copy


class LateFence:
    """The end of a copy of a chunk: the pump's looks may find it made, streams wait for it."""

    waiter = -1

    def __init__(self, copy: LateCopy) -> None:
        self._copy = copy
        self.event = copy

    def done(self) -> bool:
        if self._copy.engine.chance.random() < self._copy.engine.eager:
            self._copy.make()
        return self._copy.made

    def wait(self) -> None:
        self._copy.make()


class LateChunkCopier:
    """Copies chunks of files up late, on a lane of their own; down at once."""

    def __init__(self, engine: LateCopyEngine) -> None:
        self._engine = engine

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
    ) -> LateFence:
        engine = self._engine
        return LateFence(
            engine.later(LateCopy(engine, engine.files, target, staging, None, target))
        )

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Fence:
        return HostCopier().from_source(staging, source)


def make_late(manager: BlockManager, engine: LateCopyEngine) -> None:
    """Makes the copies of saved tensors late, in a manager whose blocks are all in DRAM."""
    manager.parts.transfers.copy = engine
    object.__setattr__(manager.parts, "copy", engine)  # a frozen bundle
    homes = manager.parts.homes
    if manager.parts.mover is None or homes.swap is None or homes.staging is None:
        return
    manager.parts.mover.close()
    copier = LateChunkCopier(engine)
    manager.parts.transfers.mover = FileMover(
        homes.swap, choose_engine()[0], homes.staging, homes.chunk, copier
    )
