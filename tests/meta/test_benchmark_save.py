"""The benchmark of saving where something in it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import bench_save  # noqa: E402


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_peer_that_cannot_save_costs_no_other_row(tmp_path: Path, monkeypatch) -> None:
    """As on a disk that is full; and the folder of the run is gone by then."""

    def fails(state: object, path: Path) -> None:
        (run,) = tmp_path.glob("bench_save_*")
        assert [entry.name for entry in run.iterdir()] == []
        path.write_bytes(b"half")
        raise RuntimeError("no space left")

    monkeypatch.setattr(bench_save, "torch_save", fails)
    line = f"--device cpu --quick --folder {tmp_path} --out {tmp_path / 'out.json'}"
    monkeypatch.setattr("sys.argv", ["bench_save.py", *line.split()])
    with pytest.raises(RuntimeError, match="no space left"):
        bench_save.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    whats = [row["what"] for row in rows]
    assert {"tiermem save", "steps while saving", "torch, failed", "dcp save"} <= set(whats)
    assert whats.index("steps while saving") < whats.index("torch, failed")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
