"""The current backward, for an optimizer that performs steps inside backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from tiermem.core.block import Block
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.groups import frozen_settings
from tiermem.optim.units.arrivals import Arrivals
from tiermem.optim.units.finality import marks_of
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.services.sweep import BlockSweep

_TRIALS = 2


class SteppedBackward:
    """Knows which gradients of a backward are final, and with which settings it steps.

    Attributes:
        entries: The optimizer's managed parameters, by the id of the parameter.
        units: Its units, by the id of the group of their weights.
        groups: The parameter groups.
        settings: Their settings at the first gradient of a backward with steps.
        counted: Whether the first gradient of this backward has arrived.
        steps: Whether steps are performed in it.
        pipeline: Writes blocks home that steps have written.
        held_back: Ids of the groups whose blocks are written home in the next forward.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Starts without units."""
        self._runtime = runtime
        self._arrivals = Arrivals()
        self.entries, self.units = self._arrivals.entries, self._arrivals.units
        self.groups: Sequence[dict[str, Any]] = ()
        self.settings: list[dict[str, Any]] = []
        self.counted = self.steps = False
        self.pipeline = BlockSweep(runtime.manager)
        self.held_back: set[int] = set()
        self._task = -1
        self._marks: object = None

    def extend(self, units: Iterable[StepUnit], groups: Sequence[dict[str, Any]]) -> None:
        """Follows the gradients of new units.

        Args:
            units: The new ones.
            groups: All parameter groups, with the settings that a step uses.
        """
        self.groups = groups
        self._arrivals.add(units)

    def begins(self) -> None:
        """Called when a backward begins."""
        self._task = torch._C._current_graph_task_id()
        self.counted = self.steps = False
        self._arrivals.forget()

    def ends(self) -> None:
        """Called when a backward ends."""
        self._task = -1
        self.steps = False
        self._arrivals.forget()

    def with_steps(
        self,
        order: Sequence[int],
        is_elsewhere: Callable[[StepUnit], bool],
        besides: Callable[[StepUnit], list[int]],
    ) -> list[int]:
        """Returns an order of use with each step inserted after the last use of its gradients.

        Args:
            order: Ids of blocks, in the order of a backward without steps.
            is_elsewhere: Returns whether the step of a unit uses no blocks here.
            besides: Returns ids of further blocks that it uses before its state.
        """
        weights = {us[0].group.block.id for us in self.units.values() if us[0].group is not None}
        until = max((at for at, block in enumerate(order) if block in weights), default=-1)
        last: dict[int, int] = {}
        for position, block in enumerate(order):
            if position <= until or block not in last:  # clipping of all gradients may follow
                last[block] = position
        behind: dict[int, list[int]] = {}
        for units in self.units.values():
            gradients = [block for unit in units for block in _gradients_of(unit)]
            end = max((last.get(block, -1) for block in gradients), default=-1)
            group = units[0].group
            if end < 0 or group is None or any(map(is_elsewhere, units)):
                continue
            uses = [order[end]]
            for unit in units:
                if len(uses) > 1:  # for the first, the weights are in use already
                    uses.append(group.block.id)
                kept = (block.id for block in unit.kept_blocks())
                uses += *_gradients_of(unit), *besides(unit), *kept
            # nothing is used twice in a row
            behind[end] = [block for block, _ in groupby(uses)][1:]
        return [b for at, block in enumerate(order) for b in (block, *behind.get(at, ()))]

    def is_here(self) -> bool:
        """Whether the calling code runs in this backward, not in another one inside it."""
        return torch._C._current_graph_task_id() == self._task

    def prepare(self) -> None:
        """Freezes the settings, and clears what steps of the previous backward have left."""
        self.settings = frozen_settings(self.groups)
        self.pipeline = BlockSweep(self._runtime.manager)
        self._runtime.unwritten.forget()
        self.held_back = self._arrivals.held_back(self._runtime)

    def note_settings(self) -> None:
        """Notes the present settings."""
        self._marks = marks_of(self.groups)

    def has_changed(self) -> bool:
        """Whether settings changed since :meth:`note_settings`."""
        return self._marks != marks_of(self.groups)

    def has_all(self, entries: Sequence[Entry]) -> bool:
        """Whether, after these, no further gradient of their block will arrive."""
        known = self._arrivals.known
        mine = [entry for entry in entries if entry in known]
        return bool(mine) and not self._arrivals.awaits(mine[0].group, mine)

    def final_units(self, group: Group) -> list[StepUnit]:
        """Returns the units of a block that have gradients."""
        found = []
        for unit in self.units[id(group)]:
            for entry in unit.entries:
                if entry.has_grad:
                    found.append(unit)
                    break
        return found

    def write(self, group: Group, blocks: Sequence[Block], *, ahead: bool = False) -> None:
        """Writes blocks home that steps of a group have written, now or in the next forward.

        Args:
            group: The group whose weights are stepped.
            blocks: The blocks that the steps have written.
            ahead: Whether the steps can be undone: then the next step needs the present weights at
                home, so those that stay in HBM are also written home, in the next forward.
        """
        unwritten = self._runtime.unwritten
        stays = ahead and group.block.id in self._runtime.manager.parts.evictor.residents
        if id(group) in self.held_back:
            unwritten += blocks  # until forward has progressed further
        else:
            self.pipeline.write(blocks)
            unwritten += [group.block] if stays else []
        if stays:
            unwritten.staying.add(group.block.id)


class FirstSteps:
    """The first steps of a loop, performed after backward, which is only watched.

    Attributes:
        watches: Whether the current backward is only watched.
        watched: Whether a whole backward was watched since the last step.
        final: Gradients that a step in that backward would have used.
    """

    def __init__(self) -> None:
        """Starts before the first step."""
        self.watches = self.watched = False
        self.final: list[Entry] = []
        self._number = 0
        self._thrown = False  # whether gradients that such a step would have used were discarded
        self._trained: list[bool] = []

    @property
    def are_over(self) -> bool:
        """Whether steps are performed inside backward from now on."""
        return self._number >= _TRIALS

    def restart(self) -> None:
        """Starts again, as there are new units."""
        self._number = 0
        self.watched = False

    def look_at(self, entries: Iterable[Entry]) -> None:
        """Starts again if other parameters are trained, as a block's last gradient may differ.

        Args:
            entries: All parameters of the optimizer.
        """
        with torch._C.DisableTorchFunctionSubclass():
            trained = [entry.param.requires_grad for entry in entries]
        if trained != self._trained:
            self._trained, self._number = trained, 0

    def end_backward(self) -> bool:
        """Notes that a backward has ended; returns whether it was only watched."""
        watches, self.watches = self.watches, False
        self.watched = self.watched or watches
        return watches

    def after_step(self) -> None:
        """Counts a step; may be called again after an interrupt."""
        watched, thrown = self.watched, self._thrown
        self.watched = self._thrown = False
        if thrown and not self.are_over:
            self._number = 0
        elif watched:
            self._number += 1

    def thrown_away(self) -> None:
        """Notes that gradients are discarded: steps must not use them, the loop will change."""
        self._thrown = self._thrown or bool(self.final)
        self.watched = False


def _gradients_of(unit: StepUnit) -> list[int]:
    """Returns the ids of the blocks that have the gradients of a unit."""
    return [block.id for grads in unit.grad_units() for block in grads.blocks]
