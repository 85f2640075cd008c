"""The engine's calls, and that loops written for DeepSpeed give the plain loop's bits."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support_zero_infinity import TIGHT, batch, build, config, loss_of, plain, started, train
from torch import nn
from torch.utils.data import TensorDataset

import tiermem
import tiermem.integrations.zero_infinity as deepspeed


@pytest.mark.parametrize("clip", [0.0, 0.05, None])
def test_a_loop_is_bit_for_bit_the_plain_one(clip: float | None) -> None:
    """Clipping is by 1.0 where the file says nothing, as in DeepSpeed's newest releases."""
    more = {} if clip is None else {"gradient_clipping": clip}
    with started(config(**more)) as engine:
        assert train(engine, 5) == plain(5, clip=1.0 if clip is None else clip)
        assert engine.gradient_clipping() == (1.0 if clip is None else clip)
        norm = engine.get_global_grad_norm()
        assert norm is None if clip == 0 else norm > 0
        assert engine.tier.stats().links["dram->hbm"].nbytes > 0


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    """What a training script calls, from its arguments on."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({
        "train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_print": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2, "cpu_offload": True}, "tiermem": {"hbm": "1MiB"},
    }))  # fmt: skip
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    deepspeed.init_distributed()
    model = build()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=TensorDataset(torch.cat([batch(n) for n in range(4)])),
    )
    engine.train()
    assert engine.training
    assert model.training
    losses = []
    for (data,) in loader:
        loss = loss_of(engine, data.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert len(losses) == 4
    assert engine.global_steps == 2
    assert engine.local_rank == args.local_rank == 0
    assert dist.get_rank() == deepspeed.comm.get_rank() == 0
    assert dist.get_world_size() == 1
    dist.barrier()
    assert engine.module is model
    assert optimizer is engine.optimizer
    assert engine.get_lr() == scheduler.get_last_lr()
    assert len(list(engine.parameters())) == len(list(model.parameters()))
    engine.eval()
    assert not model.training
    with torch.no_grad():
        assert loss_of(engine, batch(0)).item() < losses[0] * 2
    assert engine.save_checkpoint(tmp_path / "out")
    engine.destroy()


@pytest.fixture(autouse=True)
def _no_group_left() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_model_shows_through() -> None:
    model = build()
    model.marker = "mine"
    with started(config(), model) as engine:
        assert engine.marker == "mine"
        assert len(engine) == 4 if hasattr(type(engine), "__len__") else True
        with pytest.raises(AttributeError):
            _ = engine.nothing_of_the_kind
        assert next(n for n, _ in engine.named_parameters()).startswith("module.0.")


def test_inference_without_an_optimizer() -> None:
    settings = config()
    del settings["optimizer"]
    with started(settings) as engine:
        assert engine.optimizer is None
        with torch.no_grad():
            assert torch.equal(engine(batch(0)), build()(batch(0)))
        for call in (lambda: engine.backward(torch.ones(())), engine.step):
            with pytest.raises(tiermem.StepError, match="there is no optimizer"):
                call()


def test_what_is_no_loss_is_refused() -> None:
    with started(config()) as engine:
        for wrong in (engine(batch(0)), torch.ones(()), 1.0):
            with pytest.raises(tiermem.StepError, match="takes a loss of one number"):
                engine.backward(wrong)


def test_backward_past_the_engine_is_refused_where_it_would_miss_a_factor() -> None:
    with started(config()) as engine:  # nothing to miss
        loss_of(engine, batch(0)).backward()
        engine.step()
    with started(config(gradient_accumulation_steps=2)) as engine:
        with pytest.raises(tiermem.StepError, match=r"call engine.backward\(loss\)"):
            loss_of(engine, batch(0)).backward()
        losses = []
        for number in range(4):
            loss = loss_of(engine, batch(number))
            engine.scale(loss).backward()
            engine.step()
            losses.append(loss.item())
        assert losses == plain(4, every=2)


def test_no_sync_forbids_steps() -> None:
    with started(config(gradient_accumulation_steps=2)) as engine:
        with engine.no_sync():
            engine.backward(loss_of(engine, batch(0)))
            with pytest.raises(tiermem.StepError, match="leave no_sync first"):
                engine.step()
            with pytest.raises(tiermem.StepError, match="inside no_sync"), engine.no_sync():
                pass
        engine.step()


def test_the_callers_optimizer_and_its_scheduler() -> None:
    """Both hold the same groups; torch warns of nothing."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    settings = config()
    del settings["optimizer"]
    model = build()
    client = make(model.parameters())
    scheduler = schedule(client)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started(settings, model, optimizer=client, lr_scheduler=scheduler) as engine:
            assert train(engine, 4) == plain(4, make=make, schedule=schedule)
            assert engine.get_lr() == [client.param_groups[0]["lr"]] == [0.1 * 0.5**4]
            assert engine.get_mom() == [0.9]
        with started(settings, optimizer=make, lr_scheduler=schedule) as engine:
            assert train(engine, 4) == plain(4, make=make, schedule=schedule)


