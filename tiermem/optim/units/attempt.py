"""One try at the step of a unit on the device: it is completed, or undone completely.

Anything may interrupt it: an error of the optimizer's class or of a hook, a disk, lack of memory,
Ctrl-C before any line. So no line relies on a later one being reached: the state of the unit is
noted before it is changed, one assignment marks the step as made, and :meth:`Attempt.end` does the
rest, and can be repeated if it was itself interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import torch

from tiermem.core.alike import set_each
from tiermem.core.block import Block, Tier
from tiermem.core.residency import State as Residency
from tiermem.errors import REFUSALS, StepError
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.tensors.lazy import LazyTensor, refresh
from tiermem.nn.tensors.placeholder import is_placeholder
from tiermem.optim.units.held import Held
from tiermem.optim.units.onecall import OneCall
from tiermem.optim.units.undo import Undo
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.transfers.deferred import Deferred

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.optim.units.unit import State, StepUnit

_first, _second, _grad = itemgetter(0), itemgetter(1), attrgetter("grad")
_has_grad = attrgetter("has_grad")


class Waiting:
    """A step neither completed nor undone: an access to its blocks undoes it first."""

    def __init__(self, runtime: ModuleRuntime, unit: StepUnit) -> None:
        """Starts without a step.

        Args:
            runtime: The modules' runtime.
            unit: The unit of the step.
        """
        self._manager = runtime.manager
        self._unit = unit
        self._debt: Deferred | None = None

    def begin(self, take_back: Callable[[], None]) -> None:
        """Registers a step that could not be undone; the unit's blocks stay leased.

        Args:
            take_back: Tries again to undo it; raises if it cannot.
        """
        with self._manager.lock:
            if self._debt is None:
                blocks = [block.id for block in self._unit.blocks()]
                self._debt = Deferred(self._unit.name, blocks, take_back)
                self._manager.parts.deferred.add(self._debt)
            if self._unit.group is not None:
                self._unit.group.pointing.hide()

    def pause(self) -> None:
        """Permits access to the unit's own tensors while undoing is tried again."""
        if self._debt is not None and self._unit.group is not None:
            self._unit.group.pointing.show()

    def end(self) -> None:
        """Ends the wait: the step is undone."""
        if self._debt is not None:
            self._manager.parts.deferred.cancel(self._debt)
            self._debt = None


