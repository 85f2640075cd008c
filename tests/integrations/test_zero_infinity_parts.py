"""The engine's parts, each by itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support_zero_infinity import config, started
from torch.utils.data import SequentialSampler, TensorDataset

import tiermem
from tiermem.integrations.zero_infinity import mapping, precision, reading
from tiermem.integrations.zero_infinity.batches import Batches
from tiermem.integrations.zero_infinity.counts import Counts
from tiermem.integrations.zero_infinity.reporting import Reporting
from tiermem.integrations.zero_infinity.stepmaker import StepMaker

CPU = torch.device("cpu")


def plan(**more: Any) -> mapping.Plan:
    return mapping.plan(reading.read(config(**more)))


class Stepped:
    """Stands in for an optimizer in the tiers, with a norm to be had."""

    def __init__(self, norm: float) -> None:
        self.norm = torch.tensor(norm)
        self.called: list[str] = []

    def grad_norm(self, dtype: torch.dtype) -> torch.Tensor:
        return self.norm.to(dtype)

    def step(self) -> None:
        self.called.append("step")

    def zero_grad(self) -> None:
        self.called.append("zero_grad")


def test_counts_of_steps_made_and_left_out() -> None:
    counts = Counts()
    for counts.applied in (True, False, True):
        counts.count_step(4)
    assert (counts.steps, counts.skipped, counts.samples, counts.calls) == (3, 1, 12, 0)


def test_the_engines_names_are_those_of_its_parts() -> None:
    with started(config()) as engine:
        engine.global_steps, engine.micro_steps = 5, 10
        assert (engine._counts.steps, engine._counts.calls) == (5, 10)
        engine.training_dataloader = [torch.zeros(1)]
        assert engine._batches.loader is engine.training_dataloader
        assert (engine.world_size, engine.global_rank, engine.dp_world_size) == (1, 0, 1)


def test_batches_begin_anew() -> None:
    batches = Batches(plan(), CPU, None)
    with pytest.raises(tiermem.StepError, match="no training_data"):
        batches.repeated()
    data = TensorDataset(torch.arange(4.0))
    batches.loader = batches.loader_of(
        data, None, shuffle=False, pin_memory=True, sampler=SequentialSampler(data),
        collate_fn=None, workers=0,
    )  # fmt: skip
    repeated = batches.repeated()
    assert [next(repeated)[0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert batches.repeated() is repeated


def test_a_scaled_step_is_made_or_left_out() -> None:
    maker = StepMaker(plan(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}))
    loss = maker.scaled(torch.tensor(2.0, dtype=torch.float16))
    assert (loss.dtype, loss.item()) == (torch.float32, 32.0)
    optimizer: Any = Stepped(8.0)
    assert maker.make(optimizer)
    assert optimizer.called == ["step", "zero_grad"]
    assert torch.equal(
        optimizer.grad_factor * 16, torch.clamp(1 / (optimizer.norm / 16 + 1e-6), max=1)
    )
    overflown: Any = Stepped(float("inf"))
    assert not maker.make(overflown)
    assert overflown.called == ["zero_grad"]
    assert overflown.overflow and overflown.loss_scale == 8.0


def test_without_a_scale_a_loss_is_itself() -> None:
    maker, loss = StepMaker(plan()), torch.tensor(2.0)
    assert maker.scaled(loss) is loss
    maker.show_scale(None)
    assert maker.scaler is None


def test_lines_are_written_when_they_are_due(caplog: pytest.LogCaptureFixture) -> None:
    reporting = Reporting(plan(steps_per_print=2, wall_clock_breakdown=True), CPU)
    asked: list[int] = []

    def rates() -> tuple[Any, Any]:
        asked.append(1)
        return [0.5], [0.9]

    with caplog.at_level(logging.INFO, logger="tiermem.integrations.zero_infinity"):
        with reporting.timed("forward"):
            pass
        reporting.report(Counts(steps=1), rates)
        assert "time (ms) | forward:" in caplog.text and "step=" not in caplog.text
        caplog.clear()
        reporting.report(Counts(steps=2, skipped=1), rates)
    assert "step=2, skipped=1, lr=[0.5], mom=[0.9]" in caplog.text
    assert "time (ms)" not in caplog.text and asked == [1]


def test_inputs_are_halved_and_integers_left() -> None:
    found = precision.halved({"x": [torch.ones(1), torch.ones(1, dtype=torch.int64)], "n": 3})
    assert [t.dtype for t in found["x"]] == [torch.float16, torch.int64]
    assert found["n"] == 3


def test_autocast_is_on_where_the_file_says_so() -> None:
    on = plan(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    with precision.autocast(on, CPU):
        assert torch.is_autocast_enabled("cpu")
    with precision.autocast(plan(), CPU):
        assert not torch.is_autocast_enabled("cpu")