def test_parameter_groups_of_the_callers() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in params if p.dim() < 2], "lr": 1e-3},
        ]

    model = build()
    with started(config(), model, model_parameters=groups(model)) as engine:
        losses = train(engine, 4)
        assert engine.get_lr() == [1e-2, 1e-3]
    resident = build()
    optimizer = torch.optim.AdamW(groups(resident), lr=1e-2, weight_decay=0.1)
    expected = []
    for number in range(4):
        loss = loss_of(resident, batch(number))
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == expected


def test_the_loader_has_micro_batches() -> None:
    data = TensorDataset(torch.arange(7.0))
    for drop, lengths in ((False, [2, 2, 2, 1]), (True, [2, 2, 2])):
        model = build()
        engine, _, loader, _ = deepspeed.initialize(
            model=model, config=config(dataloader_drop_last=drop), training_data=data
        )
        assert [len(x) for (x,) in loader] == lengths
        engine.destroy()


def test_progress_and_times_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tiermem.integrations.zero_infinity"):
        settings = config(steps_per_print=2, wall_clock_breakdown=True, dump_state=True)
        with started(settings) as engine:
            train(engine, 4)
    text = caplog.text
    assert text.count("step=2, skipped=0, lr=[0.01]") == text.count("step=4, skipped=0") == 1
    assert "step=1," not in text
    assert text.count("time (ms) | forward: ") == 4
    assert "zero_optimization.stage = 3" in text
    caplog.clear()
    with caplog.at_level(logging.INFO), started(config(steps_per_print="inf")) as engine:
        train(engine, 2)
    assert "step=" not in caplog.text


@pytest.mark.parametrize("number", range(3))
def test_what_another_system_has_is_refused(number: int) -> None:
    model = build()
    before = [p.data_ptr() for p in model.parameters()]
    if number == 0:
        next(model.parameters()).ds_id = 0
        says = "sharded by another system"
    elif number == 1:
        kind = type("FullyShardedDataParallel", (nn.Sequential,), {})
        model = nn.Sequential(kind(model))
        says = "module '0' is a FullyShardedDataParallel"
    else:
        engine = deepspeed.initialize(model=model, config=config(bf16={"enabled": True}))[0]
        with pytest.raises(tiermem.WrapError, match=r"belongs to an engine already; destroy\(\)"):
            deepspeed.initialize(model=model, config=config())
        engine.destroy()
        return
    with pytest.raises(tiermem.WrapError, match=says):
        deepspeed.initialize(model=model, config=config(bf16={"enabled": True}))
    assert [p.data_ptr() for p in model.parameters()] == before
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model": None}, "it takes a module, not None"),
        ({"config": None}, "there is none; give a path or a dict"),
        ({"mpu": object()}, "leave them out"),
        ({"optimizer": 3}, "an optimizer or a function, not 3"),
    ],
)
def test_wrong_arguments_are_refused(more: dict[str, Any], says: str) -> None:
    arguments = {"model": build(), "config": config(), **more}
    with pytest.raises(tiermem.ConfigError, match=says):
        deepspeed.initialize(**arguments)


def test_two_configurations_are_refused() -> None:
    args = argparse.Namespace(deepspeed_config="other.json")
    with pytest.raises(tiermem.ConfigError, match="both given"):
        deepspeed.initialize(args=args, model=build(), config=config())


