"""Graphs that are left to torch: nothing of tiermem's sees what autograd saves of them.

Checkpoints compare what a part saves as it is computed and as it is computed again. So which way
it began is noted with the hook that computes it again, and it is computed again in that way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch

from tiermem.nn.groups.keptviews import unpacked


class LeavesOut(Protocol):
    """A model of which graphs may be left to torch."""

    def begin_again(self) -> None:
        """Called as backward may compute a part of such a graph again, with all that it needs."""
        ...

    def put_back(self) -> None:
        """Has hooks see what is saved from now on."""
        ...


class LeftOut(threading.local):
    """What the calling thread computes of a graph that is left to torch, if it does.

    Attributes:
        of: The model; None where hooks are to see what is saved.
        again: The part of a checkpoint that is computed again, if one is that began in the tiers.
    """

    of: LeavesOut | None = None
    again: Again | None = None


left_out = LeftOut()
taken_out: WeakSet[LeavesOut] = WeakSet()
"""Models that have no interceptors just now, so that their graphs are left to torch."""


class Again:
    """An unpack hook of a checkpoint: it computes a part again in the way in which it began.

    The graph keeps it where the garbage collector does not see it, so it keeps no model.

    Attributes:
        covered: Whether hooks of tiermem's have seen what was saved.
        counted: The blocks of which a weight was counted and not kept: hooks and id of each.
    """

    __slots__ = ("_of", "_unpack", "counted", "covered")

    def __init__(self, of: LeavesOut | None, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.covered, self._unpack = False, unpack
        self._of: ref[LeavesOut] | None = None
        if of is not None:
            self.leave_to(of)
        self.counted: set[tuple[Any, int]] = set()

    def may_leave_to(self, model: LeavesOut) -> bool:
        """Whether what is saved may be left to torch, as part of a model's graph."""
        return not self.covered and (self._of is None or self._of() is model)

    def leave_to(self, model: LeavesOut) -> None:
        """Notes that what is saved, of the graph of this model, is left to torch."""
        self._of = ref(model)

    def __call__(self, packed: Any) -> torch.Tensor:
        """Unpacks; the first time that computes the whole part."""
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
            if of is not None:  # else it computes nothing of the tiers' any more
                of.begin_again()
            return self._unpack(packed)
        finally:
            left_out.of = before
