"""Steps on the host that are made when a test lets them be, and no sooner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from tiermem.optim.host.job import Job
from tiermem.optim.host.side import HostSide
from tiermem.optim.host.update import HostUpdate


class Gate:
    """Holds the host's thread before each step until as many are let through.

    Attributes:
        begun: Steps that were handed to the thread, in order.
        waited: Of how many the end was waited for by somebody who needed it.
    """

    def __init__(self) -> None:
        self.begun: list[Job] = []
        self.waited = 0
        self._open = 0
        self._ends: list[Future[None]] = []
        self._moved = threading.Condition()

    def let(self, steps: int) -> None:
        """Releases ``steps`` more of the steps begun, and waits for their ends."""
        self._let(min(self._open + steps, len(self.begun)))

    def _let(self, upto: int) -> None:
        with self._moved:
            self._open = max(self._open, upto)
            self._moved.notify_all()
        for future in self._ends[: self._open]:
            future.exception()

    def submitted(self, job: Job) -> None:
        """The last of those begun is in the thread's hands."""
        assert job.future is not None
        self._ends.append(job.future)

    def pass_through(self, job: Job) -> None:
        """Is where the thread waits; what was begun before the gate goes through."""
        number = max((i for i, other in enumerate(self.begun) if other is job), default=-1)
        with self._moved:
            self._moved.wait_for(lambda: number < self._open)

    def needed(self, job: Job) -> None:
        """Somebody waits for the end of a step."""
        self.waited += 1
        if any(other is job for other in self.begun):
            self._let(1 + max(i for i, other in enumerate(self.begun) if other is job))


@contextmanager
def gated() -> Iterator[Gate]:
    """Holds every step on the host."""
    gate = Gate()
    begin, update, take_up = HostSide.begin, HostUpdate.update, HostSide.take_up

    def begin_held(side: Any, runtime: Any, job: Job, pool: Any) -> None:
        gate.begun.append(job)
        begin(side, runtime, job, pool)
        gate.submitted(job)

    def update_held(made: Any, optimizer: Any, job: Job, undo: Any) -> Any:
        gate.pass_through(job)
        return update(made, optimizer, job, undo)

    def take_up_held(side: Any, runtime: Any, job: Job, state: Any, pool: Any) -> None:
        if job.broken and not job.computed:
            side.begin(runtime, job, pool)
        gate.needed(job)
        take_up(side, runtime, job, state, pool)

    report = Job.report

    def report_held(job: Job) -> None:
        gate.needed(job)
        report(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostSide, "begin", begin_held)
        patch.setattr(HostUpdate, "update", update_held)
        patch.setattr(HostSide, "take_up", take_up_held)
        patch.setattr(Job, "report", report_held)
        try:
            yield gate
        finally:
            gate._let(1 << 30)
