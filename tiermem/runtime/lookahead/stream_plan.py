"""What is planned for one schedule: what stays, and when fetches are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiermem.core.cost import Timetable
from tiermem.core.loops import Plan

_BINDS = 1.15
"""Of the compute: what copies take at least where they are what passes wait for."""
_AS_LONG = 1.1
"""Of the copies: what passes take that are as good as nothing else."""


@dataclass(slots=True, eq=False)
class StreamPlan:
    """The plan for one schedule.

    Attributes:
        made_of: What it depends on, besides the schedule.
        plan: What stays in HBM and in DRAM, and what is left to stream through.
        ahead: Bytes of HBM that may be fetched ahead, the last block of them not counted.
        due: Makes the timetable, which only passes that are decided go by.
        compute: Seconds of each use; None where nothing is known of it.
        through_dram: Whether blocks come from files by way of DRAM, where the plan does not say.
        turn: Uses within which what comes again stays, where HBM is handed out in circles; else 0.
        foreseen: Whether it was made with something known of such passes, so that it does for one
            more where that has changed.
        copies: Seconds of a pass's copies up from DRAM, of what HBM has no room for; 0 where it
            writes blocks.
        computes: Seconds of its compute; None where that is not known.
    """

    made_of: tuple[int, ...]
    plan: Plan
    ahead: int
    due: Callable[[], Timetable]
    compute: Sequence[float | None]
    through_dram: bool
    turn: int = 0
    foreseen: bool = False
    copies: float = 0.0
    computes: float | None = None
    _timetable: Timetable | None = None

    @property
    def timetable(self) -> Timetable:
        """When fetches are due."""
        if self._timetable is None:
            self._timetable = self.due()
        return self._timetable

    def link_binds(self, longest: float | None) -> bool:
        """Whether passes wait for copies up from DRAM, so that it is worth while to unpack.

        Kernels that unpack take the device's memory for a twentieth of the time that the bytes are
        on the link unpacked, and wait for others: where both take about as long, little is gained.

        Args:
            longest: Seconds of the longest of the last such passes; None where none is known.
        """
        if self.computes is None or not self.copies:
            return self.copies > 0.0  # what is not known yet is measured in the first two passes
        if self.copies > _BINDS * self.computes:
            return True
        # what is measured of compute has the host's time in it, where that is long
        as_long = longest is not None and longest < _AS_LONG * self.copies
        return as_long and self.computes < _BINDS * self.copies

    def decides_as(self, other: StreamPlan) -> bool:
        """Whether it decides the same as a newer plan for the same schedule, whose times differ."""
        return (self.plan, self.ahead, self.turn, self.through_dram) == (
            other.plan,
            other.ahead,
            other.turn,
            other.through_dram,
        )

    def take_times(self, other: StreamPlan) -> None:
        """Takes over the times of a plan that decides the same, and so goes on.

        A recording of what was done by it is not made anew for times that differ by a little, and
        those that differ by more are met with at the next check.
        """
        self.made_of, self.compute = other.made_of, other.compute
        self.due, self._timetable = other.due, other._timetable
        self.foreseen, self.copies, self.computes = other.foreseen, other.copies, other.computes
