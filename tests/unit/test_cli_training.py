"""The loop of both runs and the comparison between them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tiermem.cli.data import Corpus
from tiermem.cli.model import Shape
from tiermem.cli.training import (
    Outcome,
    Settings,
    deterministic,
    first_difference,
    learning_rate,
    run_resident,
)

SETTINGS = Settings(
    shape=Shape(layers=2, width=16, heads=2, context=8),
    batch=2,
    accumulate=2,
    steps=6,
    lr=1e-2,
    seed=3,
    dtype=torch.float32,
    device="cpu",
    checkpointing=False,
)
CORPUS = Corpus(b"a quick brown fox jumps over the lazy dog. " * 20, "fox")


def _train(**changes: object) -> tuple[Outcome, list[int]]:
    steps: list[int] = []
    settings = dataclasses.replace(SETTINGS, **changes)
    return run_resident(CORPUS, settings, lambda step, loss: steps.append(step)), steps


def test_the_same_seed_gives_the_same_bits() -> None:
    one, steps = _train()
    assert first_difference(one, _train()[0]) is None
    assert steps == list(range(6)) and len(one.losses) == 6
    assert first_difference(one, _train(seed=4)[0]) is not None


def test_it_learns() -> None:
    outcome, _ = _train(steps=40)
    assert outcome.losses[-1] < outcome.losses[0] - 1


def test_other_dtypes() -> None:
    outcome, _ = _train(dtype=torch.bfloat16, steps=2)
    assert {weight.dtype for weight in outcome.weights.values()} == {torch.bfloat16}
    assert SETTINGS.weight_bytes == 4 * SETTINGS.shape.parameters
    assert SETTINGS.tokens_per_step == 2 * 2 * 8


def _outcome(losses: list[float], **weights: torch.Tensor) -> Outcome:
    return Outcome(losses, weights, 1.0)


def test_differences_are_found_bit_by_bit() -> None:
    base = _outcome([1.0, math.nan], w=torch.tensor([0.0, math.nan, 3.0]))
    assert first_difference(base, base) is None
    message = first_difference(_outcome([1.0, 2.0], w=base.weights["w"]), base)
    assert message is not None and "step 1" in message
    negative = _outcome(base.losses, w=torch.tensor([-0.0, math.nan, 3.0]))
    message = first_difference(negative, base)
    assert message is not None and "w differs in 1 of 3 elements, first at 0" in message
    last = torch.tensor([0.0, math.nan, math.nextafter(3.0, 4.0)], dtype=torch.float64)
    expected = torch.tensor([0.0, math.nan, 3.0], dtype=torch.float64)
    message = first_difference(_outcome([], w=last), _outcome([], w=expected))
    assert message is not None and "first at 2" in message


def test_other_names_and_shapes_are_differences() -> None:
    one = _outcome([], a=torch.zeros(2))
    assert first_difference(one, _outcome([], b=torch.zeros(2))) is not None
    assert first_difference(one, _outcome([], a=torch.zeros(3))) is not None
    assert first_difference(one, _outcome([], a=torch.zeros(2).half())) is not None


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == 1.0 and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
    assert [learning_rate(step, 1) for step in range(2)] == [1.0, 1.0]


def test_deterministic_mode_is_put_back(monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic("cuda"):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic("cpu"):
        assert not torch.are_deterministic_algorithms_enabled()
