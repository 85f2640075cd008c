"""State that a step ahead leaves unchanged, to be updated with the next step.

The next forward needs the weights of a step, but nothing needs its state before the unit's next
step, which fetches the state anyway. So of two steps of a unit one writes only its weights:
its gradient is kept instead, and the missed update of the state is performed with it when
the next step begins. That gives the same bits, as the class computes its state from the former
state and the gradient (a trial shows that it does not depend on weights), and the gradient and the
weights are copied home, not the state.

Until then the state is *late*: an access to it performs the update first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.residency import State as Residency
from tiermem.errors import CapacityError
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.quiet import uncompiled
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.groups.group import Group
from tiermem.optim.rules.plainstep import run
from tiermem.optim.rules.separable import settings_of
from tiermem.optim.units.direct import rooms_for
from tiermem.optim.units.held import Held
from tiermem.optim.units.undo import Undo
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.transfers.deferred import Deferred

_AT_HOME = Residency.VALID

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.optim.units.unit import StepUnit


class SpareGradients:
    """Blocks of DRAM to which gradients are moved that are cleared before they are used again.

    There is one for each block of gradients, in DRAM that no home needs.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Starts without blocks.

        Args:
            runtime: The modules' runtime.
        """
        self._manager, self._shape = runtime.manager, runtime.grads.homes.shape
        self._blocks: dict[int, Block] = {}  # by the id of the block of gradients
        self._began: dict[int, Extent | None] = {}  # the extent of each at first

    def of(self, gradients: GradUnit, *, new: bool) -> Block | None:
        """Returns the block for some gradients; None if DRAM has no room to spare for it.

        Args:
            gradients: The gradients, in one block.
            new: Whether it may be created.
        """
        block = self._blocks.get(gradients.block.id)
        if block is not None or gradients.runs or not new:
            return block
        homes, like = self._manager.parts.homes, gradients.block
        extent = homes.lend(like.nbytes, spare=True)
        if extent is None:
            return None
        homes.release(Tier.DRAM, extent)
        shapes = [self._shape(entry) for entry in gradients.entries]
        try:
            (block,) = self._manager.add_blocks(
                [(f"{like.name} before", like.role, shapes)], home="dram"
            )
        except CapacityError:
            return None
        self._began[block.id] = self._manager.record(block).home_extent
        self._blocks[like.id] = block
        return block

    def blocks(self) -> list[Block]:
        """Returns all of them."""
        return list(self._blocks.values())

    def close(self) -> bool:
        """Frees all of them; returns whether there were any. None is needed any more."""
        if not self._blocks:
            return False
        self._take_home()
        blocks, self._blocks = list(self._blocks.values()), {}
        self._began.clear()
        self._manager.remove_blocks(blocks)
        return True

    def _take_home(self) -> None:
        """Moves each to its first extent, so that the free room is contiguous."""
        table, evictor = self._manager.parts.table, self._manager.parts.evictor
        self._manager.parts.copy.synchronize()
        for number, block in self._blocks.items():
            gradients, spare = table.get(number), table.get(block.id)
            if gradients is None or spare is None or gradients.defined or spare.defined:
                continue
            if gradients.home_extent == self._began.get(block.id):
                for record in (gradients, spare):  # these may have places ahead of their use
                    evictor.forget(record, gone=False)
                table.exchange_empty(number, block.id)


class LateState:
    """The update that the state of one unit has missed.

    Attributes:
        runtime: The modules' runtime.
        settings: Settings of the step, by parameter group.
    """

    def __init__(
        self,
        unit: StepUnit,
        runtime: ModuleRuntime,
        settings: Sequence[dict[str, Any]],
        numbers: Undo,
        spare: Block,
    ) -> None:
        """Notes what the update needs; the gradients still exist.

        Args:
            unit: Its weights are stepped, its state is not.
            runtime: The modules' runtime.
            settings: The settings that the step used.
            numbers: The values of the state outside the tiers before the step.
            spare: The blocks to which the gradients can be moved.
        """
        (self._gradients,) = unit.grad_units()
        self.runtime, self.settings = runtime, settings
        self._taken: dict[int, None] = {}  # contains the spare block once the gradients are there
        self._unit = unit
        self._numbers = numbers
        self._spare = spare
        self._entries: list[Entry] = [entry for entry in unit.entries if entry.has_grad]
        self._debt: Deferred | None = None

    @property
    def block(self) -> Block:
        """The block that has the gradients of the step."""
        return self._spare if self._taken else self._gradients.block

    def stand(self) -> None:
        """Makes an access to the state, or a change of the gradients, update the state first."""
        self.strike()
        unit, found = self._unit, [self.block]
        if unit.block is not None:
            found.append(unit.block)
        self._debt = Deferred(unit.name, [block.id for block in found], self._pay)
        self.runtime.manager.parts.deferred.stand(self._debt)
        if not self._taken:
            self.runtime.grads.kept_for[self._gradients.block.id] = self._take_over

    def strike(self) -> None:
        """Permits use of the blocks as they are; it may be called again."""
        debt = self._debt
        if debt is not None:
            self.runtime.manager.parts.deferred.cancel(debt)
        self._debt = None
        kept_for, block_id = self.runtime.grads.kept_for, self._gradients.block.id
        if kept_for.get(block_id) == self._take_over:  # not another optimizer's
            del kept_for[block_id]

    def free(self) -> None:
        """Gives up the gradients, once the state is up to date; it may be called again."""
        self.strike()
        if self._taken:
            self.runtime.manager.discard(self._spare)

    def make(self, slots: dict[int, Slot]) -> None:
        """Updates the state in the held blocks, and nothing else.

        A separate optimizer steps stand-ins for the weights, which do not affect the state.

        Args:
            slots: Slots of the blocks, by block id.
        """
        unit, plain = self._unit, self._unit.plain
        if unit.block is None:
            return
        kept, views = slots[id(unit.block)].views, slots[id(self.block)].views
        whole = len(self._entries) == len(unit.members)
        given = self._gradients, self.settings, views, kept
        if whole and outside(unit.direct.update_state, *given):
            return
        there = {id(entry): views[entry.unit_index] for entry in self._entries}
        groups = [{**settings_of(self.settings[n]), "params": []} for n in plain.numbers]
        updated = [
            (param, number, there[id(entry)].to(unit.own(param).dtype))
            for (param, number), entry in zip(unit.members, unit.entry_of, strict=True)
            if id(entry) in there
        ]
        weights = _stand_ins([gradient for _, _, gradient in updated])
        stand_ins: dict[int, nn.Parameter] = {}  # by the id of their parameter
        for (param, number, gradient), stand_in in zip(updated, weights, strict=True):
            stand_ins[id(param)], stand_in.grad = stand_in, gradient
            groups[plain.numbers.index(number)]["params"].append(stand_in)
        with torch.enable_grad():
            optimizer = plain.make(groups)
        for (param, _), was in zip(unit.members, self._numbers.entries(), strict=True):
            if id(param) in stand_ins and was is not None:
                optimizer.state[stand_ins[id(param)]] = was
        placed = [place for place in plain.places if id(place.param) in stand_ins]
        for place in placed:
            optimizer.state[stand_ins[id(place.param)]][place.key] = kept[place.first]
        outside(run, optimizer)
        for place in placed:
            value = optimizer.state[stand_ins[id(place.param)]][place.key]
            if value is not kept[place.first]:
                kept[place.first].copy_(value)

    def forget_copy(self) -> None:
        """Drops the copy of the state in HBM, which may be partly updated."""
        parts, block = self.runtime.manager.parts, self._unit.block
        record = None if block is None else parts.table.get(block.id)
        if record is not None and record.in_hbm is _AT_HOME and not record.leases:
            parts.evictor.evict(record)

    # -- inside ----------------------------------------------------------

    def _pay(self) -> None:
        """Updates the state."""
        if self._unit.late is self:
            self._unit.catch_up()
        else:
            self.strike()

    def _take_over(self) -> None:
        """Moves the gradients, which will be cleared, to the spare block."""
        manager = self.runtime.manager
        with manager.lock:
            if self._taken or self._debt is None:
                return
            parts, former = manager.parts, self._gradients.block
            self.strike()
            record, transfers = parts.table[former.id], parts.transfers
            manager.discard(self._spare)
            transfers.settle(former.id)
            if record.at_home is not _AT_HOME:
                transfers.copy_home(record)
            written = transfers.home_ready.get(former.id)
            if written is not None:
                transfers.home_ready[self._spare.id] = written
            if parts.homes.keeper is not None:
                parts.homes.keeper.before_write(record)
            parts.table.hand_home_over(former.id, self._spare.id, self._taken)
            transfers.departures.add_home(self._spare.id)
            self.stand()


def _stand_ins(gradients: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """Returns a zero parameter for each gradient; those of one kind are created at once."""
    kinds = {(gradient.dtype, gradient.device) for gradient in gradients}
    if len(kinds) != 1 or not all(gradient.is_contiguous() for gradient in gradients):
        return [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    [(dtype, device)] = kinds
    counts = [gradient.numel() for gradient in gradients]
    rooms = rooms_for(counts)
    runs = torch.zeros(sum(rooms), dtype=dtype, device=device).split(rooms)
    return [
        nn.Parameter(run[:count].view(like.shape))
        for run, count, like in zip(runs, counts, gradients, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Ahead:
    """How a step is performed that the caller can undo, and what it does with the state.

    Attributes:
        keep: Called once blocks of state and masters, and the weights, are in HBM, before any of
            these is written: keeps their bytes.
        late: The update that the state has missed, to be performed first in the same try; the
            caller has taken it from the unit, and can put it back.
        leaves: Whether the state is left unchanged at home; the caller drops the copy in HBM.
    """

    keep: Callable[[Sequence[Block]], None]
    late: LateState | None = None
    leaves: bool = False


class LateUpdate:
    """Performs the missed update of a unit's state, completely or not at all.

    Attributes:
        made: Whether it has been performed.
    """

    def __init__(self, unit: StepUnit, late: LateState) -> None:
        """Starts without leases.

        Args:
            unit: The unit of the state.
            late: The update.
        """
        self.made = False
        self._unit = unit
        self._late = late
        self._holding = Held(unit, late.runtime, late=late)
        self._over = False
        late.runtime.keepers.attempts.append(self)

    def make(self) -> None:
        """Performs it."""
        self._late.make(self._holding.open())
        self.made = True

    def end(self) -> None:
        """Ends it, performed or not, and releases everything; it may be called again."""
        if self._over:
            return
        if self.made:
            self._unit.late = None
        self._holding.close(written=self.made)
        if not self.made:
            self._late.forget_copy()
        self._over = True
        attempts = self._late.runtime.keepers.attempts
        if self in attempts:
            attempts.remove(self)

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns no group of weights, and the blocks that are leased."""
        return self._holding.leased()


def update_now(unit: StepUnit) -> None:
    """Performs the update that the state of a unit has missed, if any.

    Raises:
        CapacityError: If HBM cannot hold the state and the gradients.
        StorageError: If its bytes cannot be read.
    """
    late = unit.late
    if late is None:
        return
    late.strike()
    update = LateUpdate(unit, late)
    try:
        try:
            uncompiled(LateUpdate.make)(update)
        finally:
            update.end()
    except BaseException:
        if unit.late is late:
            late.stand()
        raise
    late.free()
