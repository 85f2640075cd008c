"""A copy engine whose copies down, of blocks, are made as late as events and other copies allow.

Compute and copies up are made at once: as on a device whose link down has much to do.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.core.block import Extent
from tiermem.transfer.copy import POISON, HostCopyEngine, host_copy


@dataclass(eq=False)
class Down:
    """A copy down that was submitted; also the event that it leaves behind."""

    engine: LateDownEngine
    target: torch.Tensor
    source: torch.Tensor
    extent: Extent
    made: bool = False
    waiter: int = -1

    def done(self) -> bool:
        return self.made

    def synchronize(self) -> None:
        """Makes all copies down to this one, the oldest first."""
        with self.engine.lock:
            while not self.made:
                copy = self.engine.queue.popleft()
                host_copy(copy.target, copy.source)
                copy.made = True


class LateDownEngine(HostCopyEngine):
    """Makes a copy down when somebody waits for it, or is about to use its bytes of HBM."""

    def __init__(self) -> None:
        self.queue: deque[Down] = deque()
        self.lock = threading.RLock()

    def down(self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Any) -> Down:
        self.use(after)
        copy = Down(self, target, source, extent)
        with self.lock:
            self.queue.append(copy)
        return copy

    def up(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        extent: Extent,
        after: Any,
        _: Any = None,
        *,
        copied: bool = False,
    ) -> None:
        self.use(after)
        self.claim(extent)
        host_copy(target, source)

    def up_behind(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> None:
        for event in after:
            self.use(event)
        host_copy(target, source)

    def claim(self, extent: Extent) -> None:
        with self.lock:
            over = [copy for copy in self.queue if _overlap(copy.extent, extent)]
        if over:
            over[-1].synchronize()

    def poison(self, target: torch.Tensor, extent: Extent, *, copied: bool = False) -> None:
        self.claim(extent)
        ctypes.memset(target.data_ptr(), POISON, target.numel())

    def guards(self, extent: Extent) -> tuple[()]:
        self.claim(extent)
        return ()

    def prepare_down(self) -> None:
        """What is to be written to a file has been computed."""

    def use(self, event: Any) -> None:
        if event is not None:
            event.synchronize()

    def hold_up(self, _: Any, event: Any) -> None:
        self.use(event)

    def wait(self, event: Any) -> None:
        self.use(event)

    def synchronize(self) -> None:
        with self.lock:
            last = self.queue[-1] if self.queue else None
        self.use(last)


def _overlap(one: Extent, other: Extent) -> bool:
    both = bool(one.nbytes and other.nbytes)
    return both and one.offset < other.end and other.offset < one.end
