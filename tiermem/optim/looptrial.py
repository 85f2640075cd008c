"""Finds out in a loop itself whether something makes its steps faster, where only a try tells."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_AT_FIRST = 12
"""Steps until all others are where they will be made, inside backward or in the next forward, and
some more: what is measured of a few steps is that of the side that is mostly the faster one."""
_ANOTHER_LOAD = 6
_SETTLING = 2
_TIMED = 4
_FASTER = 0.97
_FEW, _FAR_SLOWER = 2, 1.1
"""Without it so few steps do, if they take so many times as long as with it."""
_WATCHED = 8
_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps
_MOST_LOADS = 32


@dataclass(slots=True)
class _Tried:
    """What was tried with passes of one load.

    Attributes:
        is_on: Whether it is done by now.
        settling: So many steps more do not count.
        decided: Whether the side stays so for now.
        other_is_next: Whether the other side is still to be tried.
        times: Seconds of the last steps that count: while it is tried, or since it is decided.
        with_it: Seconds of a step with it, when that was tried last.
        without: The same without it.
        helps: Whether it is expected to help, as far as bytes and compute tell.
        pause: Steps before it is tried again, at least.
        since: Steps since it was decided.
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
        """Notes how long a step took; the next one may be made on the other side."""
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

        What has been tried is known better.
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
        """Whether both sides have been tried."""
        return math.isfinite(self.with_it) and math.isfinite(self.without)

    def _is_clear(self) -> bool:
        """Whether steps without it, tried last, are seen to be far slower already."""
        few = len(self.times) == _FEW and not (self.is_on or self.other_is_next)
        return few and statistics.mean(self.times) > _FAR_SLOWER * self.with_it

    def _has_tried(self, usual: float) -> None:
        """Notes how long steps take on the present side; goes to the other, or decides."""
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
        """Whether it may be otherwise by now: other programs need the host's cores as well."""
        if not self.is_on:
            return self.helps
        return statistics.median(self.times) > self.without


class LoopTrial:
    """Whether something makes a loop faster: some steps are made with it and some without.

    It must change nothing else. It is tried with each number of tokens, since what takes longest
    differs, and remembered. The first steps are made with it, those with another number of tokens
    as the last ones were. Where steps with it come to take longer than those without did, and where
    it is not done, it is tried anew after a while: 32 steps, then 64, ..., 1024. Where it is not
    expected to make them faster, it is not tried.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        load: Callable[[], Hashable] = lambda: None,
        first: int = _AT_FIRST,
    ) -> None:
        """Begins with it.

        Args:
            now: Returns seconds.
            load: Returns what the present passes have to do; whatever is equal is tried together.
            first: So many steps do not count at first.
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
        """Whether it is done by now."""
        return self._tried.is_on

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self._tried.is_on = is_on

    @property
    def decided(self) -> bool:
        """Whether that stays so for now, with as many tokens."""
        return self._tried.decided

    @property
    def is_measured(self) -> bool:
        """Whether steps with and without it have been timed with as many tokens."""
        return self._tried.is_measured

    def expect(self, *, helps: bool) -> None:
        """Notes whether it is expected to make passes with as many tokens faster."""
        self._tried.expect(helps=helps)

    @property
    def _tried(self) -> _Tried:
        load = self._load()
        found = self._by_load.get(load)
        if found is None:
            last = self._last
            # what is before the first is no step
            found = (
                _Tried(True, self._first + 1) if last is None else _Tried(last.is_on, _ANOTHER_LOAD)
            )
            self._by_load[load] = found
            if len(self._by_load) > _MOST_LOADS:
                del self._by_load[next(iter(self._by_load))]
        self._last = found
        return found

    def for_step(self, ticket: object) -> bool:
        """Returns whether it is done in a step, and in the forward after it.

        Args:
            ticket: Stands for the step; with the same one it counts once.
        """
        tried = self._tried
        if ticket is self._ticket:
            return tried.is_on
        ended, self._ticket = self._now(), ticket
        took, self._began = ended - self._began, ended
        tried.takes(took)
        return tried.is_on

    def pause(self) -> None:
        """Notes that the step under way is none that counts, and the next one begins anew."""
        self._began = self._now()
