"""Where the bytes of a checkpoint's tensors are: in blocks, in ordinary memory, or masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tiermem.core.block import Block
from tiermem.nn.groups.entry import Entry
from tiermem.optim.units.master import Masters
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.manager import BlockManager

Run = tuple[str, int, torch.Tensor]
"""Key of a tensor in the checkpoint, first byte of a run in it, and the run's elements."""


class Source(Protocol):
    """A source of tensors of a checkpoint.

    Attributes:
        block: The block that contains them; None for ordinary memory.
    """

    block: Block | None

    def runs(self) -> Iterator[Run]:
        """Yields the present tensors; the manager's lock is held, and none of them is kept."""
        ...


@dataclass(slots=True, eq=False)
class BlockSource:
    """Tensors of one block.

    Attributes:
        manager: The manager of the block.
        block: The block.
        picks: Number of each tensor of it, its key, and its first byte there.
    """

    manager: BlockManager
    block: Block | None
    picks: list[tuple[int, str, int]] = field(default_factory=list)

    def runs(self) -> Iterator[Run]:
        """Yields the tensors; see :class:`Source`."""
        if self.block is None or not self.picks:
            return
        views = views_of(self.manager, self.block)
        for index, key, begin in self.picks:
            yield key, begin, views[index]


@dataclass(slots=True, eq=False)
class LooseSource:
    """One tensor in ordinary memory.

    Attributes:
        key: Key in the checkpoint.
        tensor: The tensor.
        block: None.
    """

    key: str
    tensor: torch.Tensor
    block: Block | None = None

    def runs(self) -> Iterator[Run]:
        """Yields the tensor."""
        yield self.key, 0, self.tensor


@dataclass(slots=True, eq=False)
class MasterSource:
    """The masters of a unit, or of a part of one.

    If other code wrote the weights, the masters are saved unchanged, and follow the weights at the
    next step, before or after a load.

    Attributes:
        manager: The manager of the blocks.
        masters: The masters.
        weight: Returns the elements of the weight of one of the unit's parameters.
        picks: Parameter, key of its master, and its first byte there.
        block: The block of the masters; None if they are in ordinary memory.
    """

    manager: BlockManager
    masters: Masters
    weight: Callable[[torch.Tensor], torch.Tensor]
    picks: list[tuple[torch.Tensor, str, int]]
    block: Block | None = None

    def plain(self) -> BlockSource | None:
        """Returns the masters as tensors of their block, if all of them are in it."""
        found = [self.masters.index_of(param) for param, _, _ in self.picks]
        picks = [
            (index, key, begin)
            for index, (_, key, begin) in zip(found, self.picks, strict=True)
            if index is not None
        ]
        if self.block is None or len(picks) < len(self.picks):
            return None
        return BlockSource(self.manager, self.block, picks)

    def runs(self) -> Iterator[Run]:
        """Yields the masters; one that is only the cast of its weight is computed from that."""
        masters = self.masters
        stored: Sequence[torch.Tensor] = ()
        if self.block is not None and masters.made:
            stored = views_of(self.manager, self.block)
        for param, key, begin in self.picks:
            kept = masters.master_of(param, stored)
            if kept is None:
                kept = self.weight(param).to(masters.dtype)
            yield key, begin, kept


def views_of(manager: BlockManager, block: Block) -> list[torch.Tensor]:
    """Returns a block's tensors in their present state; the lock is held.

    Raises:
        StorageError: If its bytes cannot be read.
    """
    manager.parts.deferred.pay(block.id)
    return manager.block_io.views(block)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Returns the weights of a unit's parameters."""

    manager: BlockManager
    unit: StepUnit

    def __call__(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the weight of a parameter in its present state."""
        for entry in self.unit.entries:
            if entry.param is param:
                return _weight_of(self.manager, self.unit, entry)
        return param.detach()


@dataclass(frozen=True, slots=True, eq=False)
class WeightRun:
    """Returns a run of the weight of a unit that is stepped in parts."""

    manager: BlockManager
    unit: StepUnit
    entry: Entry
    begin: int
    end: int

    def __call__(self, _: torch.Tensor) -> torch.Tensor:
        """Returns the run's elements, 1-D."""
        whole = _weight_of(self.manager, self.unit, self.entry)
        return whole.reshape(-1)[self.begin : self.end]


def _weight_of(manager: BlockManager, unit: StepUnit, entry: Entry) -> torch.Tensor:
    if entry.materialized or unit.group is None:
        return entry.param.detach()
    return views_of(manager, unit.group.block)[entry.index]


Places = dict[tuple[int, str], list[tuple[int, int]]]
"""By a parameter's id and a key of its state: numbers of tensors of a block, and the offset of the
first element of each in the whole."""


def placed_state(unit: StepUnit, manager: BlockManager) -> list[tuple[BlockSource, Places]]:
    """Returns the blocks of a unit's state, and the places of its tensors in them."""
    found = []
    for block, owner, begin in state_blocks(unit):
        places: Places = {}
        for place in owner.plain.places:
            param = unit.members[0][0] if owner is not unit else place.param
            places.setdefault((id(param), place.key), []).append((place.first, begin))
        found.append((BlockSource(manager, block), places))
    return found


def state_blocks(unit: StepUnit) -> Iterator[tuple[Block, StepUnit, int]]:
    """Yields each block of state of a unit, the unit of its part, and where that begins.

    This is the number of its first element in the parameter.
    """
    if not isinstance(unit, PartedUnit):
        if unit.block is not None:
            yield unit.block, unit, 0
        return
    for part in unit.parts:
        if part.unit.block is not None:
            yield part.unit.block, part.unit, part.begin
