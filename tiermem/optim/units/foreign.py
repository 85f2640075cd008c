"""Whether weights were written by other code than an optimizer's steps.

A master follows its weight where that was written (``load_state_dict``, a constraint on the
weights). To look for it costs a pass over both, so one looks only where something was written.
"""

from __future__ import annotations

from tiermem.nn.groups.group import Group


class ForeignWrites:
    """Detects writes of other code to the group of weights of one unit.

    Attributes:
        alone: Whether no other code could write them as the step that holds them began.
    """

    def __init__(self, group: Group | None) -> None:
        """Starts with no write seen.

        Args:
            group: None for ordinary parameters, which users may write at any time.
        """
        self._group = group
        self._seen = -1
        self.alone = False

    def look(self) -> bool:
        """Returns whether there may have been any since the last look."""
        group = self._group
        if group is None:
            return True
        record = group.record
        before, self._seen = self._seen, record.writes - group.writes.stepped
        return before != self._seen or group.writes.uncounted or group.may_be_written()

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
                group.hold_locked(again=True)  # in backward it was used just before
            self.alone = not group.may_be_written()

    def let_go(self, *, dirty: bool) -> None:
        """Releases the group; counts the write as the step's where no other code could write."""
        group = self._group
        if group is None:
            return
        before = group.record.writes
        group.let_go(dirty=dirty)
        if self.alone:
            group.writes.stepped += group.record.writes - before
