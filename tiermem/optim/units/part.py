"""One part of a large parameter that is stepped in parts: a run of its elements, and a unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tiermem.nn.tensors.placeholder import is_placeholder, shared_placeholder
from tiermem.optim.rules.separable import copied
from tiermem.optim.units.foreign import ForeignWrites
from tiermem.optim.units.master import Masters
from tiermem.optim.units.rununit import RunUnit
from tiermem.optim.units.unit import State, StepUnit


class _AsSeen(ForeignWrites):
    """Reports what the whole parameter's unit has detected."""

    def __init__(self) -> None:
        super().__init__(None)
        self.written = True

    def look(self) -> bool:
        return self.written


class Part:
    """One run of a parameter's elements.

    Attributes:
        begin: Its first element.
        end: The end, exclusive.
        param: Stands for the run; it has data during a step.
        unit: Steps it.
        seen: Knows whether the weights may have been written.
        state: The state that the unit shows.
        given: The numbers that it got for its last step, copies of those that users see.
    """

    def __init__(self, whole: StepUnit, begin: int, end: int, number: int) -> None:
        """Describes a run of the unit's only parameter."""
        (param, group), count = whole.members[0], end - begin
        self.begin, self.end = begin, end
        self._away = shared_placeholder(torch.Size((count,)), param.dtype, param.device)
        self.param = nn.Parameter(self._away)
        name = f"{whole.name}[part {number}]"
        self.unit = RunUnit(name, [(self.param, group)], [], whole.plain.make)
        self.seen = self.unit.foreign = _AsSeen()
        self.unit.handed.spoils = whole.handed.spoils
        self.state: State = {}
        self.given: State = {}
        if whole.masters is not None:
            self.unit.masters = Masters([self.param], whole.masters.dtype)

    def run_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns its run of a contiguous tensor of the whole."""
        return tensor.detach().view(-1)[self.begin : self.end]

    def take_numbers(self, numbers: State) -> None:
        """Sets the state values that all parts share (the number of steps)."""
        kept = self.state.get(self.param)
        if kept is not None:
            self.given = {key: copied(value) for key, value in numbers.items()}
            kept.update(self.given)

    @contextmanager
    def over(self, weight: torch.Tensor, gradient: torch.Tensor | None = None) -> Iterator[None]:
        """Points its parameter at its run of the weights, and of the gradient."""
        self.point_at(weight, gradient)
        del weight, gradient
        try:
            yield
        finally:
            self.point_away()

    def point_at(self, weight: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Points its parameter at its run, like :meth:`over`, until :meth:`point_away`."""
        self.param.data = self.run_of(weight)
        if gradient is not None:  # torch accepts no other dtype for `param.grad`
            self.unit.handed.given = {id(self.param): self.run_of(gradient)}

    def point_away(self) -> None:
        """Points its parameter at no bytes; does nothing a second time."""
        if self.unit.handed.given or not is_placeholder(self.param):
            self.unit.handed.given = {}
            self.param.grad = None
            self.param.data = self._away
