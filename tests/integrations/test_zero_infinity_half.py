"""bfloat16 and float16: masters, loss scale, steps left out, autocast, buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_zero_infinity import TIGHT, batch, build, config, loss_of, plain, started, train
from torch import nn

import tiermem
import tiermem.integrations.zero_infinity as deepspeed
from tiermem.integrations.zero_infinity.reading import read
from tiermem.integrations.zero_infinity.scaling import LossScale

BF16: dict[str, Any] = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("clip", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("every", [1, 2])
def test_bf16_is_bit_for_bit_a_plain_loop_with_masters(clip: float, every: int) -> None:
    settings = config(**BF16, gradient_clipping=clip, gradient_accumulation_steps=every)
    with started(settings) as engine:
        losses = train(engine, 6, torch.bfloat16)
        assert losses == plain(6, clip=clip, every=every, dtype=torch.bfloat16)
        assert engine.bfloat16_enabled()
        assert all(p.dtype is torch.bfloat16 for p in engine.parameters())
        masters = engine.optimizer.state_dict()["master"]
        assert {m.dtype for m in masters.values()} == {torch.float32}


@pytest.mark.parametrize("where", ["host", "both"])
def test_steps_on_the_host_round_otherwise_and_no_more(where: str) -> None:
    room = {**TIGHT, "where": where}
    with started(config(**BF16, gradient_clipping=0.05, tiermem=room)) as engine:
        losses = train(engine, 5, torch.bfloat16)
        assert losses == pytest.approx(plain(5, clip=0.05, dtype=torch.bfloat16), rel=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "float32", "bf16"])
def test_gradients_are_summed_up_in_the_dtype_asked_for(dtype: str) -> None:
    settings = config(**BF16, data_types={"grad_accum_dtype": dtype})
    with started(settings) as engine:
        engine.backward(loss_of(engine, batch(0, torch.bfloat16)))
        kept = {str(p.grad.dtype) for p in engine.parameters()}
        assert kept == {"torch.bfloat16" if dtype == "bf16" else "torch.float32"}


@pytest.mark.parametrize("check", [True, False])
def test_bf16_leaves_a_step_with_an_infinite_gradient_out(check: bool) -> None:
    settings = config(bf16={"enabled": True, "check_grad_overflow": check}, gradient_clipping=0.0)
    with started(settings) as engine:
        before = {k: v.clone() for k, v in engine.module_state_dict().items()}
        engine.backward(loss_of(engine, batch(0, torch.bfloat16)) * float("inf"))
        engine.step()
        same = all(torch.equal(v, before[k]) for k, v in engine.module_state_dict().items())
        assert same == check
        assert engine.skipped_steps == int(check)
        assert engine.was_step_applied() != check
        assert engine.global_steps == 1
        assert engine.optimizer.overflow == check


def test_weights_without_masters() -> None:
    both = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    with started(config(bf16=both, gradient_clipping=0.0)) as engine:
        train(engine, 2, torch.bfloat16)
        state = engine.optimizer.state_dict()
        assert "master" not in state
        assert {s["exp_avg"].dtype for s in state["state"].values()} == {torch.bfloat16}
    for missing in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        with pytest.raises(tiermem.ConfigError, match=f"bf16.{missing} is false"):
            deepspeed.explain({"bf16": {**both, missing: False}})


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"fp16": {"enabled": True}, **BF16}, "fp16.enabled=True: bf16.enabled is true as well"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "float16 masters lose"),
        ({**BF16, "data_types": {"param_dtype": "fp16"}}, "weights are bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "weights are fp32"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window=0.0: it mu"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "min_loss_scale=0.0: it must be more"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "dtype='int8': it must be one"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype='int8'"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "write fp16: {enabled: true}"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=says):
        deepspeed.explain(raw)


def test_apex_is_refused() -> None:
    raw = {"amp": {"enabled": True, "opt_level": "O1"}}
    with pytest.warns(UserWarning, match="opt_level"):
        with pytest.raises(tiermem.ConfigError, match=r"amp\.enabled=True: it needs NVIDIA Apex"):
            deepspeed.initialize(model=build(), config=raw)
    assert "NVIDIA Apex" in deepspeed.explain(raw).refused
    assert not deepspeed.explain({"amp": {"enabled": False}}).refused


def test_auto_is_the_dtype_that_the_model_has() -> None:
    auto = {"fp16": {"enabled": "auto"}, "bfloat16": {"enabled": "auto"}}
    for dtype, section in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (None, "")):
        model = build(dtype or torch.float32)
        rows = deepspeed.explain(auto, model=model)
        assert [s for s in ("fp16", "bf16") if rows[f"{s}.enabled"].value] == (
            [section] * bool(dtype)
        )
    assert deepspeed.explain(auto, args={"fp16": True})["fp16.enabled"].value is True
    chosen = {"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}
    rows = deepspeed.explain(chosen, model=build(torch.bfloat16))
    assert rows["fp16.enabled"].value and not rows["bf16.enabled"].value  # the file has chosen


def scale_of(**fp16: Any) -> LossScale:
    """The scale of a section at stage 2."""
    raw = {"fp16": {"enabled": True, **fp16}, "zero_optimization": {"stage": fp16.pop("stage", 2)}}
    found = LossScale.of(read(raw))
    assert found is not None
    return found


def follow(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow."""
    seen = []
    for letter in overflows:
        scale.update(letter == "x")
        seen.append(scale.scale)
    return seen


