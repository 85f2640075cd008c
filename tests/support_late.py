"""A copy engine whose copies of saved tensors are made as late as their order allows."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.core.block import Extent
from tiermem.transfer.copy import POISON, HostCopyEngine


class LateCopy:
    """One copy that was submitted; also the event that it leaves behind."""

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
        while not self.made:
            self.lane.popleft()._now()

    def _now(self) -> None:
        if self.after is not None:
            self.after.make()
        self.made = True
        if not self.memory.expired():
            ctypes.memmove(self.target, self.source, self.nbytes)
        elif self.is_up:
            self.engine.harm.append("memory was let go while a copy was to be written there")
        else:  # whoever has the memory now has written to it
            ctypes.memset(self.target, POISON, self.nbytes)


class LateCopyEngine(HostCopyEngine):
    """Makes copies from and to memory outside the arena when somebody waits, or by chance.

    Attributes:
        harm: What must not happen and did.
    """

    def __init__(self, seed: int, eager: float = 0.2) -> None:
        self.chance = random.Random(seed)
        self.eager = eager
        self.ups: deque[LateCopy] = deque()
        self.downs: deque[LateCopy] = deque()
        self.harm: list[str] = []

    def up(self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Any) -> Any:
        if extent.nbytes:
            return super().up(target, source, extent, after)
        return self._later(LateCopy(self, self.ups, target, source, after, target))

    def down(self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Any) -> Any:
        if extent.nbytes:
            return super().down(target, source, extent, after)
        return self._later(LateCopy(self, self.downs, target, source, after, source))

    def use(self, event: Any) -> None:
        if event is not None:
            event.make()

    def wait(self, event: Any) -> None:
        self.use(event)

    def synchronize(self) -> None:
        for lane in (self.ups, self.downs):
            if lane:
                lane[-1].make()

    def _later(self, copy: LateCopy) -> LateCopy:
        copy.lane.append(copy)
        if self.chance.random() < self.eager:
            copy.make()
        return copy
