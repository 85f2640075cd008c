"""DeepSpeed's schedulers give the numbers of its formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support_zero_infinity import batch, build, config, loss_of, plain, started, train

import tiermem
import tiermem.integrations.zero_infinity as deepspeed
from tiermem.integrations.zero_infinity.setup import SCHEDULES


def optimizer(*rates: float, tensor: bool = False) -> torch.optim.Optimizer:
    """An optimizer with a group for each rate."""
    groups: list[dict[str, Any]] = []
    for rate in rates or (0.1,):
        lr: Any = torch.tensor(rate) if tensor else rate
        groups.append({"params": [torch.zeros(1, requires_grad=True)], "lr": lr})
    return torch.optim.AdamW(groups)


def rates(scheduler: Any, count: int) -> list[float]:
    """The first group's rate as it is made, and after each of so many steps."""
    found = [float(scheduler.optimizer.param_groups[0]["lr"])]
    for _ in range(count):
        scheduler.step()
        found.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        assert scheduler.get_last_lr() == [g["lr"] for g in scheduler.optimizer.param_groups]
    return found


def test_a_warm_up_is_logarithmic_and_overrides_the_rate() -> None:
    found = rates(deepspeed.WarmupLR(optimizer(), 0.0, 0.5, 4), 6)
    log = [0.5 * math.log(n + 1) / math.log(4) for n in range(4)]
    assert found == pytest.approx([0.0, *log, 0.5, 0.5], abs=1e-15)
    assert found[2] == pytest.approx(0.25)  # log 2 / log 4


def test_a_linear_warm_up() -> None:
    found = rates(deepspeed.WarmupLR(optimizer(), 0.1, 0.5, 4, "linear"), 6)
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def test_a_warm_up_to_the_groups_own_rates() -> None:
    made = optimizer(0.5, 0.25)
    scheduler = deepspeed.WarmupLR(made, warmup_num_steps=2, warmup_type="linear")
    for _ in range(3):
        scheduler.step()
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]


def test_a_warm_up_of_no_steps_is_one_of_two() -> None:
    """DeepSpeed's newest release refuses it; older ones, and files of theirs, do not."""
    assert rates(deepspeed.WarmupLR(optimizer(), 0.0, 1.0, 0), 3) == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="warmup_num_steps=-1"):
        deepspeed.WarmupLR(optimizer(), 0.0, 1.0, -1)
    with pytest.warns(UserWarning, match="warmup_type='cubic' is not known; it is 'log'"):
        deepspeed.WarmupLR(optimizer(), warmup_type="cubic")


def test_a_decay_in_a_straight_line() -> None:
    scheduler = deepspeed.WarmupDecayLR(optimizer(), 6, 0.0, 0.4, 2, "linear")
    assert rates(scheduler, 9) == pytest.approx(
        [0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0], abs=1e-12
    )


def test_a_decay_by_a_cosine() -> None:
    made = optimizer(0.2)
    scheduler = deepspeed.WarmupCosineLR(made, 6, 0.5, 2, 0.1, "linear")
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)]
    expected = [0.0, 0.1, 0.15, *(0.2 * share for share in cosine), 0.02, 0.02]
    assert rates(scheduler, 8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("staircase", "expected"),
    [(False, [0.1, 0.125, 0.15, 0.175, 0.2, 0.225]), (True, [0.1, 0.1, 0.15, 0.15, 0.2, 0.2])],
)
def test_the_range_test(staircase: bool, expected: list[float]) -> None:
    scheduler = deepspeed.LRRangeTest(optimizer(), 0.1, 2, 0.5, staircase)
    assert rates(scheduler, 5) == pytest.approx(expected)
    with pytest.raises(ValueError, match="lr_range_test_step_size=0"):
        deepspeed.LRRangeTest(optimizer(), 0.1, 0)


def test_one_cycle_of_rates_and_momenta() -> None:
    made = optimizer()
    scheduler = deepspeed.OneCycle(
        made, 0.1, 0.5, 1.0, 4, 2, decay_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9,
        decay_mom_rate=0.5,
    )  # fmt: skip
    assert made.param_groups[0]["betas"] == (0.8, 0.99)
    found, momenta = [], []
    for _ in range(8):
        scheduler.step()
        found.append(made.param_groups[0]["lr"])
        momenta.append(made.param_groups[0]["betas"][0])
    up = [0.2, 0.3, 0.4, 0.5, 0.3, 0.1]
    assert found == pytest.approx([*up, 0.1 / 1.5, 0.1 / 2.0])
    down = [0.875, 0.85, 0.825, 0.8, 0.85, 0.9]
    assert momenta == pytest.approx([*down, 0.9 * 1.25, 0.9 * 1.5])


