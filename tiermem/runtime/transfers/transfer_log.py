"""Transfers in the statistics: counters, timeline, and the times of passes that are measured."""

from __future__ import annotations

import time

from tiermem.core.block import Block
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.metrics.pass_timer import PassTimer
from tiermem.runtime.metrics.timeline import Timeline
from tiermem.transfer.file.mover import FileTransfer


class TransferLog:
    """Enters transfers into the statistics.

    Attributes:
        counters: What happened.
        pass_timer: Measures the copies of passes that are measured.
        enter: Enters a row of the timeline.
    """

    def __init__(self, counters: Counters, timeline: Timeline, pass_timer: PassTimer) -> None:
        """Stores the three; transfers are entered into all of them."""
        self.counters = counters
        self.pass_timer = pass_timer
        self._timeline = timeline
        self.enter = timeline.enter

    def landed(self, link: str, block: Block, transfer: FileTransfer) -> None:
        """Enters a file transfer that has finished, with or without an error."""
        if transfer.error is not None:
            self.counters.errors += 1
            return
        begun = (transfer.started_ns or transfer.submitted_ns) + transfer.rested_ns
        self.counters.moved(link, block.nbytes, transfer.finished_ns - begun)
        if self.pass_timer.sampling:
            disk = "nvme->hbm" if transfer.is_read else "hbm->nvme"
            self.pass_timer.landed(disk, block.nbytes, begun, transfer.finished_ns)
        self._timeline.add(link, block.name, begun, transfer.finished_ns, block.nbytes)

    def stalled(self, started: int) -> None:
        """Enters a wait of the host for a transfer, which has just ended."""
        ended = time.perf_counter_ns()
        self.counters.stalls += 1
        self.counters.stall_ns += ended - started
        self._timeline.add("stall", "wait", started, ended)
