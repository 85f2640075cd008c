"""Copies that a test lets end, as a device's end late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

SECONDS = 30.0  # what never takes that long, however slow the machine


class HeldFence:
    """A fence that is done when the test says so; a wait for it waits for the test.

    Attributes:
        waited: Set once somebody waits.
    """

    waiter = -1

    def __init__(self, copy: Callable[[], object], *, streamed: bool = False) -> None:
        self.waited = threading.Event()
        self._streamed = streamed
        self._copy = copy
        self._let_go = threading.Event()

    @property
    def event(self) -> HeldFence | None:
        """Itself, where streams can wait for it."""
        return self if self._streamed else None

    def done(self) -> bool:
        return self._let_go.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self._let_go.wait(SECONDS)

    synchronize = wait

    def let_go(self) -> None:
        self._copy()
        self._let_go.set()


class LateCopier:
    """Copies that happen only when their fence is let go, as a device's do.

    Args:
        streamed: Whether streams can wait for them.
    """

    def __init__(self, *, streamed: bool = False) -> None:
        self._streamed = streamed
        self.fences: list[HeldFence] = []
        self.changed = threading.Condition()

    def _late(self, target: torch.Tensor, source: torch.Tensor) -> HeldFence:
        with self.changed:
            fence = HeldFence(lambda: target.copy_(source), streamed=self._streamed)
            self.fences.append(fence)
            self.changed.notify_all()
        return fence

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
    ) -> HeldFence:
        return self._late(target, staging)

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> HeldFence:
        return self._late(staging, source)

    def until_asked(self, count: int) -> list[HeldFence]:
        """Waits until that many copies are under way; returns them in order."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.fences) >= count, SECONDS)
            return list(self.fences)

    def let_go(self, count: int) -> None:
        """Completes that many copies, the latest first, each once it was asked for."""
        for _ in range(count):
            with self.changed:
                assert self.changed.wait_for(lambda: bool(self.fences), SECONDS)
                fence = self.fences.pop()
            fence.let_go()
