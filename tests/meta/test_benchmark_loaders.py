"""The comparison with other loaders: not installed, failing, and working (doubles of them)."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = Path(__file__).parent / "doubles"
sys.path.insert(0, str(ROOT / "benchmarks"))

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

import bench_checkpoint  # noqa: E402
import loaders  # noqa: E402

PACKAGES = ("fastsafetensors", "runai_model_streamer", "instanttensor")
LINE = "--device cpu --shape tiny --tokens 4 --hbm 512KiB --dram 16MiB --what loaders --repeats 2"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark in this process; returns its rows by what they are of."""
    for name in PACKAGES:  # whatever is installed here
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(*more: str) -> dict[str, Any]:
        places = ["--folder", str(tmp_path / "model"), "--out", str(tmp_path / "out.json")]
        monkeypatch.setattr("sys.argv", ["bench_checkpoint.py", *LINE.split(), *places, *more])
        bench_checkpoint.main()
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        return {row["what"].removeprefix("loader: "): row for row in rows}

    yield call
    for name in PACKAGES:
        sys.modules.pop(name, None)


@pytest.mark.thorough
def test_loaders(run, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(DOUBLES))
    rows = run()
    working = [name for name in loaders.OTHERS if name != "instanttensor"]
    assert list(rows) == ["tiermem", *loaders.OTHERS, "raw read", "resident forward"]
    for name in ("tiermem", *working):
        row = rows[name]
        assert row["equal"] is True and "note" not in row, row
        assert 0 < row["min"] <= row["s"] <= row["max"] and len(row["all s"].split()) == 2
        assert row["of raw"] > 0 and row["times as long as tiermem"] > 0
    fastest = min(rows[name]["s"] for name in working)
    assert rows["tiermem"]["fastest other over it"] == fastest / rows["tiermem"]["s"]
    assert "only supports CUDA" in rows["instanttensor"]["note"]
    assert "s" not in rows["instanttensor"]
    assert rows["raw read"]["s"] > 0 and rows["resident forward"]["s"] > 0


@pytest.mark.thorough
def test_one_that_is_not_installed_and_one_with_other_weights(run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)  # as if there were none
    read = loaders.model_of

    def other(folder, device, tensors):
        return read(folder, device, {name: -tensor for name, tensor in tensors.items()})

    monkeypatch.setattr(loaders, "model_of", other)
    rows = run("--loaders", "from_pretrained", "fastsafetensors", "safetensors")
    assert rows["fastsafetensors"]["note"] == "not installed: fastsafetensors"
    assert rows["from_pretrained"]["equal"] is True
    assert rows["safetensors"]["equal"] is False
    assert "runai-model-streamer" not in rows
