"""How gradients are divided into blocks: several of a group together, or one in runs.

A gradient that would take most of HBM beside the blocks that calls hold is kept in runs, each in a
block of its own. autograd computes it as a whole, in ordinary device memory, like every gradient.
From there one run after the other is copied to the tiers, so only one of them is in HBM at a time,
in backward and in a step. The parameter is stepped in parts, one for each run
(:mod:`tiermem.optim.units.parted`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape, contiguous_stride
from tiermem.core.parts import gradient_parts, whole_gradient
from tiermem.nn.groups.above import Passes
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradRun, GradUnit
from tiermem.nn.groups.group import Group


class Wanted:
    """Gradients of consecutive parameters of one group, before they have a home.

    Attributes:
        group: The group.
    """

    def __init__(self, entries: list[Entry], shapes: Sequence[TensorShape]) -> None:
        """Wants one block for all of them.

        Args:
            entries: The parameters.
            shapes: Shapes of their gradients.
        """
        self.group: Group = entries[0].group
        self._entries = entries
        self._shapes = list(shapes)
        self._runs: list[tuple[int, int]] = []

    def cut(self, runtime: Passes) -> None:
        """Divides a gradient into runs if it would take most of HBM beside blocks in use."""
        (entry, *others), shape = self._entries, self._shapes[0]
        policy = runtime.manager.parts.settings.policy
        if others or entry.whole is True or self.group.resident or policy.home(Role.GRAD) == "hbm":
            return
        if shape.stride != contiguous_stride(shape.shape):
            return
        table = runtime.manager.parts.table
        held = table.fixed_nbytes() + runtime.program.worst_chain
        runtime.manager.can_hold(held + whole_gradient(shape.nbytes))  # HBM may grow for that
        room, least = max(0, table.hbm.capacity - held), entry.whole is False
        runs = gradient_parts(entry.param.numel(), shape.itemsize, room, least=least)
        self._runs = runs if len(runs) > 1 else []

    def blocks(self) -> list[tuple[str, Role, list[TensorShape]]]:
        """Returns name, role and tensors of each block."""
        name = f"{self.group.block.name}.grad[{self._entries[0].name}]"
        if not self._runs:
            return [(name, Role.GRAD, self._shapes)]
        shape = self._shapes[0]
        return [
            (f"{name}[part {number}]", Role.GRAD, [_run(shape, end - begin)])
            for number, (begin, end) in enumerate(self._runs)
        ]

    def make(self, blocks: Iterator[Block]) -> GradUnit:
        """Returns the unit, given its blocks in order."""
        if not self._runs:
            return GradUnit(next(blocks), self._entries, self.group)
        (entry,) = self._entries
        runs = [GradRun(next(blocks), entry, begin, end) for begin, end in self._runs]
        return GradUnit(runs[0].block, self._entries, self.group, runs)


def _run(shape: TensorShape, elements: int) -> TensorShape:
    return TensorShape(shape.name, (elements,), (1,), shape.dtype, shape.itemsize)
