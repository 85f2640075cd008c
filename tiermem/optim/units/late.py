"""State that a step made ahead leaves as it was, to be brought up to date with the next one.

The next forward needs the weights of a step, but nothing needs its state before the unit's next
step, which brings that up again anyway. So of two steps of a unit one writes its weights alone:
its gradient is kept instead, and with it the state is updated again, from where it was left, as
the next step begins. That gives the same bits, as the class computes its state from the state
before and the gradient (a try shows that weights do not come in), and over the link down pass the
gradient and the weights, not the state.

Until then the state is *late*: whoever looks at it brings it up to date first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiermem.core.block import Block, TensorSpec, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.residency import State as Residency
from tiermem.errors import CapacityError
from tiermem.nn.compat.counters import keep_versions
from tiermem.nn.compat.quiet import uncompiled
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.optim.rules.separable import settings_of
from tiermem.optim.units.attempt import Attempt
from tiermem.optim.units.held import Held
from tiermem.optim.units.undo import Undo
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.transfers.deferred import Deferred

_AT_HOME = Residency.VALID

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.optim.units.unit import State, StepUnit


class SpareGradients:
    """Blocks of DRAM that take gradients over which are cleared before they are used again.

    There is one for each block of gradients, out of DRAM that no home needs.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Starts with none.

        Args:
            runtime: The modules' runtime.
        """
        self._manager = runtime.manager
        self._blocks: dict[int, Block] = {}

    def of(self, gradients: GradUnit) -> Block | None:
        """Returns the block for some gradients; None where DRAM has no room to spare for it."""
        block = self._blocks.get(gradients.block.id)
        if block is not None or gradients.runs:
            return block
        homes, like = self._manager.parts.homes, gradients.block
        extent = homes.lend(like.nbytes, spare=True)
        if extent is None:
            return None
        homes.release(Tier.DRAM, extent)
        shapes = [
            TensorShape(spec.name, spec.shape, spec.stride, spec.dtype, _itemsize(spec))
            for spec in like.tensors
        ]
        try:
            (block,) = self._manager.add_blocks(
                [(f"{like.name} before", like.role, shapes)], home="dram"
            )
        except CapacityError:
            return None
        self._blocks[like.id] = block
        return block

    def blocks(self) -> list[Block]:
        """Returns all of them."""
        return list(self._blocks.values())

    def close(self) -> bool:
        """Frees all of them; returns whether there were any. None holds anything of use."""
        blocks, self._blocks = list(self._blocks.values()), {}
        self._manager.remove_blocks(blocks)
        return bool(blocks)


class LateState:
    """The update that the state of one unit has missed.

    Attributes:
        runtime: The modules' runtime.
        settings: Of the step, by parameter group.
        state: The tiered optimizer's, to be kept up to date.
    """

    def __init__(
        self,
        unit: StepUnit,
        runtime: ModuleRuntime,
        settings: Sequence[dict[str, Any]],
        state: State,
        numbers: Undo,
        spare: Block,
    ) -> None:
        """Notes what the update needs; the gradients are still there.

        Args:
            unit: Its weights are stepped, its state is not.
            runtime: The modules' runtime.
            settings: As the step used them.
            state: The tiered optimizer's.
            numbers: What the state had outside the tiers before the step.
            spare: Takes the gradients over.
        """
        (self._gradients,) = unit.grad_units()
        self.runtime, self.settings, self.state = runtime, settings, state
        self._taken: dict[int, None] = {}  # has the spare block once the gradients lie there
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
        """Has whoever looks at the state, or changes the gradients, bring the state up to date."""
        self.strike()
        unit, found = self._unit, [self.block]
        if unit.block is not None:
            found.append(unit.block)
        self._debt = Deferred(unit.name, [block.id for block in found], self._pay)
        self.runtime.manager.parts.deferred.stand(self._debt)
        if not self._taken:
            self.runtime.grads.kept_for[self._gradients.block.id] = self._take_over

    def strike(self) -> None:
        """Lets the blocks be used as they are; it may be called again."""
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
        """Updates the state over what is held; weights, masters and settings stay as they are.

        Args:
            slots: Of the blocks, by the id of the block.
        """
        unit, plain = self._unit, self._unit.plain
        slot = None if unit.block is None else slots.get(id(unit.block))
        views = slots[id(self.block)].views
        there = {id(entry): views[entry.unit_index] for entry in self._entries}
        gradients = [there.get(id(entry)) for entry in unit.entry_of]
        groups = plain.optimizer_for(None).param_groups
        settings = [settings_of(group) for group in groups]
        counters, owns = keep_versions([param for param, _ in unit.members]), plain.owns()
        with torch._C.DisableTorchFunctionSubclass():
            present = [own.grad for own in owns]
        try:
            optimizer = plain.optimizer_for(self.settings)
            self._numbers.take_back()
            unit.handed.hand_over(unit.members, owns, gradients)
            plain.attach(slot)
            stepped = [own.detach() for own in owns if own.grad is not None]
            kept = [own.clone() for own in stepped]
            unit.run_plain(optimizer)
            torch._foreach_copy_(stepped, kept)
            plain.take_in(self.runtime, slot, self.state)
        finally:
            for counter in counters:
                counter.__exit__(None, None, None)
            for group, before in zip(groups, settings, strict=True):
                group.update(before)
            with torch._C.DisableTorchFunctionSubclass():
                for own, gradient in zip(owns, present, strict=True):
                    own.grad = gradient

    # -- inside ----------------------------------------------------------

    def _pay(self) -> None:
        """Brings the state up to date."""
        if self._unit.late is self:
            self._unit.catch_up()
        else:
            self.strike()

    def _take_over(self) -> None:
        """Moves the gradients, which are about to be cleared, to the spare block."""
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


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a step that can be taken back is to do with the state.

    Attributes:
        late: The update that it has missed, to be made first in the same try; the caller has taken
            it from the unit, and can put it back.
        leaves: Whether it stays as it is at home; the caller gives up the copy in HBM.
    """

    late: LateState | None = None
    leaves: bool = False


def update_now(unit: StepUnit) -> None:
    """Makes the update that the state of a unit has missed, if any; whole, or not at all.

    Raises:
        CapacityError: If HBM cannot hold what that takes.
        StorageError: If its bytes cannot be read.
    """
    late = unit.late
    if late is None:
        return
    late.strike()
    try:
        uncompiled(_update)(unit, late)
    except BaseException:
        if unit.late is late:
            late.stand()
        raise
    late.free()


def _update(unit: StepUnit, late: LateState) -> None:
    runtime, slots = late.runtime, dict[int, Slot]()
    attempt = unit.attempt = Attempt(unit, runtime, Held(unit, runtime, late=late))
    try:
        slots = attempt.holding.open()
        attempt.keep(unit.plain.optimizer_for(None), slots, late.state, spoils=False)
        late.make(slots)
        attempt.made, unit.late = True, None
        attempt.end()
    except BaseException:
        attempt.end()
        raise


def _itemsize(spec: TensorSpec) -> int:
    return spec.nbytes // max(1, math.prod(spec.shape))
