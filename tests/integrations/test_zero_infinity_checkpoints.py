"""Saving and going on: bit for bit, crash-safe, refused where it does not fit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from support_zero_infinity import build, config, losses_of, plain, started

import tiermem
from tiermem.integrations.zero_infinity import checkpoints

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05}}


@pytest.mark.parametrize("half", [None, "bf16", "fp16"])
def test_a_run_goes_on_where_it_was_saved(half: str | None, tmp_path: Path) -> None:
    more = {} if half is None else {half: {"enabled": True}}
    settings = config(scheduler=SCHEDULE, **more)
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[half]
    with started(settings) as engine:
        losses_of(engine, range(3), dtype)
        state = {"epoch": 7, "args": argparse.Namespace(seed=1)}
        assert engine.save_checkpoint(tmp_path, client_state=state) is True
        expected = losses_of(engine, range(3, 6), dtype)
        scale = engine.loss_scale()
    assert (tmp_path / "latest").read_text() == "global_step3"
    with started(settings) as engine:
        path, client = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step3" / checkpoints.MODEL)
        assert client["epoch"] == 7
        assert client["args"].seed == 1
        assert engine.global_steps == 3
        assert losses_of(engine, range(3, 6), dtype) == expected
        assert engine.loss_scale() == scale
        assert engine.global_steps == 6


def test_accumulation_begins_anew_after_loading(tmp_path: Path) -> None:
    """Gradients are in no checkpoint, and the number of a step's backwards may be another."""
    steps = "gradient_accumulation_steps"
    with started(config(**{steps: 3})) as engine:
        losses_of(engine, range(4))
        engine.save_checkpoint(tmp_path)
        losses_of(engine, range(1))  # a second backward of the next step
        engine.load_checkpoint(tmp_path)
        seen = []
        for number in range(3, 9):
            losses_of(engine, range(number, number + 1))
            seen.append(engine.global_steps)
        assert seen == [1, 1, 2, 2, 2, 3]
        weights = engine.module_state_dict()
    with started(config(**{steps: 3})) as engine:
        losses_of(engine, range(9))
        assert all(torch.equal(v, weights[k]) for k, v in engine.module_state_dict().items())
    with started(config(**{steps: 2})) as engine:
        engine.load_checkpoint(tmp_path)
        losses_of(engine, range(3))
        assert engine.global_steps == 2


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    with started(config(scheduler=SCHEDULE)) as engine:
        losses_of(engine, range(3))
        engine.save_checkpoint(tmp_path, tag="mine", save_latest=False)
        weights = engine.module_state_dict()
    with started(config(scheduler=SCHEDULE)) as engine:
        with pytest.warns(UserWarning, match="no file 'latest'; nothing is loaded"):
            assert engine.load_checkpoint(tmp_path) == (None, None)
        engine.load_checkpoint(tmp_path, "mine", load_module_only=True)
        assert all(torch.equal(v, weights[k]) for k, v in engine.module_state_dict().items())
        assert engine.global_steps == 0
        assert not engine.optimizer.state_dict()["state"]
        engine.load_checkpoint(tmp_path, "mine", load_optimizer_states=False,
                               load_lr_scheduler_states=False)  # fmt: skip
        assert engine.global_steps == 3
        assert engine.lr_scheduler.last_batch_iteration == -1
        assert not engine.optimizer.state_dict()["state"]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with started(config()) as engine:
        with pytest.raises(tiermem.CheckpointError, match="there is no such file; tag='none'"):
            engine.load_checkpoint(tmp_path, "none")
        with pytest.raises(tiermem.CheckpointError, match=r"client_state\['module'\]"):
            engine.save_checkpoint(tmp_path, client_state={"module": 1})
        engine.save_checkpoint(tmp_path, "one")
        (tmp_path / "one" / checkpoints.STATE).unlink()
        with pytest.raises(tiermem.CheckpointError, match="load_optimizer_states=False"):
            engine.load_checkpoint(tmp_path, "one")
        torch.save({"optimizer_state_dict": {}}, tmp_path / "one" / checkpoints.STATE)
        with pytest.raises(tiermem.CheckpointError, match="no optimizer state of this engine's"):
            engine.load_checkpoint(tmp_path, "one")


