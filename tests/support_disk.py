"""Models whose optimizer state is on a disk in simulated time."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.testing.disk import SimulatedDisk, SimulatedMover, SimulatedTime, Speeds

SPEEDS = Speeds(read=3e6, write=3e6, both=4e6)
"""A thousandth of the reference machine's disk."""


class TimedAdamW(torch.optim.AdamW):
    """Takes simulated time for every parameter."""

    time: SimulatedTime
    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.time.spend(self.seconds * sum(len(g["params"]) for g in self.param_groups))
        return result


class Later:
    """An executor that does all its work, in order, at the first request for a result."""

    def __init__(self, *_: Any) -> None:
        self.todo: deque[Promise] = deque()

    def submit(self, work: Any, *args: Any) -> Promise:
        self.todo.append(Promise(self, partial(work, *args)))
        return self.todo[-1]

    def shutdown(self) -> None:
        self.todo.clear()


class Promise:
    """What a :class:`Later` gives out."""

    def __init__(self, executor: Later, work: Any) -> None:
        self.executor, self.work = executor, work
        self.over = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.over

    def cancel(self) -> bool:
        return not self.over

    def exception(self) -> BaseException | None:
        while self.executor.todo:  # a thread goes on meanwhile, too
            first = self.executor.todo.popleft()
            try:
                first.work()
            except BaseException as error:
                first.error = error
            first.over = True
        return self.error

    def result(self) -> None:
        error = self.exception()
        if error is not None:
            raise error


class Sweep:
    """A model of equal layers; what a step of its optimizer costs.

    Attributes:
        unit: Bytes that one layer takes: weights, gradients, masters and state.
        time: The clock.
        disk: The disk.
    """

    def __init__(
        self,
        path: Path,
        patch: pytest.MonkeyPatch,
        *,
        layers: int,
        width: int,
        seconds: float,
        slots: float,
        params: str = "dram",
        speeds: Speeds = SPEEDS,
        dram: int = 20 << 20,
        **options: Any,
    ) -> None:
        self.time = time = SimulatedTime()
        self.disk = SimulatedDisk(time, speeds)
        self.speeds, self.layers, self.seconds = speeds, layers, seconds
        cls = type("Timed", (TimedAdamW,), {"time": time, "seconds": seconds})
        mover = type("Mover", (SimulatedMover,), {"time": time})
        patch.setattr("tiermem.runtime.memory.opening.FileMover", mover)
        patch.setattr("tiermem.optim.host.team.ThreadPoolExecutor", Later)
        patch.setattr(
            "tiermem.runtime.memory.opening.choose_engine",
            lambda *_: (lambda: self.disk, "simulated", "a test"),
        )
        self.unit = width * width * (2 + 2 + 4 + 8)
        self.width = width
        self.tier = tiermem.TierManager(
            device="cpu",
            hbm=int(slots * self.unit),
            dram=dram,
            nvme=path,
            policy={"params": params, "grads": "dram", "master": "nvme", "optimizer": "nvme"},
        )
        torch.manual_seed(0)
        linear = partial(nn.Linear, width, width, bias=False, dtype=torch.bfloat16)
        self.model = self.tier.wrap(nn.Sequential(*[linear() for _ in range(layers)]))
        self.optimizer = self.tier.optimizer(
            self.model, cls, lr=0.01, master_dtype=torch.float32, **options
        )

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    def step(self, number: int) -> float:
        """One step.

        Returns:
            The share that the bound has of the time it took, from 0 to 1. The bound is the
            disk's for the bytes that were moved, or the time of the updates.
        """
        torch.manual_seed(number)
        x = torch.randn(2, self.width, dtype=torch.bfloat16)
        self.model(x).square().mean().backward()
        manager = self.tier._manager
        manager.flush()
        began, read, written = self.time.now, self.disk.read, self.disk.written
        self.optimizer.step()
        self.optimizer.finish()
        manager.flush()
        took = self.time.now - began
        self.optimizer.zero_grad()
        bound = self.speeds.bound(self.disk.read - read, self.disk.written - written)
        return max(bound, self.layers * self.seconds) / took
