"""Leases all blocks of a unit's step during the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiermem.core.block import Block
from tiermem.core.residency import Record
from tiermem.nn.compat.counters import sum_of_versions
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.groups.group import Group
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.optim.units.late import Ahead, LateState
    from tiermem.optim.units.unit import StepUnit


class Held:
    """Leases weights, gradients, state and masters of a unit.

    It returns the slots by block id; pending changes of gradients are made, and the
    masters point at their bytes. Used as a context, it marks everything as written at the end.

    Attributes:
        gradients: The blocks of gradients that are held.
        kept: The blocks of state and masters that are held.
        follows: Whether masters were updated from weights that other code may have written.
    """

    def __init__(
        self,
        unit: StepUnit,
        runtime: ModuleRuntime,
        *,
        kept: bool = True,
        ahead: Ahead | None = None,
        late: LateState | None = None,
    ) -> None:
        """Starts without leases.

        Args:
            unit: The unit of the step.
            runtime: The modules' runtime.
            kept: Whether state and masters are held as well.
            ahead: For a step that can be undone: which gradients are held as well, and whether
                the state that it writes is dropped.
            late: An update that the state has missed, if only that is performed: its gradients and
                the state are held, and nothing else.
        """
        self._alone = late is not None
        self._late = late if ahead is None else ahead.late
        self._leaves = ahead is not None and ahead.leaves
        self._unit = unit
        self._runtime = runtime
        self.kept = unit.kept_blocks() if kept else []
        self._masters = unit.masters if kept and late is None else None
        if late is not None:
            self.kept = [block for block in self.kept if block is unit.block]
        self.gradients: list[GradUnit] = []
        self.follows = False
        self._slots: list[Slot] = []
        self._records: list[Record] = []  # of the same blocks
        self._versions: list[int] = []
        self._group_held = False
        self._opened = False
        self._left: list[int] | None = None
        self._group_left: int | None = None

    def __enter__(self) -> dict[int, Slot]:
        """Fetches everything, or nothing; see :meth:`open`."""
        try:
            return self.open()
        except BaseException:
            self.close(written=self._opened)
            raise

    def __exit__(self, *failure: Any) -> None:
        try:
            self.close(written=self._opened)
        except BaseException:  # Ctrl-C in between
            self.close(written=self._opened)
            raise

    def open(self) -> dict[int, Slot]:
        """Fetches everything; :meth:`close` has to follow, whatever is raised.

        Raises:
            CapacityError: If HBM cannot hold it.
            StorageError: If its bytes cannot be read.
        """
        unit, runtime = self._unit, self._runtime
        if not self._alone:
            here = [u for u in unit.grad_units() if not u.runs]  # those come with their parts
            self.gradients = [u for u in here if any(e.has_grad for e in u.entries)]
        found = [u.block for u in self.gradients]
        if self._late is not None and self._late.block not in found:
            found.append(self._late.block)  # otherwise they are still there, and were not added to
        self._lease([*found, *self.kept])
        for u, slot in zip(self.gradients, self._slots, strict=False):
            if u.pending:
                runtime.grads.settle(u, slot)
        self._versions = [
            sum_of_versions(slot.views) for slot in self._slots[: len(self.gradients)]
        ]
        unit.handed.scaled = False
        self._opened = True
        slots = {id(slot.block): slot for slot in self._slots}
        if self._masters is not None:
            self.follows = unit.foreign.look()
            self._masters.open(slots.get(id(self._masters.block)), follows=self.follows)
        return slots

    def close(self, *, written: bool) -> None:
        """Releases everything; a second call does nothing, or continues an interrupted one.

        Args:
            written: Whether weights, state and masters were written.
        """
        if self._masters is not None:
            self._masters.close()
        with self._runtime.manager.lock:  # so that no other thread leases a block meanwhile
            try:
                self._release(written)
            except BaseException:
                self._release(written)
                raise

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns the group of weights that is held, and the other leased blocks."""
        return self._unit.group if self._group_held else None, [s.block for s in self._slots]

    def _lease(self, blocks: list[Any]) -> None:
        """Leases all, or nothing, even if a Ctrl-C occurs in between."""
        manager = self._runtime.manager
        with manager.lock:
            if not self._alone:
                self._hold_group()
            table = manager.parts.table
            self._records = [table.of(block.id) for block in blocks]
            leases = [record.leases for record in self._records]
            try:
                self._slots = manager.acquire_all(blocks)
            except BaseException:
                self._slots = []
                for record, before in zip(self._records, leases, strict=True):
                    while record.leases > before:
                        table.release(record.block.id)
                raise

    def _hold_group(self) -> None:
        """Holds the group of weights."""
        group = self._unit.group
        holds = 0 if group is None else group.holds
        try:
            self._unit.foreign.hold()
            self._group_held = True
        except BaseException:
            if group is not None and group.holds > holds:
                self._group_held = True
            raise

    def _release(self, written: bool) -> None:
        """Returns each lease that it still has."""
        table, unit, group = self._runtime.manager.parts.table, self._unit, self._unit.group
        if self._left is None:
            self._left = [record.leases - 1 for record in self._records[: len(self._slots)]]
        for index, slot in enumerate(self._slots):
            record = self._records[index]
            if record.leases <= self._left[index]:
                continue
            if self._is_dirty(index, slot, written=written):
                table.release(slot.block.id, dirty=True)
            else:
                record.leases -= 1  # the same in line
        self._slots, self._left = [], None
        if not self._group_held:
            return
        if self._group_left is None:
            self._group_left = 0 if group is None else group.holds - 1
        if group is not None and group.holds > self._group_left:
            unit.foreign.let_go(dirty=written)
        self._group_held, self._group_left = False, None

    def _is_dirty(self, index: int, slot: Slot, *, written: bool) -> bool:
        """Whether a block was written; writes through ``param.data`` are not counted by torch."""
        if self._late is not None and slot.block is self._late.block:
            return False  # gradients of a late update that is performed with it
        if self._leaves and slot.block is self._unit.block:
            return False
        if not written or index >= len(self.gradients):
            return written
        unit, handed = self._unit, self._unit.handed
        may_be = (
            handed.spoils or handed.scaled or self._versions[index] != sum_of_versions(slot.views)
        )
        return may_be and unit.sees(self.gradients[index])
