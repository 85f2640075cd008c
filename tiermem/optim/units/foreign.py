"""Whether weights were written by other code than the steps of their optimizer.

A master follows its weight where that was written (``load_state_dict``, a constraint on the
weights, a step of another optimizer). To look for it costs a pass over both, so one looks only
where something was written.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group


class ForeignWrites:
    """Detects writes of other code to the weights of one unit.

    The writes of a block are counted, and so are those that were steps, of whichever optimizer: a
    step writes the parameters of its unit and no others of the block. So the steps are counted by
    parameter as well, and those that this unit has not made were another optimizer's.

    Attributes:
        alone: Whether no other code could write them as the step that holds them began.
    """

    def __init__(self, group: Group | None, entries: Sequence[Entry] = ()) -> None:
        """Starts with no write seen.

        Args:
            group: None for ordinary parameters, which users may write at any time.
            entries: The parameters of the unit.
        """
        self._group = group
        self._entries = entries
        self._seen = -1
        self._own = 0  # steps that this unit has made, once for each parameter
        self._others = 0  # those of other optimizers that were seen, likewise
        self.alone = False

    def look(self) -> bool:
        """Returns whether there may have been any since the last look."""
        group = self._group
        if group is None:
            return True
        before = self._seen, self._others
        self._seen = group.record.writes - group.writes.stepped
        self._others = self._steps() - self._own
        changed = before != (self._seen, self._others)
        return changed or group.writes.uncounted or group.may_be_written()

    def forget(self) -> None:
        """Makes the next look find writes: what the last one found was not acted upon."""
        self._seen = -1

    def hold(self) -> None:
        """Holds the group for a step."""
        group = self._group
        if group is not None:
            gate = group.manager.gate
            if gate.closed or gate.torn:
                gate.guard()
            with group.manager.lock:
                slot = group.pointing.slot
                free = slot is not None and slot.saved and not group.holds
                if slot is not None and free and not group.manager.parts.table.all_fit:
                    slot.was_saved()  # else it could not be moved for what comes beside
                group.hold_locked(again=True)  # in backward it was used just before
            self.alone = not group.may_be_written()

    def let_go(self, *, dirty: bool) -> None:
        """Releases the group; counts the write as the step's where no other code could write."""
        group = self._group
        if group is None:
            return
        before = group.record.writes
        if dirty:
            self.step()  # first: cut short here, it is counted and nobody misses it
        group.let_go(dirty=dirty)
        if self.alone:
            group.writes.stepped += group.record.writes - before

    def step(self) -> None:
        """Counts a step of the unit, so that other optimizers' masters follow what it writes."""
        for entry in self._entries:
            entry.steps += 1
        self._own += len(self._entries)

    def _steps(self) -> int:
        """Returns how often all optimizers have stepped the parameters."""
        total = 0
        for entry in self._entries:
            total += entry.steps
        return total
