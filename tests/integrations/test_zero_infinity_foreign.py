"""Checkpoints that DeepSpeed wrote: training goes on from them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_deepspeed_files import (
    PlainRun,
    split,
    stage_0,
    stage_3,
    stages_1_and_2,
    universal,
)
from support_zero_infinity import build, config, losses_of, started

import tiermem
from tiermem.integrations.zero_infinity import checkpoints

Write = Callable[[PlainRun, Path], None]
WRITERS: dict[str, Write] = {
    "stage 2": partial(stages_1_and_2, world=1),
    "stage 2, 3 ranks": partial(stages_1_and_2, world=3),
    "stage 1, elastic, 4 ranks": partial(stages_1_and_2, world=4, elastic=True),
    "stage 3": partial(stage_3, world=1),
    "stage 3, 3 ranks": partial(stage_3, world=3),
    "universal": partial(universal, flat=False),
    "universal of stage 3": partial(universal, flat=True),
}


@contextmanager
def engine_of(half: str = "bf16", *, frozen: bool = False, **more: Any) -> Iterator[Any]:
    """An engine with other weights than the checkpoint's, and its two groups."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    model = build(dtype)
    model.register_buffer("seen", torch.zeros(3))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    if frozen:
        model[0].requires_grad_(False)
    names = split([n for n, p in model.named_parameters() if p.requires_grad])
    params = dict(model.named_parameters())
    groups = [{"params": [params[n] for n in group]} for group in names]
    groups[1]["weight_decay"] = 0.3
    settings = config(
        **{half: {"enabled": True}},
        optimizer={"type": "AdamW", "params": {"lr": 1.0}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
        **more,
    )
    with started(settings, model, model_parameters=groups) as engine:
        engine.lr_scheduler.get_lr = lambda: [g["lr"] for g in engine.optimizer.param_groups]
        yield engine


@pytest.mark.parametrize("writer", WRITERS)
def test_training_goes_on_from_what_deepspeed_wrote(writer: str, tmp_path: Path) -> None:
    run = PlainRun()
    run.steps(3)
    WRITERS[writer](run, tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3")
    expected = run.steps(2)
    with engine_of() as engine:
        path, client = engine.load_checkpoint(tmp_path)
        assert path.endswith("_model_states.pt")
        assert client == {"epoch": 4}
        assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (3, 1, 6)
        assert engine.lr_scheduler.last_batch_iteration == 2
        assert engine.module.get_buffer("seen").tolist() == [0.0, 1.0, 2.0]
        if "elastic" in writer:  # which saves no rates
            for mine, theirs in zip(engine.optimizer.param_groups, run.optimizer.param_groups,
                                    strict=True):  # fmt: skip
                mine.update({key: theirs[key] for key in ("lr", "weight_decay")})
        assert losses_of(engine, range(3, 5), torch.bfloat16) == expected


def test_stage_0_has_its_state_in_the_models_file(tmp_path: Path) -> None:
    run = PlainRun(torch.float16)
    run.steps(2)
    stage_0(run, tmp_path / "one")
    with engine_of("fp16") as engine:
        engine.load_checkpoint(tmp_path, "one")
        state = engine.optimizer.state_dict()
        assert engine.loss_scale() == 64.0
        names = [name for group in run.groups for name in group]
        for number, name in enumerate(names):
            assert torch.equal(state["master"][number], run.masters[name].detach())
            assert state["state"][number]["step"] == 2
            found = state["state"][number]["exp_avg_sq"]
            assert torch.equal(found, run.values("exp_avg_sq", name))


def test_a_plain_optimizers_state_of_stage_0(tmp_path: Path) -> None:
    run = PlainRun(torch.float32)
    run.steps(2)
    stage_0(run, tmp_path / "one")
    path = tmp_path / "one" / checkpoints.MODEL
    content = torch.load(path, weights_only=False)
    content["optimizer"] = run.optimizer.state_dict()
    torch.save(content, path)
    with started(config(), build()) as engine:  # one group: it does not fit
        with pytest.raises(tiermem.CheckpointError, match=r"groups of \[6, 12\] parameters"):
            engine.load_checkpoint(tmp_path, "one", load_module_strict=False)


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_weights_of_stage_3(world: int, tmp_path: Path) -> None:
    run = PlainRun(frozen=True)
    run.steps(1)
    stage_3(run, tmp_path / "a", world)
    with engine_of(frozen=True) as engine:
        engine.load_checkpoint(tmp_path, "a")
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, run.model.state_dict()[name]), name


def test_weights_alone_and_the_loss_scale(tmp_path: Path) -> None:
    run = PlainRun(torch.float16)
    run.steps(2)
    stage_3(run, tmp_path / "a", 2)
    with engine_of("fp16") as engine:
        engine.load_checkpoint(tmp_path, "a", load_module_only=True)
        assert not engine.optimizer.state_dict()["state"]
        found = engine.module_state_dict()
        assert all(torch.equal(v, found[k]) for k, v in run.model.state_dict().items())
        assert engine.global_steps == 0
        engine.load_checkpoint(tmp_path, "a")
        assert engine.loss_scale() == engine.optimizer.cur_scale == 64.0
        scaler = engine.scaler.state_dict()
        assert scaler == {"scale": 64.0, "iteration": 5, "last_overflow": 1, "left": 2}


def _drop(folder: Path) -> None:
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def _without_state_on_disk(folder: Path) -> None:
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.empty(0)
    torch.save(content, path)


def _tensor_parallel(folder: Path) -> None:
    (folder / "zero_pp_rank_0_mp_rank_01_model_states.pt").touch()


def _experts(folder: Path) -> None:
    (folder / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop, "files of 2 ranks are needed"),
        (_without_state_on_disk, "that was on NVMe is not in DeepSpeed's checkpoints"),
        (_tensor_parallel, "tensor-parallel run.*ds_to_universal"),
        (_experts, "experts and pipeline layers"),
    ],
)
def test_what_is_not_whole_is_refused(
    change: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    run = PlainRun()
    run.steps(1)
    stage_3(run, tmp_path / "a", 2)
    if change is _without_state_on_disk:
        from support_deepspeed_files import named_as_there

        with named_as_there():
            change(tmp_path / "a")
    else:
        change(tmp_path / "a")
    with engine_of() as engine:
        before = engine.module_state_dict()
        with pytest.raises(tiermem.CheckpointError, match=says):
            engine.load_checkpoint(tmp_path, "a")
        after = engine.module_state_dict()
        assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    run = PlainRun(frozen=True)  # its optimizer knows fewer weights
    run.steps(1)
    stages_1_and_2(run, tmp_path / "a", 2)
    with engine_of() as engine:
        with pytest.raises(tiermem.CheckpointError, match=r"have no '0\..*nothing was loaded"):
            engine.load_checkpoint(tmp_path, "a")
        assert engine.global_steps == 0


class Unknown:
    """What no checkpoint should hold."""


def test_a_file_runs_no_code_and_names_what_it_would(tmp_path: Path) -> None:
    run = PlainRun()
    run.steps(1)
    stages_1_and_2(run, tmp_path / "a", 1)
    path = tmp_path / "a" / checkpoints.MODEL
    content = torch.load(path, weights_only=False)
    torch.save({**content, "mine": Unknown()}, path)
    with engine_of() as engine:
        with pytest.raises(tiermem.CheckpointError, match=r"holds .*Unknown.*add_safe_globals"):
            engine.load_checkpoint(tmp_path, "a")
        path.write_bytes(b"no pickle")
        with pytest.raises(tiermem.CheckpointError, match="mp_rank_00_model_states"):
            engine.load_checkpoint(tmp_path, "a")


def test_states_of_random_numbers_in_a_client_state_are_plain_data(tmp_path: Path) -> None:
    import random

    import numpy as np

    state = {"numpy": np.random.get_state(), "python": random.getstate(), "best": np.float32(0.5)}
    with engine_of() as engine:
        engine.save_checkpoint(tmp_path, "a", client_state=state)
        _, client = engine.load_checkpoint(tmp_path, "a")
        assert np.array_equal(client["numpy"][1], state["numpy"][1])
        assert client["python"] == state["python"]
        assert client["best"] == 0.5
