"""Tries in the loop itself whether an option makes its steps faster, if only a trial can tell."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_AT_FIRST = 12
"""Steps until it is settled whether other steps run inside backward or in the next forward, and
some more; until then the option is on, which is mostly faster."""
_ANOTHER_LOAD = 6
_SETTLING = 2
_TIMED = 4
_FASTER = 0.97
_FEW, _FAR_SLOWER = 2, 1.1
"""This few steps without the option are enough if they take this many times as long as with it."""
_WATCHED = 8
_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps
_MOST_LOADS = 32


@dataclass(slots=True)
class _Tried:
    """The state of the trial with passes of one load.

    Attributes:
        is_on: Whether the option is on now.
        settling: How many more steps do not count.
        decided: Whether it stays as it is for now.
        other_is_next: Whether the other choice still has to be tried.
        times: Seconds of the last steps that count: during the trial, or since the decision.
        with_it: Seconds of a step with the option, when that was tried last.
        without: The same without it.
        helps: Whether it is expected to help, judging by bytes and compute.
        pause: Least number of steps before it is tried again.
        since: Steps since the decision.
    """

    is_on: bool
    settling: int
    decided: bool = False
    other_is_next: bool = True
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_WATCHED))
    with_it: float = math.inf
    without: float = math.inf
    helps: bool = True
    pause: int = _PAUSE
    since: int = 0

    def takes(self, seconds: float) -> None:
        """Notes how long a step took; the next one may be made with the other choice."""
        if self.settling:
            self.settling -= 1
            return
        self.times.append(seconds)
        if self.decided:
            self.since += 1
            if self.since >= self.pause and self._is_doubtful():
                self.decided, self.other_is_next = False, True
                self._go_to(is_on=False)
        elif len(self.times) == _TIMED or self._is_clear():
            self._has_tried(statistics.median(self.times))

    def expect(self, *, helps: bool) -> None:
        """Notes whether it is expected to help: if not, it is not tried.

        Results of a trial take precedence.
        """
        if helps is self.helps:
            return
        self.helps = helps
        if self.is_measured:
            return
        self.decided, self.other_is_next = not helps, True
        self._go_to(is_on=helps)
        self.since = 0
        if helps:
            self.settling = _ANOTHER_LOAD

    @property
    def is_measured(self) -> bool:
        """Whether both choices have been tried."""
        return math.isfinite(self.with_it) and math.isfinite(self.without)

    def _is_clear(self) -> bool:
        """Whether steps without it, which were tried last, are clearly far slower."""
        few = len(self.times) == _FEW and not (self.is_on or self.other_is_next)
        return few and statistics.mean(self.times) > _FAR_SLOWER * self.with_it

    def _has_tried(self, usual: float) -> None:
        """Notes how long steps take with the present choice; tries the other one, or decides."""
        if self.is_on:
            self.with_it = usual
        else:
            self.without = usual
        if self.other_is_next:
            self.other_is_next = False
            self._go_to(is_on=not self.is_on)
            return
        self.decided = True
        self._go_to(is_on=self.with_it < _FASTER * self.without)
        self.since, self.pause = 0, min(2 * self.pause, _LONGEST_PAUSE)

    def _go_to(self, *, is_on: bool) -> None:
        self.is_on, self.settling = is_on, _SETTLING
        self.times.clear()

    def _is_doubtful(self) -> bool:
        """Whether the decision may be outdated, as other programs use the host's cores, too."""
        if not self.is_on:
            return self.helps
        return statistics.median(self.times) > self.without


class LoopTrial:
    """Finds out whether an option makes a loop faster: some steps use it and some do not.

    The option must change nothing else. The result is remembered for each number of tokens, since
    the bottleneck differs. The first steps use the option; those with a new number of tokens do
    what the last ones did. If steps with it become slower than those without were, and if it is
    off, it is tried again after a while: 32 steps, then 64, ..., 1024. If it is not expected to
    make steps faster, it is not tried.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        load: Callable[[], Hashable] = lambda: None,
        first: int = _AT_FIRST,
    ) -> None:
        """Begins with the option on.

        Args:
            now: Returns seconds.
            load: Returns the load of the present passes; equal loads are tried together.
            first: How many steps do not count at first.
        """
        self._now = now
        self._load = load
        self._first = first
        self._ticket: object = None
        self._began = 0.0
        self._by_load: dict[Hashable, _Tried] = {}
        self._last: _Tried | None = None

    @property
    def is_on(self) -> bool:
        """Whether the option is on now."""
        return self._tried.is_on

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self._tried.is_on = is_on

    @property
    def decided(self) -> bool:
        """Whether that is decided for now, for the present load."""
        return self._tried.decided

    @property
    def is_measured(self) -> bool:
        """Whether steps with and without it have been timed for the present load."""
        return self._tried.is_measured

    def expect(self, *, helps: bool) -> None:
        """Notes whether it is expected to make passes of the present load faster."""
        self._tried.expect(helps=helps)

    @property
    def _tried(self) -> _Tried:
        load = self._load()
        found = self._by_load.get(load)
        if found is None:
            last = self._last
            # the time before the first step does not count
            found = (
                _Tried(True, self._first + 1) if last is None else _Tried(last.is_on, _ANOTHER_LOAD)
            )
            self._by_load[load] = found
            if len(self._by_load) > _MOST_LOADS:
                del self._by_load[next(iter(self._by_load))]
        self._last = found
        return found

    def for_step(self, ticket: object) -> bool:
        """Returns whether the option is on in a step, and in the forward after it.

        Args:
            ticket: Identifies the step; the same one counts only once.
        """
        tried = self._tried
        if ticket is self._ticket:
            return tried.is_on
        ended, self._ticket = self._now(), ticket
        took, self._began = ended - self._began, ended
        tried.takes(took)
        return tried.is_on

    def pause(self) -> None:
        """Notes that the current step does not count, and timing restarts with the next one."""
        self._began = self._now()
