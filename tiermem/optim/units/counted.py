"""A step counts as a write of the weights when it is requested, wherever it is performed.

torch refuses backward through a graph that has saved a tensor which was written since: it compares
the version counter of each tensor. A step that waits for the next forward, or is performed on the
host, or in parts, writes nothing through the parameters when it is requested, and a graph from
before would use the new weights, or the old ones. So it is counted at the request, and the later
write is not counted again: a graph that is recorded in between has the weights after the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from tiermem.nn.compat.counters import keep_versions

if TYPE_CHECKING:
    from tiermem.optim.units.unit import StepUnit

_first, _has_grad = itemgetter(0), attrgetter("has_grad")


class CountedSteps:
    """Counts the steps of one unit as writes of its weights.

    Attributes:
        ticket: Identifies the step that was counted, or left uncounted, before it is performed.
        uncounted: Numbers of parameter groups whose class writes in a way that torch does not
            count (``param.data``): there a graph of a resident model is not refused either.
    """

    __slots__ = ("_due", "ticket", "uncounted")

    def __init__(self) -> None:
        """Starts with nothing counted."""
        self.uncounted: set[int] = set()
        self.ticket: object = None
        self._due: object = None

    def ahead(self, unit: StepUnit, ticket: object) -> None:
        """Counts a step that will be performed elsewhere, or later; once for each ticket.

        :class:`ForeignWrites` does not attribute it to another writer.

        Args:
            unit: The unit of the step; its gradients exist.
            ticket: Identifies the requested step.
        """
        if self.ticket is ticket:
            return
        params = [*map(_first, unit.members)]
        alone = len(unit.entries) == len(params) and all(map(_has_grad, unit.entries))
        if self.uncounted or not alone:
            params = [
                param
                for (param, number), entry in zip(unit.members, unit.entry_of, strict=True)
                if (number not in self.uncounted or unit.has_master(param))
                and ((entry is not None and entry.has_grad) or param.grad is not None)
            ]
        self.ticket = ticket
        if unit.group is not None:
            unit.group.writes.add(params)

    def later(self, ticket: object) -> None:
        """Leaves a step uncounted that will be performed, until :meth:`confirm`."""
        self.ticket = self._due = ticket

    def not_made(self, ticket: object) -> None:
        """Forgets a step that was left uncounted and failed: the next try counts."""
        if self._due is ticket:
            self._due = self.ticket = None

    def confirm(self, unit: StepUnit, ticket: object) -> None:
        """Counts a step that was left uncounted; its gradients exist."""
        if self._due is ticket:
            self._due = self.ticket = None
            self.ahead(unit, ticket)

    @contextmanager
    def unchanged(self, unit: StepUnit) -> Iterator[None]:
        """Leaves the counters as they are, while the step of :attr:`ticket` is performed."""
        kept = keep_versions([*map(_first, unit.members)])
        try:
            yield
        finally:
            for counter in kept:
                counter.__exit__(None, None, None)
