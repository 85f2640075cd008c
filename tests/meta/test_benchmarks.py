"""Every benchmark runs on the CPU with small sizes and leaves figures that make sense."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SECONDS = 60

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)


def output(script: str, folder: Path, *arguments: str) -> str:
    """Runs a script of benchmarks/ from a folder of its own; returns what it prints."""
    path = BENCHMARKS / script
    if not path.exists():
        pytest.skip(f"there is no {script}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs a benchmark; returns the JSON that it leaves in ``out.json`` of the folder."""
    assert output(script, folder, *arguments)
    return dict(json.loads((folder / "out.json").read_text()))


def check_rows(found: dict[str, Any], *columns: str) -> list[dict[str, Any]]:
    """Checks that there are rows and that these columns, where a row has them, are positive."""
    rows: list[dict[str, Any]] = found["rows"]
    assert rows
    for column in columns:
        values = [row[column] for row in rows if column in row]
        assert values, f"no row has {column!r}"
        assert all(0 < value < math.inf for value in values), (column, values)
    return rows


def test_every_script_is_run_here() -> None:
    """A new benchmark needs a test in this file."""
    text = Path(__file__).read_text(encoding="utf-8")
    scripts = [p.name for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text()]
    assert scripts and not [name for name in scripts if f'("{name}"' not in text]


def test_hooks(tmp_path) -> None:
    line = "--layers 4 --width 16 --repeats 5 --depths 2 4 --out out.json"
    found = run("bench_hooks.py", tmp_path, *line.split())
    rows = check_rows(found, "us per layer (median)")
    # The hooks' own time is a difference of two, and may come out below zero once.
    assert all(math.isfinite(rows[0][f"us {name}"]) for name in ("(min)", "(max)"))
    assert found["machine"]["torch"] and (tmp_path / "out.md").read_text().startswith("# ")


def test_links(tmp_path) -> None:
    line = "--device cpu --size 2MiB --repeats 1 --chunks 256KiB 1MiB --depths 1 4 --no-fio"
    found = run("bench_links.py", tmp_path, *line.split(), "--out", "out.json")
    rows = check_rows(found, "GB/s", "min", "max", "s per GiB")
    tried = {(row["link"], row["how"].split(",")[0]) for row in rows}
    memory = {(link, "host memory") for link in ("dram->hbm", "hbm->dram", "dram->dram")}
    disks = {(link, "mover") for link in ("nvme->hbm", "hbm->nvme", "nvme<->hbm")}
    bare = {(link, "threads") for link in ("nvme->dram", "dram->nvme")}
    starts = {("start-up", "HostArena"), ("start-up", "torch.empty")}
    assert tried >= memory | disks | bare | starts
    assert {row["depth"] for row in rows if row["how"] == "threads"} == {1, 4}
    assert all(made["bytes_per_s"] > 0 for made in found["measured"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md", "out.png"]


def test_swapfile(tmp_path) -> None:
    line = "--size 4MiB --block 1MiB --depth 2 --rounds 1 --no-fio --json out.json"
    found = run("bench_swapfile.py", tmp_path, *line.split())
    summary = found["summary"]
    assert {"engine read", "engine write", "mover read", "mover write"} <= set(summary)
    assert all(row["bytes_per_s"] > 0 for row in summary.values())
    assert len(found["rounds"]) == 1 and (tmp_path / "out.md").exists()


@needs_transformers
def test_stream(tmp_path) -> None:
    line = "--shape tiny --device cpu --tokens 1 32 --hbm 1MiB --dram 8MiB --repeats 2"
    found = run("bench_stream.py", tmp_path, *line.split(), "--out", "out.json")
    rows = check_rows(found, "tokens", "in HBM s", "tiermem s", "of bound", "host us/block")
    assert [row["tokens"] for row in rows] == [1, 32] and all(row["equal"] for row in rows)


@needs_transformers
def test_stream_in_training(tmp_path) -> None:
    line = "--shape tiny --device cpu --tokens 32 --hbm 2MiB --dram 8MiB --repeats 2 --train"
    found = run("bench_stream.py", tmp_path, *line.split(), "--out", "out.json")
    assert [row["equal"] for row in check_rows(found, "tiermem s")] == [True]


@needs_transformers
def test_peers(tmp_path) -> None:
    line = "--shape tiny --device cpu --tokens 8 --hbm 1MiB --dram 8MiB --repeats 1"
    peers = ["accelerate cpu_offload", "diffusers group offloading"]  # FSDP2 would want a port
    only = ["--only", "tiermem", *peers, "--out", "out.json"]
    found = run("peers.py", tmp_path, *line.split(), *only)
    rows = {row["what"]: row for row in check_rows(found, "8 tokens s", "8 of bound")}
    assert set(rows) == {"everything in HBM", "raw copy", "tiermem", *peers}
    assert rows["tiermem"]["equal"] is True and "note" not in rows["tiermem"]
    # A peer that is not installed, or fails, says so instead of figures.
    assert all("note" in rows[peer] or "8 of bound" in rows[peer] for peer in peers)


def test_profile_of_the_host(tmp_path) -> None:
    line = "--device cpu --layers 16 --width 1024 --repeats 2 --lines 3"
    found = re.search(r"([0-9.]+) us per block", output("profile_host.py", tmp_path, *line.split()))
    assert found is not None and float(found[1]) > 0


def test_checksum(tmp_path) -> None:
    line = "--layers 6 --width 128 --batch 4 --dram 16MiB --rounds 2 --out out.json"
    rows = run("bench_checksum.py", tmp_path, *line.split())["rows"]
    assert rows[0]["step with s"] > 0 and rows[0]["GB from NVMe per step"] > 0


def test_planning(tmp_path) -> None:
    line = "--blocks 50 100 --repeats 1 --out out.json"
    rows = run("bench_planning.py", tmp_path, *line.split())["rows"]
    assert len(rows) >= 2
    for row in rows:
        figures = [value for value in row.values() if not isinstance(value, str)]
        assert figures and all(0 <= value < math.inf for value in figures), row
        assert any(value > 0 for value in figures), row


def test_mutation_check(tmp_path) -> None:
    """Only its list: a run of it runs the tests, for minutes."""
    assert len(output("mutation_check.py", tmp_path, "--list").splitlines()) > 1
