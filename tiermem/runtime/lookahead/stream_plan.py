"""The plan for one schedule: what stays, and when fetches are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiermem.core.cost import Timetable
from tiermem.core.loops import Plan

_BINDS = 1.15
"""A pass counts as bound by copies if these take at least this many times the compute."""
_AS_LONG = 1.1
"""A pass that takes less than this many times its copies is bound by them only."""


@dataclass(slots=True, eq=False)
class StreamPlan:
    """The plan for one schedule.

    Attributes:
        made_of: What it depends on, besides the schedule.
        plan: What stays in HBM and in DRAM, and the reserve for streaming blocks.
        ahead: Bytes of HBM that may be prefetched, not counting the last block.
        due: Makes the timetable, which only passes without a replay use.
        compute: Seconds of each use; None if unknown.
        through_dram: Whether blocks are read from files through DRAM, if the plan does not say.
        turn: If HBM is used as a ring: blocks that are used again within this many uses stay;
            else 0.
        foreseen: Whether it was made with knowledge of such passes, so that it can be used for one
            more pass after that has changed.
        copies: Seconds of a pass's copies from DRAM, of blocks for which HBM has no room; 0 if it
            writes blocks.
        computes: Seconds of its compute; None if unknown.
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
        """Whether passes are bound by copies from DRAM, so that packed copies are worth it.

        Kernels that unpack use the device's memory for a twentieth of the time of an unpacked copy,
        and wait for other kernels: if copies and compute take about as long, little is gained.

        Args:
            longest: Seconds of the longest of the last such passes; None if unknown.
        """
        if self.computes is None or not self.copies:
            return self.copies > 0.0  # unknown times are measured in the first two passes
        if self.copies > _BINDS * self.computes:
            return True
        # measured compute includes the host's time, if that is long
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
        """Copies the times of a plan that decides the same, and stays in force.

        Small differences in times need no new recording, and larger ones are found at the next
        check.
        """
        self.made_of, self.compute = other.made_of, other.compute
        self.due, self._timetable = other.due, other._timetable
        self.foreseen, self.copies, self.computes = other.foreseen, other.copies, other.computes
