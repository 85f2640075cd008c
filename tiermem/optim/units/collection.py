"""The units of one optimizer together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from tiermem.errors import StepError, StorageError
from tiermem.optim.units.members import Membership
from tiermem.optim.units.order import StateOrder
from tiermem.optim.units.unit import State, StepUnit


class Units(Sequence[StepUnit]):
    """The units of one optimizer, in order, and which of them wait for their step.

    Attributes:
        state: The tiered optimizer's, by parameter.
        order: The order in which it shows them.
        members: Which parameters have a unit.
        owed: Ids of the units whose step was requested and is deferred.
        looked_into: Whether users got the state, and may have edited it.
    """

    def __init__(self, groups: list[dict[str, Any]], state: State) -> None:
        """Starts without units.

        Args:
            groups: The optimizer's list of parameter groups, which may grow.
            state: The tiered optimizer's, updated by steps.
        """
        self.state = state
        self.order = StateOrder(state, groups)
        self.members = Membership(groups)
        self.owed: set[int] = set()
        self.looked_into = False
        self._list: list[StepUnit] = []

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[StepUnit]:
        return iter(self._list)

    @overload
    def __getitem__(self, index: int) -> StepUnit: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepUnit]: ...

    def __getitem__(self, index: int | slice) -> StepUnit | list[StepUnit]:
        return self._list[index]

    def replace(self, units: Sequence[StepUnit]) -> None:
        """Sets the units, in this order."""
        self._list[:] = units

    def settled(self) -> list[StepUnit]:
        """Returns the units that have no deferred step."""
        return [unit for unit in self._list if id(unit) not in self.owed]

    def host_share(self) -> float:
        """Returns which share of the elements the host steps, from 0 to 1."""
        on_host = sum(p.numel() for u in self._list if u.host is not None for p, _ in u.members)
        return on_host and on_host / sum(p.numel() for u in self._list for p, _ in u.members)

    def explain(self, error: BaseException, left: Sequence[str]) -> None:
        """Adds to an error of the disk, or of the host, how far the step got.

        Args:
            error: The error; its message is extended.
            left: Names of the units that are not stepped.
        """
        again = "optimizer.step() goes on there"
        if self.owed:  # step() would perform another one, with the present gradients
            again = "the next use of them makes it, or optimizer.finish()"
        names = ", ".join(repr(name) for name in left[:8]) + (", ..." if len(left) > 8 else "")
        text = (
            f"; {len(self) - len(left)} of {len(self)} units of the optimizer step are made, each "
            f"whole, and {len(left)} are as they were: {names}; {again}"
        )
        if isinstance(error, StorageError):
            error.message += text
        elif isinstance(error, StepError):
            error.args = (f"{error}{text}",)
        elif hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"tiermem{text}")

    def explain_deferred(self, error: BaseException) -> None:
        """Adds to an error of a deferred step which units wait for theirs."""
        self.explain(error, [unit.name for unit in self._list if id(unit) in self.owed])