def test_one_cycle_in_stairs_and_without_decay() -> None:
    scheduler = deepspeed.OneCycle(optimizer(), 0.0, 1.0, 0.0, 4, None, 2, cycle_momentum=False)
    found = rates(scheduler, 9)
    assert found == pytest.approx([0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.warns(UserWarning, match="SGD has no betas"):
        assert deepspeed.OneCycle(sgd, 0.1, 0.5).get_mom() is None
    with pytest.raises(ValueError, match="cycle_first_step_size=0"):
        deepspeed.OneCycle(optimizer(), 0.1, 0.5, cycle_first_step_size=0)


def test_rates_that_are_tensors_are_written_in_place() -> None:
    made = optimizer(0.5, tensor=True)
    kept = made.param_groups[0]["lr"]
    deepspeed.WarmupLR(made, 0.25, 0.5, 2).step()
    assert made.param_groups[0]["lr"] is kept
    assert float(kept) == 0.25


def test_a_schedule_goes_on_from_its_state() -> None:
    first = deepspeed.WarmupDecayLR(optimizer(), 9, 0.0, 0.4, 3)
    rates(first, 4)
    second = deepspeed.WarmupDecayLR(optimizer(), 9, 0.0, 0.4, 3)
    second.load_state_dict(first.state_dict())
    assert rates(first, 3)[1:] == rates(second, 3)[1:]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": "4", "warmup_max_lr": "1e-2"}),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 2.0, "warmup_max_lr": 0.02}),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 2}),
        ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}),
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2}),
    ],
)
def test_a_files_schedule_is_bit_for_bit_the_plain_loops(kind: str, params: Any) -> None:
    as_numbers = {k: float(v) if k.endswith("lr") else int(v) for k, v in params.items()}
    settings = config(scheduler={"type": kind, "params": params})
    with started(settings) as engine:
        losses = train(engine, 5)
        assert losses == plain(5, schedule=lambda o: SCHEDULES[kind](o, **as_numbers))
        assert type(engine.lr_scheduler) is SCHEDULES[kind]


def test_schedules_of_torch_by_name() -> None:
    settings = config(scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}})
    with started(settings) as engine:
        expected = plain(5, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))
        assert train(engine, 5) == expected


def test_auto_is_filled() -> None:
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_min_lr": "auto"}
    settings = config(scheduler={"type": "WarmupDecayLR", "params": params})
    with pytest.raises(tiermem.ConfigError, match="total_num_steps='auto': nothing says how many"):
        deepspeed.initialize(model=build(), config=settings)
    args = {"max_steps": 11, "warmup_steps": 3}
    assert deepspeed.explain(settings, args)["scheduler.params"].value == {
        "warmup_num_steps": 3, "total_num_steps": 11,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"type": "Warmup"}, "scheduler.type='Warmup': it is one of WarmupLR"),
        ({"type": "WarmupLR", "params": {"warmup": 1}}, "params.warmup=1: WarmupLR has no such"),
        ({"type": "WarmupDecayLR", "params": {}}, "total_num_steps is missing; WarmupDecayLR need"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "ten"}}, "WarmupLR does not take"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": math.inf}}, "'warmup_num_steps': inf"),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": "low"}}, r"scheduler.params=\{"),
    ],
)
def test_a_wrong_schedule_is_refused_before_anything_moves(scheduler: Any, says: str) -> None:
    model = build()
    with pytest.raises(tiermem.ConfigError, match=says):
        deepspeed.initialize(model=model, config=config(scheduler=scheduler))
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # it is not cast yet
    loss_of(model, batch(0)).backward()


def test_a_scheduler_that_asks_for_more_is_asked_before_the_step() -> None:
    schedule = {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}}
    with started(config(scheduler=schedule)) as engine:
        before = engine.module_state_dict()
        engine.backward(loss_of(engine, batch(0)))
        with pytest.raises(tiermem.StepError, match=r"ReduceLROnPlateau\.step\(metrics.*lr_kwargs"):
            engine.step()
        now = engine.module_state_dict()
        assert all(torch.equal(value, now[name]) for name, value in before.items())
        for number in range(2):
            engine.step(lr_kwargs={"metrics": 1.0 + number})
            engine.backward(loss_of(engine, batch(number + 1)))
        assert engine.global_steps == 2
        assert engine.get_lr() == [0.005]
