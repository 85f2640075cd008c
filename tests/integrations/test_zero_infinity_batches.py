"""The three batch numbers: inferred, filled, contradicting; and what accumulation does."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from support_zero_infinity import TIGHT, batch, build, config, loss_of, plain, started, train

import tiermem
import tiermem.integrations.zero_infinity as deepspeed

BATCH, MICRO, STEPS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({BATCH: 8, MICRO: 2, STEPS: 4}, (8, 2, 4)),
        ({BATCH: 8, MICRO: 2}, (8, 2, 4)),
        ({BATCH: 8, STEPS: 4}, (8, 2, 4)),
        ({MICRO: 2, STEPS: 4}, (8, 2, 4)),
        ({BATCH: 8}, (8, 8, 1)),
        ({MICRO: 2}, (2, 2, 1)),
        ({STEPS: 4}, (4, 1, 4)),
        ({}, (1, 1, 1)),
        ({BATCH: "auto", MICRO: 2, STEPS: "auto"}, (2, 2, 1)),
        ({BATCH: 8.0, MICRO: "2"}, (8, 2, 4)),
    ],
)
def test_a_number_is_inferred_from_the_others(
    given: dict[str, Any], found: tuple[int, int, int]
) -> None:
    rows = deepspeed.explain(given)
    assert tuple(rows[key].value for key in (BATCH, MICRO, STEPS)) == found
    for key in (BATCH, MICRO, STEPS):
        written = given.get(key, "auto") != "auto"
        assert rows[key].source == ("file" if written else "inferred")


@pytest.mark.parametrize(
    "given",
    [
        {BATCH: 8, MICRO: 3, STEPS: 2},
        {BATCH: 8, MICRO: 3},
        {BATCH: 2, MICRO: 4},
        {BATCH: 7, STEPS: 2},
    ],
)
def test_contradicting_numbers_are_refused_before_anything_moves(given: dict[str, int]) -> None:
    model = build()
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    for key, value in given.items():
        with pytest.raises(tiermem.ConfigError, match=f"config: .*{key}={value}"):
            deepspeed.initialize(model=model, config=given)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
    with pytest.raises(tiermem.ConfigError):
        deepspeed.explain(given)


def test_numbers_for_several_processes_are_explained_and_refused_by_one() -> None:
    given = {BATCH: 32, MICRO: 2, STEPS: 4}  # of four processes
    assert "there is one process" in deepspeed.explain(given).refused
    with pytest.raises(tiermem.ConfigError, match="there is one process; leave one of them out"):
        deepspeed.initialize(model=build(), config=given)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(tiermem.ConfigError, match="WORLD_SIZE=2"):
        deepspeed.initialize(model=build(), config=config())


@pytest.mark.parametrize("as_dict", [True, False])
def test_auto_is_what_the_caller_says(as_dict: bool) -> None:
    values = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5, "max_steps": -1}
    args = values if as_dict else Namespace(**values)
    rows = deepspeed.explain({BATCH: "auto", MICRO: "auto", STEPS: "auto"}, args=args)
    assert [rows[key].value for key in (BATCH, MICRO, STEPS)] == [15, 3, 5]
    assert rows[MICRO].source == "auto"


@pytest.mark.parametrize("every", [1, 2, 3])
def test_accumulation_is_bit_for_bit_the_plain_loop(every: int) -> None:
    with started(config(**{STEPS: every})) as engine:
        assert engine.gradient_accumulation_steps() == every
        assert engine.train_batch_size() == 2 * every
        assert train(engine, 6) == plain(6, every=every)
        assert engine.global_steps == 6 // every
        assert engine.micro_steps == 6
        assert engine.global_samples == 12


def test_boundaries() -> None:
    with started(config(**{STEPS: 2})) as engine:
        seen = []
        for number in range(4):
            engine.backward(loss_of(engine, batch(number)))
            seen.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            assert engine.was_step_applied() == seen[-1]
        assert seen == [False, True, False, True]


def test_boundaries_that_the_loop_sets() -> None:
    """As accelerate does it: one ``step()`` after all backwards."""
    with started(config(**{STEPS: 2})) as engine:
        losses = []
        for number in range(4):
            engine.set_gradient_accumulation_boundary(number % 2 == 1)
            loss = loss_of(engine, batch(number))
            engine.backward(loss)
            losses.append(loss.item())
            if number % 2:
                engine.step()
        assert losses == plain(4, every=2)


def test_unmanaged_accumulation_steps_whenever_it_is_asked() -> None:
    settings = config(**{STEPS: 2, "managed_gradient_accumulation": False})
    with started(settings) as engine:
        losses = []
        for number in range(4):
            loss = loss_of(engine, batch(number))
            engine.backward(loss)
            losses.append(loss.item())
            if number % 2:
                engine.step()
        assert losses == plain(4, every=2)
        assert engine.global_samples == 8
        engine.backward(loss_of(engine, batch(4)))
        engine.step()
        assert engine.global_samples == 10  # of the backwards that there were
        with pytest.raises(tiermem.StepError, match="every step"):
            engine.set_gradient_accumulation_boundary(True)


def test_the_samples_of_a_step_can_be_changed() -> None:
    with started(config()) as engine:
        engine.set_train_batch_size(6)
        assert engine.gradient_accumulation_steps() == 3
        with pytest.raises(tiermem.ConfigError, match="a multiple of train_micro_batch_size"):
            engine.set_train_batch_size(5)


def test_steps_inside_backward_follow_the_samples_of_a_step() -> None:
    """They are made in the last backward of a step, which is another one from then on."""
    room = {**TIGHT, "overlap": "backward"}
    with started(config(tiermem=room, gradient_clipping=0.0)) as engine:
        engine.set_train_batch_size(6)
        assert train(engine, 12) == plain(12, every=3, clip=0)
        assert engine.optimizer.stepped_in_backward > 0