def test_a_scheduler_that_cannot_be_made_leaves_an_ordinary_model() -> None:
    model = build()
    wrong = {"type": "WarmupLR", "params": {"warmup_min_lr": [1, 2]}}
    with pytest.raises(ValueError, match="2 values for 1 parameter groups"):
        deepspeed.initialize(model=model, config=config(scheduler=wrong))
    loss_of(model, batch(0)).backward()


def test_parameters_are_gathered_and_changes_taken_back() -> None:
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        made = nn.Linear(4, 4)
        assert made.weight.dtype is torch.bfloat16
    with deepspeed.zero.Init(enabled=False):
        assert nn.Linear(4, 4).weight.dtype is torch.float32
    with deepspeed.zero.Init():
        assert nn.Linear(4, 4).weight.dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32
    model = build()
    with deepspeed.zero.GatheredParameters(model[0].up.weight, modifier_rank=0):
        model[0].up.weight.data.mul_(2)  # an ordinary one
    with started(config(), model) as engine:
        with deepspeed.zero.GatheredParameters(list(model[0].up.parameters())), torch.no_grad():
            assert model[0].up.weight.shape == (64, 32)
            model[0].up.weight.zero_()
            model[0].up.bias.fill_(3.0)
        with deepspeed.zero.GatheredParameters(model[0]):
            assert model[0].up.weight.abs().sum() == 0
            assert (model[0].up.bias == 3).all()
        with deepspeed.zero.GatheredParameters(model, enabled=False):
            pass
        assert torch.isfinite(loss_of(engine, batch(0)))


def test_what_is_not_there_says_what_is() -> None:
    with pytest.raises(AttributeError, match=r"has no 'init_inference': it has .*initialize"):
        _ = deepspeed.init_inference
    with pytest.warns(UserWarning, match="no effect"):
        assert len(deepspeed.set_z3_leaf_modules(build(), [nn.LayerNorm])) == 3
    accelerator = deepspeed.get_accelerator()
    assert accelerator.device_name().startswith(("cpu", "cuda"))
    assert accelerator.communication_backend_name() in ("gloo", "nccl")


def test_budgets_hold() -> None:
    with started(config()) as engine:
        train(engine, 3)
        stats = engine.tier.stats()
        assert stats.peak["hbm"] <= stats.budget["hbm"] == 96 << 10
        assert TIGHT["hbm"] == "96KiB"
        assert engine.explain()["zero_optimization.stage"].value == 3


@pytest.fixture
def _no_deepspeed() -> Any:
    """Whatever is imported by this name is gone before and after."""

    def away() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
        return {name: sys.modules.pop(name) for name in names}

    there = away()
    yield
    away()
    sys.modules.update(there)


@pytest.mark.usefixtures("_no_deepspeed")
def test_imports_from_inside_are_found_once_installed() -> None:
    found: dict[str, Any] = {}
    deepspeed.install()
    deepspeed.install()
    exec(
        """
import deepspeed
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from deepspeed.utils import logger
""",
        found,
    )
    assert found["deepspeed"] is deepspeed
    for name in ("zero", "get_accelerator", "FusedAdam", "checkpointing", "WarmupLR", "logger"):
        assert found[name] is getattr(deepspeed, name), name


@pytest.mark.usefixtures("_no_deepspeed")
def test_deepspeed_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with pytest.raises(tiermem.ConfigError, match="imported already; install first"):
        deepspeed.install()


@pytest.mark.parametrize("ends", ["destroyed", "given back", "forgotten"])
def test_nothing_of_an_engine_outlives_its_model(ends: str) -> None:
    model = build()
    engine = deepspeed.initialize(model=model, config=config(bf16={"enabled": True}))[0]
    train(engine, 3, torch.bfloat16)
    param = engine.module[0].up.weight
    assert deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg") is not None
    if ends == "given back":
        engine.tier.unwrap(model)
    if ends != "forgotten":
        engine.destroy()
    gone = [weakref.ref(each) for each in (model, param, engine, engine.tier, engine.optimizer)]
    del model, param, engine
    gc.collect()
    assert not any(each() is not None for each in gone)
