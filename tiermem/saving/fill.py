"""Fills blocks with tensors of a checkpoint, as they are read.

A block's former contents are discarded first: otherwise they would be read from a disk only to be
overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.core.block import Block
from tiermem.nn.compat.counters import increment_versions
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import forget
from tiermem.optim.units.master import Masters
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.manager import BlockManager
from tiermem.saving.layout import Spec
from tiermem.saving.reader import Need, TensorReader


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a tensor of the checkpoint.

    Attributes:
        spec: The tensor.
        begin: The first element.
        end: The end, exclusive.
    """

    spec: Spec
    begin: int
    end: int

    @classmethod
    def whole(cls, spec: Spec) -> Run:
        """Returns all of a tensor."""
        return cls(spec, 0, spec.nbytes // spec.dtype.itemsize)

    @property
    def need(self) -> Need:
        """The bytes that are read for it."""
        itemsize = self.spec.dtype.itemsize
        return Need(self.spec.key, self.begin * itemsize, self.end * itemsize)

    def into(self, reader: TensorReader, target: torch.Tensor) -> None:
        """Fills a tensor of the same number of elements and dtype with it."""
        reader.into(self.spec.key, target, self.begin * self.spec.dtype.itemsize)


@dataclass(slots=True, eq=False)
class ParamState:
    """A parameter's optimizer state in a checkpoint, or that of a part of one.

    Attributes:
        param: The parameter, as the unit knows it.
        runs: Tensors by their key.
        values: Values that are not tensors, by key, in order; None in place of a tensor.
    """

    param: torch.Tensor
    runs: dict[str, Run]
    values: dict[str, Any]


def blank(manager: BlockManager, block: Block) -> None:
    """Discards the contents of a block, unless it has aliases or is permanent."""
    slot = manager.parts.slots.current.get(block.id)
    record = manager.parts.table[block.id]
    if not record.fixed and not record.leases and (slot is None or not slot.aliased):
        manager.discard(block)


@contextmanager
def written(manager: BlockManager, block: Block | None) -> Iterator[Sequence[torch.Tensor]]:
    """Yields a block's tensors to be written; none if there is no block."""
    if block is None:
        yield []
        return
    slot = manager.acquire(block)
    try:
        yield slot.views
    finally:
        manager.release(block, dirty=True)


@contextmanager
def _in_place(group: Group) -> Iterator[Sequence[torch.Tensor]]:
    """Yields the tensors, in place, of a block for which HBM has no room, to be written."""
    views = group.lender.lend_in_place(group)
    try:
        yield views
    finally:
        group.lender.lent_in_place(group)


def fill_group(group: Group, picks: Sequence[tuple[int, Run]], reader: TensorReader) -> None:
    """Fills tensors of a block of weights or buffers.

    Args:
        group: The block as its modules see it.
        picks: Number of each tensor, and its new contents.
        reader: Returns them in this order.
    """
    manager = group.manager
    with manager.lock:
        whole = {index for index, _ in picks} == set(range(len(group.block.tensors)))
        if whole and not group.in_place:
            blank(manager, group.block)
        with _in_place(group) if group.in_place else written(manager, group.block) as views:
            for index, run in picks:
                run.into(reader, views[index])
        # from now on backward refuses what a graph has saved of them
        group.writes.add([entry.param for entry in group.entries])
        increment_versions([buffer.tensor for buffer in group.buffers])


def state_runs(saved: Sequence[ParamState]) -> list[Run]:
    """Returns the runs that :func:`fill_state` reads, in order."""
    return [run for each in saved for run in each.runs.values()]


def fill_state(
    unit: StepUnit,
    runtime: ModuleRuntime,
    groups: Sequence[dict[str, Any]],
    shown: dict[Any, Any],
    saved: Sequence[ParamState],
    reader: TensorReader,
) -> None:
    """Loads a unit's state; parameters without state in the checkpoint lose theirs.

    Args:
        unit: Steps whole parameters, or a part of one.
        runtime: The modules' runtime.
        groups: Settings of the parameter groups.
        shown: Where its state is shown, to be updated.
        saved: The state in the checkpoint.
        reader: Returns the tensors in the order of :func:`state_runs`.
    """
    manager = runtime.manager
    optimizer = unit.plain.optimizer_for(groups)
    number_of = {id(param): number for param, number in unit.members}
    with manager.lock:
        for param, _ in unit.members:
            for value in optimizer.state.pop(unit.own(param), {}).values():
                forget(value)  # the optimizer has other tensors from now on
            shown.pop(param, None)
        if unit.block is not None:
            blank(manager, unit.block)
        with written(manager, unit.block) as views:
            for known in unit.plain.places:
                known.shell = None
            places = {(id(known.param), known.key): known for known in unit.plain.places}
            for each in saved:
                own = unit.own(each.param)
                values = dict(each.values)
                for key, run in each.runs.items():
                    place = places.get((id(each.param), key))
                    target = None if place is None or not views else views[place.first]
                    if target is None or not _fits(run, target):
                        target = _loose(run, own, groups[number_of[id(each.param)]])
                    run.into(reader, target)
                    values[key] = target
                optimizer.state[own] = values
            slot = None if unit.block is None else manager.parts.slots.current[unit.block.id]
            unit.plain.detach(runtime, slot, shown)


def _fits(run: Run, target: torch.Tensor) -> bool:
    return run.end - run.begin == target.numel() and run.spec.dtype is target.dtype


def _loose(run: Run, own: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Returns ordinary memory for a tensor of a state: beside its parameter, numbers on the host.

    torch's optimizers have them there; with ``capturable`` and ``fused``, numbers are
    beside the parameter as well (``torch.optim.Optimizer.load_state_dict``).
    """
    if run.end - run.begin == own.numel() and run.spec.shape != ():
        return torch.empty(own.shape, dtype=run.spec.dtype, device=own.device)
    beside = settings.get("capturable") or settings.get("fused")
    device = own.device if beside else torch.device("cpu")
    return torch.empty(run.spec.shape, dtype=run.spec.dtype, device=device)


def fill_masters(
    manager: BlockManager,
    masters: Masters,
    picks: Sequence[tuple[torch.Tensor, Run]],
    reader: TensorReader,
) -> None:
    """Fills the masters of a unit, or of a part of one.

    Args:
        manager: The manager of the blocks.
        masters: The masters.
        picks: Parameter, and its master in the checkpoint.
        reader: Returns them in this order.
    """
    with manager.lock:
        if masters.block is not None:
            blank(manager, masters.block)
        with written(manager, masters.block) as views:
            for param, run in picks:
                run.into(reader, masters.room_for(param, views))
            masters.made = True