class Attempt:
    """Keeps the state of a unit before its step, until that is completed or undone.

    Attributes:
        holding: The blocks of the step.
        made: Whether the step is complete; from then on nothing is undone.
        one_call: Detects whether everything is written, if one torch call does that.
        shown: Stand-ins of tensors that were written, and their values, once it is complete.
    """

    def __init__(
        self, unit: StepUnit, runtime: ModuleRuntime, holding: Held, *, owed: bool = False
    ) -> None:
        """Notes what can be noted before the unit's blocks are in HBM.

        Args:
            unit: The unit of the step.
            runtime: The modules' runtime.
            holding: The blocks to be held for it.
            owed: Whether the step was deferred: then no present gradient belongs to it.
        """
        self._unit = unit
        self._owed = owed
        self._runtime = runtime
        self._manager = runtime.manager
        self._masters_made = unit.masters is not None and unit.masters.made
        with torch._C.DisableTorchFunctionSubclass():
            params = [*map(_first, unit.members)]
            self._gradients = [*zip(params, map(_grad, params), strict=True)]
        self._undo: Undo | None = None
        self.one_call: OneCall | None = None
        self._complete: Callable[[], None] | None = None
        self._cannot = ""
        self.holding = holding
        self.made = False
        self.shown: Sequence[tuple[torch.Tensor | None, torch.Tensor]] = ()
        self._waiting = Waiting(runtime, unit)
        self._over = False
        runtime.keepers.attempts.append(self)

    def keep(
        self,
        optimizer: torch.optim.Optimizer,
        slots: dict[int, Slot],
        state: State,
        *,
        spoils: bool,
        complete: Callable[[], None] | None = None,
    ) -> None:
        """Keeps what the step may change; its blocks are held.

        Args:
            optimizer: The plain one of the unit.
            slots: Slots of the blocks, by block id.
            state: The tiered optimizer's.
            spoils: Whether the step may write gradients.
            complete: For a step that writes all bytes by one torch call: does the rest
                after that call, sets ``made``, and may be called again. No bytes are kept then.
        """
        if complete is not None:
            self._complete, self.one_call = complete, OneCall(optimizer)
        undo, unit = Undo(), self._unit
        params = [param for param, _ in unit.members]
        undo.keep_optimizer(optimizer, unit.plain.owns(), state, params)
        try:
            # while a graph is captured, nothing is written
            if not self._manager.parts.copy.capturing():
                if complete is None:
                    self._keep_bytes(undo, slots, spoils=spoils)
                undo.steps.append(partial(self._repoint, slots))
        except (torch.OutOfMemoryError, MemoryError) as error:
            # better a step that cannot be undone than none if there was room for one
            self._cannot = f"{type(error).__name__} when its bytes were to be kept"
        self._undo = undo

    def end(self) -> None:
        """Undoes the step unless it is complete, and releases everything.

        Raises:
            StorageError: If it is to be undone, and the disk with its bytes fails. It can
                be called again; until then everything stays leased, and an access to the blocks
                calls it again.
            StepError: If there was no memory to keep the former bytes. Likewise.
        """
        if self._over:
            return
        try:
            self._end()
        except REFUSALS:
            self._waiting.begin(self.end)
            raise
        if self in self._runtime.keepers.attempts:
            self._runtime.keepers.attempts.remove(self)

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns the group of weights that is held, and the blocks that are leased beside it."""
        return self.holding.leased()

    def _end(self) -> None:
        unit = self._unit
        self._waiting.pause()
        written = self.one_call is not None and self.one_call.made
        if written and not self.made and self._complete is not None:
            self._complete()
        if not self.made:
            if self._undo is not None:
                self._take_back(self._undo)
            unit.foreign.forget()
            if unit.masters is not None:
                unit.masters.made = self._masters_made
        for stand_in, value in self.shown:
            if isinstance(stand_in, LazyTensor) and stand_in._kept is not None:
                refresh(stand_in, value)
        self.shown = ()
        self._undo = None  # it has views of the slots
        with torch._C.DisableTorchFunctionSubclass():
            alone = len(unit.entries) == len(self._gradients) and all(map(_has_grad, unit.entries))
            kept = self._owed or alone  # those that existed before the step
            if kept:
                set_each(map(_first, self._gradients), "grad", map(_second, self._gradients))
            rest = () if kept else zip(self._gradients, unit.entry_of, strict=False)
            for (param, gradient), entry in rest:
                stays = (entry is not None and entry.has_grad) or not self.made
                if stays and param.grad is not gradient:
                    param.grad = gradient
        self.holding.close(written=self.made)
        self._waiting.end()
        unit.attempt = None
        self._over = True
        # these are reference cycles: they would keep stand-ins and the state alive, whose
        # references are counted to find out whether a program has kept them
        self._gradients, self._complete, self.one_call = [], None, None

    def leave_as_is(self) -> None:
        """Leaves everything as after the failure; the caller undoes it."""
        self._undo, self._cannot = None, ""
        self.made = True
        self.end()

    # -- inside ----------------------------------------------------------

    def _take_back(self, undo: Undo) -> None:
        if self._cannot:
            raise StepError(
                f"the step of {self._unit.name!r} was cut short in the middle and cannot be taken "
                f"back, as there was {self._cannot}: its weights and state are neither old nor "
                "new. Call optimizer.abandon_step(), and then load a checkpoint into the model and "
                "the optimizer, or go on as it is"
            )
        if self._manager.parts.device.type == "cuda":
            self._manager.parts.copy.synchronize()
        undo.take_back()

    def _keep_bytes(self, undo: Undo, slots: dict[int, Slot], *, spoils: bool) -> None:
        unit = self._unit
        fresh = not self._masters_made  # no weights could be cast from them
        is_cast = (lambda _: False) if fresh else unit.has_master
        for block in self.holding.kept:
            # masters that have just followed their weights differ from their home
            self._keep_block(undo, block, slots[id(block)].views, clean=not self.holding.follows)
        pointed: list[Entry] = []
        for entry in unit.entries:
            if entry.materialized:
                undo.keep_values([entry.param.data])
            elif not is_cast(entry.param):
                pointed.append(entry)
        if pointed and unit.group is not None:
            group = unit.group
            clean = unit.foreign.alone and not group.writes.uncounted
            views = self._manager.parts.slots.current[group.block.id].views
            mine = [views[entry.index] for entry in pointed]
            self._keep_block(undo, group.block, mine, clean=clean)
        managed = {id(entry.param) for entry in unit.entries}
        for param, _ in unit.members:
            if id(param) not in managed and not is_cast(param):
                undo.keep_values([param.data])
        if spoils:
            self._keep_gradients(undo, slots)
        if unit.masters is not None:
            undo.keep_values(unit.masters.loose())

    def _keep_block(
        self, undo: Undo, block: Block, tensors: Sequence[torch.Tensor], *, clean: bool
    ) -> None:
        """Keeps tensors of a block: by a copy, unless its home has them or it holds no data."""
        record = self._manager.parts.table.of(block.id)
        if not record.defined or not tensors:
            return
        at_home = record.at_home is Residency.VALID and record.in_hbm is Residency.VALID
        if not (clean and at_home) or record.home is Tier.HBM:
            undo.keep(tensors)
            return
        transfers = self._manager.parts.transfers
        transfers.copy.use(transfers.home_ready.get(block.id))  # else it copies later bytes
        restore = partial(self._manager.restore, block)
        if len(tensors) == len(block.tensors):
            undo.steps.append(partial(restore, 0, block.nbytes))
        else:
            undo.keep_at_home(tensors, restore)

    def _keep_gradients(self, undo: Undo, slots: dict[int, Slot]) -> None:
        unit = self._unit
        for grads in self.holding.gradients:
            if unit.sees(grads):
                undo.keep(slots[id(grads.block)].views)
        undo.keep_values(list(unit.handed.given.values()))
        with torch._C.DisableTorchFunctionSubclass():
            for _, gradient in self._gradients:
                if gradient is None or isinstance(gradient, LazyTensor):
                    continue
                if gradient.layout is torch.strided:
                    undo.keep_values([gradient])

    def _repoint(self, slots: dict[int, Slot]) -> None:
        """Points parameters and masters at their bytes again, and casts weights from masters."""
        unit = self._unit
        if unit.group is not None:
            views = self._manager.parts.slots.current[unit.group.block.id].views
            with torch._C.DisableTorchFunctionSubclass():  # several threads may use the weights
                for entry in unit.entries:
                    view = views[entry.index]
                    if entry.materialized:
                        continue
                    if is_placeholder(entry.param) or entry.param.data_ptr() != view.data_ptr():
                        entry.param.data = view
        if unit.masters is not None and self._masters_made:
            slot = None if unit.masters.block is None else slots[id(unit.masters.block)]
            unit.masters.rederive(slot)
