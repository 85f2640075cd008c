"""Graphs that are left to torch: tiermem's saved-tensor hooks do not see what they save.

Activation checkpointing compares what a part saves when it is computed and when it is recomputed.
So it is noted, with the hook that recomputes, which way the part was computed, and it is recomputed
in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch

from tiermem.nn.groups.keptviews import unpacked


class LeavesOut(Protocol):
    """A model whose graphs may be left to torch."""

    def begin_again(self) -> None:
        """Called before backward may recompute a part of such a graph; provides its blocks."""
        ...

    def put_back(self) -> None:
        """Restores the interceptors, so that hooks see what is saved from now on."""
        ...


class LeftOut(threading.local):
    """Whether the calling thread computes a graph that is left to torch.

    Attributes:
        of: The model; None if hooks have to see what is saved.
        again: The checkpointed part that is being recomputed, if it began in the tiers.
    """

    of: LeavesOut | None = None
    again: Again | None = None


left_out = LeftOut()
taken_out: WeakSet[LeavesOut] = WeakSet()
"""Models without interceptors at the moment, so that their graphs are left to torch."""


class Again:
    """An unpack hook of a checkpoint: it recomputes a part in the way in which it was computed.

    It has no reference to a model, as the garbage collector does not see that graphs keep it.

    Attributes:
        covered: Whether hooks of tiermem's have seen what was saved.
        counted: Blocks with a weight that was counted but not kept: hooks and id of each.
    """

    __slots__ = ("_of", "_unpack", "counted", "covered")

    def __init__(self, of: LeavesOut | None, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.covered, self._unpack = False, unpack
        self._of: ref[LeavesOut] | None = None
        if of is not None:
            self.leave_to(of)
        self.counted: set[tuple[Any, int]] = set()

    def may_leave_to(self, model: LeavesOut) -> bool:
        """Whether saved tensors may be left to torch, as part of a model's graph."""
        return not self.covered and (self._of is None or self._of() is model)

    def leave_to(self, model: LeavesOut) -> None:
        """Notes that saved tensors of this model's graph are left to torch."""
        self._of = ref(model)

    def __call__(self, packed: Any) -> torch.Tensor:
        """Unpacks; the first call recomputes the whole part."""
        if self._of is None:
            for model in list(taken_out) if self.covered else ():
                model.put_back()
            outer, left_out.again = left_out.again, self
            try:
                found: torch.Tensor = unpacked(self._unpack, packed)
            finally:
                left_out.again = outer
            return found
        of = self._of()
        before, left_out.of = left_out.of, of
        try:
            if of is not None:  # otherwise the model no longer exists
                of.begin_again()
            return self._unpack(packed)
        finally:
            left_out.of = before
