"""Whether weights were written by other code than the steps of their optimizer.

A master follows its weight if that was written (``load_state_dict``, a constraint on the
weights, a step of another optimizer). Comparing them costs a pass over both, so it is done only
if something was written.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group


class ForeignWrites:
    """Detects writes of other code to the weights of one unit.

    The writes of a block are counted, and so are the steps of all optimizers among them: a
    step writes the parameters of its unit and no others of the block. So steps are also counted by
    parameter, and those that this unit has not performed are other optimizers'.

    Attributes:
        alone: Whether no other code could write them when the step that holds them began.
    """

    def __init__(self, group: Group | None, entries: Sequence[Entry] = ()) -> None:
        """Starts without a write.

        Args:
            group: None for ordinary parameters, which users may write at any time.
            entries: The parameters of the unit.
        """
        self._group = group
        self._entries = entries
        self._seen = -1
        self._own = 0  # steps of this unit, summed over its parameters
        self._others = 0  # those of other optimizers that were noticed, likewise
        self.alone = False

    def look(self) -> bool:
        """Returns whether there may have been a write since the last call."""
        group = self._group
        if group is None:
            return True
        before = self._seen, self._others
        self._seen = group.record.writes - group.writes.stepped
        self._others = self._steps() - self._own
        changed = before != (self._seen, self._others)
        return changed or group.writes.uncounted or group.may_be_written()

    def forget(self) -> None:
        """Makes the next look report writes, as the last result was not acted upon."""
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
                    slot.was_saved()  # otherwise it could not be moved to make room
                group.hold_locked(again=True)  # in backward it was used just before
            self.alone = not group.may_be_written()

    def let_go(self, *, dirty: bool) -> None:
        """Releases the group; attributes the write to the step if no other code could write."""
        group = self._group
        if group is None:
            return
        before = group.record.writes
        if dirty:
            self.step()  # first: if interrupted after it, the step is counted, which is harmless
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