def test_what_cannot_be_loaded_as_a_whole_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    """The weights were those of the checkpoint, and the optimizer's state was not."""
    with started(config()) as engine:
        losses_of(engine, range(2))
        engine.save_checkpoint(tmp_path, "one")
    path = tmp_path / "one" / checkpoints.STATE
    whole = path.read_bytes()
    with started(config(scheduler=SCHEDULE)) as engine:
        before = engine.module_state_dict()
        for content, says in ((whole[: len(whole) // 2], "cannot be read"), (b"", "cannot be read"),
                              (whole, "no state of a scheduler")):  # fmt: skip
            path.write_bytes(content)
            with pytest.raises(tiermem.CheckpointError, match=says):
                engine.load_checkpoint(tmp_path, "one")
            now = engine.module_state_dict()
            assert all(torch.equal(value, now[name]) for name, value in before.items())
            assert not engine.optimizer.state_dict()["state"]
        engine.load_checkpoint(tmp_path, "one", load_lr_scheduler_states=False)
        assert engine.global_steps == 2
    model = build()
    groups = [{"params": [p]} for p in model.parameters()]
    with started(config(), model, model_parameters=groups) as engine:
        before = engine.module_state_dict()
        with pytest.raises(tiermem.CheckpointError, match=r"groups of \[\d+\] parameters"):
            engine.load_checkpoint(tmp_path, "one")
        now = engine.module_state_dict()
        assert all(torch.equal(value, now[name]) for name, value in before.items())


def test_masters_for_an_engine_without_them_leave_it_as_it_was(tmp_path: Path) -> None:
    with started(config(bf16={"enabled": True})) as engine:
        losses_of(engine, range(2), torch.bfloat16)
        engine.save_checkpoint(tmp_path)
    with started(config()) as engine:
        before = engine.module_state_dict()
        with pytest.raises(tiermem.CheckpointError, match="masters of half-precision weights"):
            engine.load_checkpoint(tmp_path)
        now = engine.module_state_dict()
        assert all(torch.equal(value, now[name]) for name, value in before.items())
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert engine.global_steps == 2


def test_a_crash_while_saving_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(config()) as engine:
        losses_of(engine, range(1))
        engine.save_checkpoint(tmp_path, "a")
        before = (tmp_path / "a" / checkpoints.MODEL).read_bytes()

        def fails(*_: Any) -> None:
            raise OSError("no room")

        monkeypatch.setattr(checkpoints.os, "fsync", fails)
        with pytest.raises(OSError, match="no room"):
            engine.save_checkpoint(tmp_path, "a")
        with pytest.raises(OSError, match="no room"):
            engine.save_checkpoint(tmp_path, "b")
        monkeypatch.undo()
        assert (tmp_path / "a" / checkpoints.MODEL).read_bytes() == before
        assert (tmp_path / "latest").read_text() == "a"
        assert engine.load_checkpoint(tmp_path)[0] is not None


def test_weights_alone_at_stage_3_only_where_they_are_gathered(tmp_path: Path) -> None:
    key = "stage3_gather_16bit_weights_on_model_save"
    for stage, gathers, saved in ((3, False, False), (3, True, True), (2, False, True)):
        section = {"stage": stage, key: gathers, "cpu_offload": True, "cpu_offload_params": True}
        settings = config(zero_optimization=section, bf16={"enabled": True})
        with started(settings) as engine:
            folder = tmp_path / f"{stage}{gathers}"
            assert engine.save_16bit_model(folder, "weights.bin") is saved
            assert engine.save_fp16_model(folder) is saved
            assert (folder / "weights.bin").exists() is saved
        if saved:
            found = torch.load(folder / "weights.bin")
            assert {v.dtype for v in found.values()} == {torch.bfloat16}
            build(torch.bfloat16).load_state_dict(found)


def test_frozen_weights_may_be_left_out(tmp_path: Path) -> None:
    model = build()
    model[0].requires_grad_(False)
    with started(config(), model) as engine:
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        names = torch.load(tmp_path / "global_step0" / checkpoints.MODEL)["module"].keys()
        assert not [name for name in names if name.startswith("0.")]
        assert len(engine.module_state_dict()) == len(names) + 6
        engine.load_checkpoint(tmp_path, load_module_strict=False)


def test_a_loader_of_ones_own(tmp_path: Path) -> None:
    with started(config()) as engine:
        losses_of(engine, range(2))
        engine.save_checkpoint(tmp_path)
    with started(config()) as engine:

        def take(src: dict[str, Any], dst: torch.nn.Module) -> None:
            with torch.no_grad():
                for name, param in dst.named_parameters():
                    param.copy_(src[name])

        engine.load_checkpoint(tmp_path, custom_load_fn=take)
        assert losses_of(engine, range(2, 4)) == plain(4)[2:]