def test_the_scale_waits_for_its_hysteresis() -> None:
    scale = scale_of(initial_scale_power=4, loss_scale_window=100)
    assert scale.scale == 16
    assert follow(scale, "xx.x") == [16, 8, 8, 4]
    scale = scale_of(initial_scale_power=4, consecutive_hysteresis=True, loss_scale_window=100)
    assert follow(scale, "x.x.xx") == [16, 16, 16, 16, 16, 8]
    assert follow(scale_of(initial_scale_power=4, hysteresis=1), "xx") == [8, 4]


def test_the_scale_grows_after_a_window() -> None:
    scale = scale_of(initial_scale_power=4, loss_scale_window=2, hysteresis=1)
    assert follow(scale, "......") == [16, 16, 32, 32, 64, 64]
    assert follow(scale, "x....") == [32, 32, 32, 64, 64]


def test_the_least_scale_ends_the_run_with_zero_and_holds_without() -> None:
    scale = scale_of(initial_scale_power=1, min_loss_scale=1, hysteresis=1)
    assert follow(scale, "x") == [1]
    with pytest.raises(tiermem.StepError, match=r"at fp16\.min_loss_scale=1"):
        scale.update(True)
    raw = {"fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 2}}
    plain_scale = LossScale.of(read(raw))
    assert plain_scale is not None
    assert follow(plain_scale, "xxx") == [1, 1, 1]


def test_a_static_scale_stays() -> None:
    assert follow(scale_of(loss_scale=128), "x.x") == [128, 128, 128]
    assert LossScale.of(read(BF16)) is None


class Halved(nn.Module):
    """Overflows in float16 where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return ((self.layers(x) - x).float().square().mean()) * factor


def by_hand(factors: list[float], scale: LossScale, clip: float) -> tuple[list[float], list[float]]:
    """float16 weights, float32 masters, a scaled loss; steps with infinities are left out."""
    model = Halved().half()
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1)
    losses, scales = [], []
    for number, factor in enumerate(factors):
        loss = model(batch(number, torch.float16), factor)
        (loss.float() * scale.scale).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() / scale.scale
        norm = nn.utils.clip_grad_norm_(masters, clip)
        overflow = not bool(torch.isfinite(norm))
        if not overflow:
            optimizer.step()
        scale.update(overflow)
        losses.append(loss.item())
        scales.append(scale.scale)
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.grad = None
                param.copy_(master)
    return losses, scales


def test_fp16_skips_and_scales_as_a_loop_by_hand() -> None:
    factors = [1.0, 1e6, 1e6, 1e6, 1.0, 1.0, 1e6, 1.0]
    section = {"enabled": True, "initial_scale_power": 10, "hysteresis": 2, "loss_scale_window": 2}
    with started(config(fp16=section, gradient_clipping=0.05), Halved()) as engine:
        losses, scales = [], []
        for number, factor in enumerate(factors):
            loss = engine(batch(number, torch.float16), factor)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            scales.append(engine.loss_scale())
            assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == scales[-1]
        scale = scale_of(initial_scale_power=10, hysteresis=2, loss_scale_window=2)
        assert (losses, scales) == by_hand(factors, scale, 0.05)
        assert engine.skipped_steps == 4
        assert engine.global_steps == 8


def test_a_step_that_is_left_out_leaves_the_scheduler() -> None:
    section = {"enabled": True, "initial_scale_power": 10}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
    with started(config(fp16=section, scheduler=schedule), Halved()) as engine:
        for number, factor in enumerate((1.0, 1e9, 1.0)):
            engine.backward(engine(batch(number, torch.float16), factor))
            engine.step()
        assert engine.lr_scheduler.last_batch_iteration == 1


def test_inputs_are_cast_where_auto_cast_says_so() -> None:
    for on in (True, False):
        with started(config(fp16={"enabled": True, "auto_cast": on}), Halved()) as engine:
            if on:
                assert torch.isfinite(engine(batch(0)))
            else:
                with pytest.raises(RuntimeError, match=r"dtype|expected"):
                    engine(batch(0))


class WithBuffers(nn.Module):
    """A model with a buffer, the table."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()
        self.register_buffer("table", torch.full((32,), 1.0009765625))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.table.to(x.dtype)


def test_buffers_stay_unless_their_dtype_is_given() -> None:
    for more, dtype in (({}, torch.float32), ({"buffer_dtype": "bf16"}, torch.bfloat16)):
        with started(config(**BF16, data_types=more), WithBuffers()) as engine:
            assert engine.module.table.dtype is dtype
            assert torch.isfinite(loss_of(engine, batch(0, torch.bfloat16)))


def test_autocast() -> None:
    settings = config(torch_autocast={"enabled": True, "dtype": "bfloat16"}, gradient_clipping=0.0)
    with started(settings) as engine:
        losses = train(engine, 3)
        assert engine(batch(0)).dtype is torch.float32  # x + bfloat16
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = []
    for number in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch(number))
        loss = (out - batch(number).flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert losses != plain(3, clip=0)
