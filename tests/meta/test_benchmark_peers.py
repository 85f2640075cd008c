"""DeepSpeed among the peers: not installed, failing, and working (a double of it)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
DOUBLES = Path(__file__).parent / "doubles"
sys.path.insert(0, str(BENCHMARKS))

from common import failure  # noqa: E402
from single_rank import one_rank  # noqa: E402
from zero3 import (  # noqa: E402
    ZeRO3,
    engine_of,
    inference_settings,
    training_settings,
    zero3_training,
)

NAME = "DeepSpeed ZeRO-3"
CPU = torch.device("cpu")
RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)


class Model(nn.Module):
    """As small as one of these can be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x)).square().mean()


@pytest.fixture
def double(monkeypatch, tmp_path) -> Path:
    """Makes ``import deepspeed`` find the double; yields the path of its log."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    monkeypatch.setenv("FAKE_DEEPSPEED_LOG", str(tmp_path / "log.json"))
    yield tmp_path / "log.json"
    sys.modules.pop("deepspeed", None)


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in RANK}


def test_one_rank_puts_back_what_there_was(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    before = environment()
    with pytest.raises(KeyError), one_rank():
        assert os.environ["RANK"] == "0" and int(os.environ["MASTER_PORT"]) > 0
        dist.init_process_group("gloo")
        raise KeyError
    assert environment() == before and not dist.is_initialized()


def test_training_steps_as_plain_torch_does(double) -> None:
    """Micro-batches are divided once, and a step is made after the last of them."""
    before = environment()
    model, plain = Model(), Model()
    inputs = torch.randn(4, 2, 4)
    with zero3_training(lambda: model, CPU, 2) as trainer:
        assert isinstance(trainer, ZeRO3) and trainer.model.head.out_features == 3
        for pair in inputs.split(2):
            for x in pair:
                trainer.backward(trainer.model(x) / 2)
            trainer.step()
    assert environment() == before and not dist.is_initialized()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    for pair in inputs.split(2):
        for x in pair:
            (plain(x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    log = json.loads(double.read_text())
    assert (log["backwards"], log["steps"]) == (4, 2)
    below = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_param": below, "offload_optimizer": below}
    assert log["config"]["zero_optimization"] == zero
    assert log["config"] == training_settings(2)


def test_failing_leaves_no_group_behind(double, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_DEEPSPEED", "fails")
    before = environment()
    with pytest.raises(RuntimeError) as caught, zero3_training(Model, CPU, 1):
        raise AssertionError("it fails before")
    assert failure(caught.value) == "RuntimeError: Error building extension 'cpu_adam'"
    assert environment() == before and not dist.is_initialized()


def _no_model() -> Model:
    raise AssertionError("no model is built for what is not there")


def test_where_it_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError) as caught, zero3_training(_no_model, CPU, 1):
        raise AssertionError("it fails before")
    assert "deepspeed" in failure(caught.value)
    error = ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    assert failure(error) == "not installed: deepspeed"
    assert failure(ImportError("a.so: no such file")) == "ImportError: a.so: no such file"


def test_a_buffer_for_reads_from_disk_holds_the_largest_parameter(double) -> None:
    model = nn.Sequential(nn.Linear(3, 50), nn.Linear(50, 2)).requires_grad_(False)
    settings = inference_settings(model, "somewhere")
    below = settings["zero_optimization"]["offload_param"]
    assert below["buffer_size"] == 150 and Path(below["nvme_path"]).is_absolute()
    with engine_of(CPU, lambda: model, lambda _: settings) as engine:
        assert engine.module is model and engine.optimizer is None
    assert "aio" not in inference_settings(model, None)


def run(script: str, folder: Path, line: str, **more: str) -> list[dict[str, Any]]:
    """Runs a benchmark of tiny size with the one peer; returns its rows."""
    path = os.pathsep.join([str(ROOT), str(DOUBLES)])
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, str(BENCHMARKS / script), *line.split(), "--out", "out.json"]
    which = ["--peers", NAME] if script == "bench_train.py" else ["--only", "tiermem", NAME]
    done = subprocess.run(
        [*command, *which], cwd=folder, env=settings, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())["rows"]


TRAIN = (
    "--shape tiny --device cpu --what peers --tokens 32 --micro 2 --chunks 2 --repeats 1 "
    "--steps 1 --warm 1 --raw-repeats 1"
)
FORWARD = (
    "--shape tiny --device cpu --hbm 300KiB --dram 8MiB --repeats 1 --tokens 8 "
    "--train-tokens --new-tokens 0"
)


@needs_transformers
@pytest.mark.thorough
def test_a_row_of_training(tmp_path) -> None:
    mine, row = run("bench_train.py", tmp_path, TRAIN, FAKE_DEEPSPEED_LOG="log.json")
    assert row["what"] == NAME and row["s"] > 0 and "note" not in row
    assert row["tiermem is so many times as fast"] == pytest.approx(row["s"] / mine["s"])
    assert row["first loss"] == pytest.approx(mine["first loss"], rel=1e-3)
    log = json.loads((tmp_path / "log.json").read_text())
    assert (log["backwards"], log["steps"]) == (6, 3)  # a warm one, one not counted, and one


@needs_transformers
@pytest.mark.thorough
def test_a_row_of_training_that_fails(tmp_path) -> None:
    _, row = run("bench_train.py", tmp_path, TRAIN, FAKE_DEEPSPEED="fails")
    assert row == {"what": NAME, "note": "RuntimeError: Error building extension 'cpu_adam'"}


@needs_transformers
@pytest.mark.thorough
def test_a_row_of_forward(tmp_path) -> None:
    rows = {row["what"]: row for row in run("peers.py", tmp_path, FORWARD)}
    assert rows[NAME]["equal"] is True and rows[NAME]["8 tokens s"] > 0
    assert "note" not in rows[NAME]
