"""What an engine says in the log, and the objects that scripts report to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import utils
from .counts import Counts
from .mapping import Plan

logger = utils.logger


class Monitor:
    """``engine.monitor``: writes nothing, since the sections that configure it have no effect."""

    enabled = False

    def write_events(self, event_list: Any, flush: bool = True) -> None:
        """Does nothing."""


class Throughput:
    """``engine.tput_timer``: does nothing; use ``tier.stats()`` or a clock in the loop."""

    def update_epoch_count(self) -> None:
        """Does nothing."""

    start = stop = update_epoch_count


class Reporting:
    """Times the parts of a step and writes its lines, where the configuration asks for them.

    Attributes:
        monitor: What scripts write events to.
        throughput: What scripts tell of epochs.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Starts with nothing timed.

        Args:
            plan: Says what to report.
            device: Waited for around what is timed.
        """
        self.monitor, self.throughput = Monitor(), Throughput()
        self._config = plan.config
        self._device = device
        self._times: dict[str, float] = {}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time of the context to its name's total, with ``wall_clock_breakdown``."""
        if not self._config["wall_clock_breakdown"]:
            yield
            return
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self._times[what] = self._times.get(what, 0.0) + time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def report(self, counts: Counts, rates: Callable[[], tuple[Any, Any]]) -> None:
        """Writes the lines that are due after a step.

        Args:
            counts: The steps so far.
            rates: Returns learning rates and momenta.
        """
        if self._times:
            said = " | ".join(f"{what}: {s * 1e3:.2f}" for what, s in self._times.items())
            logger.info("time (ms) | %s", said)
            self._times = {}
        every = self._config["steps_per_print"]
        if every and counts.steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                counts.steps,
                counts.skipped,
                *rates(),
            )
