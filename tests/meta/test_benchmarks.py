"""Every benchmark runs on the CPU with small sizes and leaves figures that make sense."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support_scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SECONDS = 280
"""Of processor time, for a script."""

pytestmark = pytest.mark.timeout(1800)  # for what hangs, however loaded the machine is

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)


def output(script: str, folder: Path, *arguments: str) -> str:
    """Runs a script of benchmarks/ from a folder of its own; returns what it prints."""
    path = BENCHMARKS / script
    if not path.exists():
        pytest.skip(f"there is no {script}")
    return run_script(path, arguments, folder, SECONDS)


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


@pytest.mark.thorough
def test_hooks(tmp_path) -> None:
    line = "--layers 4 --width 16 --repeats 5 --depths 2 4 --out out.json"
    found = run("bench_hooks.py", tmp_path, *line.split())
    rows = check_rows(found, "us per layer (median)")
    # The hooks' own time is a difference of two, and may come out below zero once.
    assert all(math.isfinite(rows[0][f"us {name}"]) for name in ("(min)", "(max)"))
    assert found["machine"]["torch"] and (tmp_path / "out.md").read_text().startswith("# ")


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_swapfile(tmp_path) -> None:
    line = "--size 4MiB --block 1MiB --depth 2 --rounds 1 --no-fio --json out.json"
    found = run("bench_swapfile.py", tmp_path, *line.split())
    summary = found["summary"]
    assert {"engine read", "engine write", "mover read", "mover write"} <= set(summary)
    assert all(row["bytes_per_s"] > 0 for row in summary.values())
    assert len(found["rounds"]) == 1 and (tmp_path / "out.md").exists()


TINY = "--shape tiny --device cpu"
TIERS = "--hbm 300KiB --dram 8MiB --repeats 2"


def stream(folder: Path, what: str, *more: str) -> list[dict[str, Any]]:
    """Runs bench_stream.py; returns the rows of each kind of work."""
    line = f"{TINY} {TIERS} --tokens 1 32 --train-tokens 32 --new-tokens 3 --what {what}"
    output("bench_stream.py", folder, *line.split(), *more, "--out", "{what}.json")
    rows = []
    for kind in what.split():
        found = json.loads((folder / f"{kind}.json").read_text())
        assert found["what"] == kind and found["layers_nbytes"] > 0
        rows += check_rows(found, "tokens", "in HBM s", "tiermem s")
        assert (folder / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    assert all(row["equal"] and row["resident again equal"] for row in rows)
    assert all(row["GB moved"] > 0 for row in rows), "nothing was streamed"
    return rows


@needs_transformers
@pytest.mark.thorough
def test_stream(tmp_path) -> None:
    rows = stream(tmp_path, "forward half train generate")
    assert [row["tokens"] for row in rows] == [1, 32, 1, 32, 32, 3]
    assert all(0 < row["of bound"] < math.inf for row in rows[:-1])
    half = json.loads((tmp_path / "half.json").read_text())
    # Half of the layers, and what lies outside them: less than all, more than half.
    assert half["layers_nbytes"] / 2 < half["hbm"] < half["layers_nbytes"]
    per_token = rows[-1]
    assert per_token["s per token"] == pytest.approx(per_token["tiermem s"] / 3)
    assert 0 < per_token["of raw"] < math.inf


@needs_transformers
@pytest.mark.thorough
def test_stream_from_files(tmp_path) -> None:
    rows = stream(tmp_path, "train", "--nvme", ".", "--dram", "600KiB")
    assert 0 < rows[0]["of bound"] < math.inf and rows[0]["raw read of the moved s"] > 0
    assert {"O_DIRECT", "engine"} <= set(rows[0])


@needs_transformers
@pytest.mark.thorough
def test_stream_says_what_failed_and_goes_on(tmp_path) -> None:
    line = f"{TINY} --repeats 1 --tokens 8 --hbm 1KiB --dram 8MiB --what forward half --out"
    with pytest.raises(AssertionError, match="give hbm= at least"):
        output("bench_stream.py", tmp_path, *line.split(), "{what}.json")
    failed = json.loads((tmp_path / "forward.json").read_text())["rows"]
    assert failed[0]["note"].startswith("CapacityError")
    assert json.loads((tmp_path / "half.json").read_text())["rows"][0]["equal"]


TRAIN = f"{TINY} --tokens 32 --chunks 2 --repeats 1 --steps 1 --warm 1 --raw-repeats 1"


@needs_transformers
@pytest.mark.thorough
def test_train(tmp_path) -> None:
    line = f"{TRAIN} --micro 1 2 --adam-elements 1024 --where both --profile p.txt --out out.json"
    found = run("bench_train.py", tmp_path, *line.split())
    columns = ("resident s", "tiermem s", "of resident", "of bound", "raw both ways s")
    rows = check_rows(found, *columns, "host AdamW s", "host's share", "host RSS GB")
    assert [row["micro"] for row in rows] == [1, 2]
    for row in rows:  # all of it moves: weights, gradients, masters and states
        assert row["GB dram->hbm"] * 1e9 > 2 * row["parameters"]
        assert row["of resident"] == pytest.approx(row["resident s"] / row["tiermem s"])
    assert "aten::" in (tmp_path / "p.txt").read_text()


@needs_transformers
@pytest.mark.thorough
@pytest.mark.parametrize("overlap", [["--overlap", "backward"], ["--no-overlap"]])
def test_train_with_each_overlap(tmp_path, overlap) -> None:
    line = f"{TRAIN} --micro 2 --check-steps 3 --out out.json"
    row = run("bench_train.py", tmp_path, *line.split(), *overlap)["rows"][0]
    assert row["equal"] is True
    expected = {"--no-overlap": False, "--overlap": overlap[-1].replace("--overlap", "forward")}
    assert row["overlap"] == expected[overlap[0]]


@needs_transformers
@pytest.mark.thorough
def test_train_gives_the_bits_of_the_resident_run(tmp_path) -> None:
    line = f"{TRAIN} --micro 2 --grad-dtype fp32 --check-steps 3 --raw-repeats 1 --out out.json"
    columns = ("resident s", "tiermem s", "of resident", "of bound", "raw both ways s")
    row = check_rows(run("bench_train.py", tmp_path, *line.split()), *columns)[0]
    assert row["equal"] is True and row["weights that differ"] == 0
    # all of it moves: weights, gradients, masters and states
    assert row["GB dram->hbm"] * 1e9 > 2 * row["parameters"]


@needs_transformers
@pytest.mark.thorough
def test_train_from_files(tmp_path) -> None:
    line = f"{TRAIN} --nvme . --staging 700KiB --scratch 4MiB --out out.json"
    row = check_rows(run("bench_train.py", tmp_path, *line.split()), "of bound", "raw mix s")[0]
    assert row["equal"] is True and row["GB to disk"] > 0 and row["GB from disk"] > 0


@needs_transformers
@pytest.mark.thorough
def test_train_capped(tmp_path) -> None:
    line = f"{TRAIN} --what capped --micro 2 --out out.json"
    row = check_rows(run("bench_train.py", tmp_path, *line.split()), "of resident")[0]
    assert row["equal"] is True and "bits" not in row


@needs_transformers
@pytest.mark.thorough
def test_train_with_activations_below(tmp_path) -> None:
    line = f"{TRAIN} --what residual saved --activation-min 4KiB --dram 16MiB --layers 2 4"
    output("bench_train.py", tmp_path, *line.split(), "--out", "{what}.json")
    saved = []
    for what in ("residual", "saved"):
        found = json.loads((tmp_path / f"{what}.json").read_text())
        rows = check_rows(found, "of resident", "of bound", "GB saved below")
        assert [row["layers"] for row in rows] == [2, 4]
        assert all(row["equal"] and row["kept"] == 0 for row in rows)
        saved.append(rows[1]["GB saved below"])
    assert saved[1] > 3 * saved[0], "without recomputation more is saved"


@needs_transformers
@pytest.mark.thorough
def test_train_keeps_a_row_as_soon_as_it_has_times(tmp_path) -> None:
    """Whatever comes after that fails here, as no raw copy is timed."""
    line = f"{TRAIN} --what residual --activation-min 4KiB --dram 16MiB --layers 2 --raw-repeats 0"
    with pytest.raises(AssertionError, match="StatisticsError"):
        output("bench_train.py", tmp_path, *line.split(), "--out", "out.json")
    row, failed = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["of resident"] > 0 and row["GB saved below"] > 0 and "of bound" not in row
    assert failed["note"].startswith("StatisticsError")


@needs_transformers
@pytest.mark.thorough
def test_train_peers(tmp_path) -> None:
    found = run("bench_train.py", tmp_path, *f"{TRAIN} --what peers --out out.json".split())
    rows = check_rows(found, "s", "first loss")
    assert rows[0]["what"] == "tiermem" and len(rows) == 4
    assert all("s" in row or row["note"] for row in rows)
    if find_spec("deepspeed") is None:
        assert rows[-1] == {"what": "DeepSpeed ZeRO-3", "note": "not installed: deepspeed"}


@pytest.mark.thorough
def test_save(tmp_path) -> None:
    found = run("bench_save.py", tmp_path, *"--device cpu --quick --out out.json".split())
    rows = {row["what"]: row for row in check_rows(found, "s", "of raw", "call s", "of its speed")}
    saves = {"raw write", "tiermem save", "torch save", "dcp save"}
    loads = {"raw read", "tiermem load", "torch load", "dcp load"}
    assert set(rows) == saves | loads | {"steps while saving", "steps while saving again"}
    assert rows["raw write"]["of raw"] == 1 and rows["steps while saving"]["steps while saving"] > 0
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.thorough
def test_losses(tmp_path) -> None:
    line = "--layers 2 --width 64 --context 32 --steps 3 --out out.json"
    found = run("bench_losses.py", tmp_path, *line.split())
    rows = {row["run"]: row for row in check_rows(found, "last loss", "s per step")}
    assert len(rows) == len(found["losses"]) == 5
    exact = [row for name, row in rows.items() if "on the host" not in name]
    assert all(row["largest difference"] == 0 and row["weights"] == "equal" for row in exact)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@needs_transformers
@pytest.mark.parametrize(
    ("where", "raw"),
    [
        ("", "raw, all layers once"),
        pytest.param("--half", "raw, half of the layers once", marks=pytest.mark.thorough),
        pytest.param("--nvme .", None, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_peers(tmp_path, where: str, raw: str | None) -> None:
    line = f"{TINY} {TIERS} --warm 1 --tokens 8 --train-tokens 8 --new-tokens 2 {where}"
    peers = ["accelerate offload", "diffusers group offloading"]  # FSDP2 would want a port
    only = ["--only", "tiermem", *peers, "--out", "out.json"]
    found = run("peers.py", tmp_path, *line.split(), *only)
    columns = ("8 tokens s", "2 generated s", "8 with backward s")
    rows = {row["what"]: row for row in check_rows(found, *columns, "8 tokens of bound")}
    bound = raw or "raw, all layers once"
    assert set(rows) == {"everything in HBM", bound, "tiermem", *peers}
    mine = rows["tiermem"]
    assert mine["equal"] is True and "note" not in mine
    assert all(column in mine for column in columns)
    needed = max(rows[bound]["8 tokens s"], rows["everything in HBM"]["8 tokens s"])
    assert mine["8 tokens of bound"] == pytest.approx(needed / mine["8 tokens s"])
    # A peer that is not installed, or fails, says so instead of figures.
    assert all("note" in rows[peer] or columns[0] in rows[peer] for peer in peers)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_evicting_leaves_files_to_the_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from pagecache import evict, is_cached

    system = subprocess.check_output(["stat", "-f", "-c", "%T", str(tmp_path)], text=True).strip()
    if not system.startswith(("ext", "xfs")):
        pytest.skip(f"{system} need not have the page cache that this empties")
    folder = tmp_path / "deep"
    folder.mkdir()

    def leaves(number: int) -> bool:
        """Whether new files go; now and then the kernel has pages of one on a list of its own."""
        paths = [folder / f"{name}{number}" for name in ("first", "second")]
        for path in paths:
            path.write_bytes(os.urandom(1 << 20))  # not written to the disk yet
        assert all(map(is_cached, paths))
        evict(tmp_path)
        return not any(map(is_cached, paths))

    assert any(map(leaves, range(8)))
    assert {path.stat().st_size for path in folder.iterdir()} == {1 << 20}


@needs_transformers
@pytest.mark.parametrize("model", ["encoder"])
@pytest.mark.thorough
def test_memory(tmp_path, model: str) -> None:
    line = "--shape tiny --device cpu --hbm 1MiB --dram 8MiB --steps 1 --tokens 8 --out out.json"
    line += f" --model {model}"
    rows = check_rows(run("bench_memory.py", tmp_path, *line.split()), "rss MiB", "private MiB")
    assert [row["process"] for row in rows] == ["torch", "resident", "tiered"]
    tiered = rows[-1]
    beyond = tiered["rss MiB"] - rows[0]["rss MiB"] - 8
    assert tiered["beyond torch MiB"] == pytest.approx(beyond)


@needs_transformers
@pytest.mark.thorough
def test_host_time(tmp_path) -> None:
    line = "--shape tiny --device cpu --repeats 3 --out out.json"
    rows = run("bench_host.py", tmp_path, *line.split())["rows"]
    streamed, resident = (row for row in rows if not row["what"].startswith(" "))
    # A difference of two times; which is the larger is not for a test to say.
    assert math.isfinite(streamed["us per block"]) and math.isfinite(resident["us per block"])
    assert streamed["copies per forward"] > 0 and resident["copies per forward"] == 0
    parts = {row["what"].strip() for row in rows if row["what"].startswith(" ")}
    assert {"Acquirer.decide", "Transfers.fill", "HostCopyEngine.up"} <= parts


@pytest.mark.thorough
def test_calls(tmp_path) -> None:
    line = "layers --device cpu --set tiny --tokens 1 --calls 3 --out out.json"
    (row,) = check_rows(run("bench_calls.py", tmp_path, *line.split()), "GB", "raw ms", "in HBM ms")
    assert "measured" in row["call 1"] and "measured" not in row["call 3"]
    assert row["equal"] is True and row["later"] > 0 and row["first of later"] > 0


@pytest.mark.thorough
def test_rounds(tmp_path) -> None:
    line = "layers --device cpu --set tiny --tokens 8 --micro-batches 2 --rounds 3 --out out.json"
    (row,) = check_rows(run("bench_rounds.py", tmp_path, *line.split()), "GB", "in HBM ms, last")
    assert row["equal"] is True and row["backwards"] == 2
    assert all(" up, " in row[f"round {number}"] for number in (1, 2, 3))


@pytest.mark.thorough
def test_phases(tmp_path) -> None:
    line = "layers --device cpu --set tiny --tokens 8 --warm 1 --steps 2 --out out.json"
    found = run("bench_phases.py", tmp_path, *line.split())
    plain, tiered = check_rows(found, "GB", "whole ms", "forward ms", "step ms")
    assert (plain["how"], tiered["how"]) == ("plain", "tiermem")
    parts = sum(tiered[f"{phase} ms"] for phase in ("forward", "backward", "step"))
    assert 0 < parts < 2 * tiered["whole ms"]


@pytest.mark.thorough
def test_replicas(tmp_path) -> None:
    line = "layers --device cpu --set tiny --tokens 8 --warm 1 --steps 2 --out out.json"
    (row,) = check_rows(run("bench_replicas.py", tmp_path, *line.split()), "GB", "of resident")
    assert row["equal"] is True and row["processes"] == 2


@needs_transformers
@pytest.mark.thorough
@pytest.mark.parametrize("only", ["amp", ""])
def test_usual_scripts(only: str, tmp_path) -> None:
    line = "--device cpu --set tiny --steps 1 --warm 2 --out out.json"
    rows = run("bench_scripts.py", tmp_path, *line.split(), "--only", only)["rows"]
    assert {"gpt2 amp", "gpt2 amp half"} <= {row["script"] for row in rows}
    check_rows({"rows": rows}, "GB", "plain ms", "tiermem ms", "of plain", "medians")


@pytest.mark.thorough
def test_calls_go_on_where_a_model_fails(tmp_path) -> None:
    line = "lstm layers --device cpu --set tiny --tokens 0 --calls 1 --out out.json"
    failed, row = run("bench_calls.py", tmp_path, *line.split())["rows"]
    assert failed["model"] == "lstm" and failed["note"].startswith("ZeroDivisionError")
    assert row["model"] == "layers" and row["equal"] is True and "later" not in row


def test_rows_that_a_model_gave_before_it_failed_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common import rows_of

    def measure(name):
        yield {"model": name, "tokens": 1}
        if name == "first":
            raise ZeroDivisionError
        yield {"model": name, "tokens": 2}

    after = []
    rows = rows_of(["first", "second"], measure, lambda: after.append(len(after)))
    assert [(row["model"], row.get("tokens")) for row in rows] == [
        ("first", 1), ("first", None), ("second", 1), ("second", 2),
    ]  # fmt: skip
    assert rows[1]["note"].startswith("ZeroDivisionError") and after == [0, 1]


def test_bits_of_calls_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_calls import same_bits

    nan, one = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0])
    assert same_bits(nan, nan.clone()) and same_bits(one, one.clone())
    assert not same_bits(nan, one) and not same_bits(nan, torch.tensor([math.nan, 2.0]))
    assert not same_bits(nan, torch.tensor([0.0, 1.0])), "NaN is not what stands in for it"


@needs_transformers
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_more_kinds_of_the_zoo_are_built_and_run(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from zoo import KINDS
    from zoo_kind import Draw, first_of
    from zoo_more import MORE

    device = torch.device("cpu")
    assert MORE.items() <= KINDS.items() and len(MORE) > 18
    for name, kind in [*MORE.items()][::every]:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # transformers' own
            model = kind.build("tiny", device)
            found = first_of(model(**kind.given(model, 1, Draw(device, 1), False)))
        assert kind.apart and found.numel() and found.isfinite().all(), name
        wide = [part for part, p in model.named_parameters() if p.dtype != torch.bfloat16]
        assert all("gate" in part for part in wide), name  # transformers 5.24: some routers
        if kind.experts:
            assert any(kind.experts[2] in part for part, _ in model.named_parameters()), name


@pytest.mark.thorough
def test_bound(tmp_path) -> None:
    (row,) = check_rows(
        run("bench_bound.py", tmp_path, "layers", "--out", "out.json"), "ms", "uses"
    )
    assert 0.8 < row["raw ms"] / row["ms"] < 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="it compiles what stands for the driver")
def test_uses(tmp_path) -> None:
    """The copies go through CUDA's engine; the bits are those of the plain model."""
    line = "layers --repeats 2 --warm 6 --calls --lines 90"
    found = output("bench_uses.py", tmp_path, *line.split())
    assert re.search(r"layers: uses 120, copies [1-9]\d*, misses 0; ", found)
    assert "BITS DIFFER" not in found
    assert "2 of 2 passes replayed" in found and "transfer/driver.py:copy_behind" in found


@pytest.mark.skipif(shutil.which("cc") is None, reason="it compiles what stands for the driver")
@pytest.mark.thorough
def test_steps(tmp_path) -> None:
    """Where compute binds, copies up that wait for all of it take longer."""
    line = "layers --computes 0.15+0.4 --steps 6 --out out.json"
    (row,) = check_rows(run("bench_steps.py", tmp_path, *line.split()), "step ms", "up, weights")
    (late,) = check_rows(
        run("bench_steps.py", tmp_path, *line.split(), "--wait-for-compute"), "step ms"
    )
    assert row["computes ms"] < row["step ms"] < late["step ms"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="it compiles what stands for the driver")
@pytest.mark.thorough
def test_steps_of_masters(tmp_path) -> None:
    """Where compute binds, steps in the next forward take longer than inside backward."""
    line = "layers --masters --computes 0.15+0.4 --steps 8 --out out.json"
    (inside,) = check_rows(run("bench_steps.py", tmp_path, *line.split()), "step ms")
    (later,) = check_rows(
        run("bench_steps.py", tmp_path, *line.split(), "--overlap", "forward"), "step ms"
    )
    assert inside["step ms"] < later["step ms"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="it compiles what stands for the driver")
@pytest.mark.thorough
def test_steps_of_stacked_experts(tmp_path) -> None:
    """They are link-bound: a step takes as long as the copies of at least what cannot stay."""
    line = "experts --computes 0.045+0.09 --steps 6 --out out.json"
    (row,) = check_rows(run("bench_steps.py", tmp_path, *line.split()), "step ms", "up, weights")
    assert row["computes ms"] < row["busiest link ms"] < row["step ms"]
    assert row["up, weights"] >= 3 and row["down, weights"] >= 3


@pytest.mark.skipif(shutil.which("cc") is None, reason="it compiles what stands for the driver")
@pytest.mark.thorough
def test_walks(tmp_path) -> None:
    found = output("count_walks.py", tmp_path, "--lines", "1", "--json", "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["what"].split(",")[0] for row in rows] == ["miss", "miss", "replayed use", "step"]
    assert all(1 < row["files"] <= row["changes"] <= row["most changes"] for row in rows)
    assert " -> " in found


_ZERO = (
    "--device cpu --shape tiny --tokens 32 --chunks 2 --repeats 1 --steps 1 --warm 2 "
    "--what tiermem plain --out out.json"
)


@needs_transformers
@pytest.mark.thorough
def test_zero_infinity(tmp_path) -> None:
    """From files; DeepSpeed says that it is not installed."""
    line = f"{_ZERO} --nvme .".replace("plain", "plain deepspeed")
    found = run("bench_zero_infinity.py", tmp_path, *line.split())
    rows = check_rows(found, "32 tokens s", "host RSS GB", "32 tokens, times as fast as plain")
    assert [row["kind"] for row in rows] == ["tiermem", "plain", "deepspeed"]
    assert rows[0]["losses equal plain's"] is True
    assert rows[0]["peak nvme GB"] > 0
    if find_spec("deepspeed") is None:
        assert "deepspeed" in rows[2]["failed"]


@needs_transformers
@pytest.mark.thorough
def test_zero_infinity_with_a_file(tmp_path) -> None:
    """A project's file, its own "auto" filled."""
    below = {"device": "cpu", "pin_memory": True}
    file = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "offload_param": below, "offload_optimizer": below},
    }
    (tmp_path / "zero3.json").write_text(json.dumps(file))
    line = f"{_ZERO} --config zero3.json --hbm 1MiB"
    rows = run("bench_zero_infinity.py", tmp_path, *line.split())["rows"]
    assert [row["kind"] for row in rows] == ["tiermem", "plain"]
    assert rows[0]["losses equal plain's"] is True


@needs_transformers
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
@pytest.mark.thorough
def test_trainers(tmp_path) -> None:
    line = "--device cpu --shape tiny --tokens 32 --chunks 2 --warm 2 --steps 2 --profiled 1"
    line += " --hbm 300KiB --dram 16MiB --out out.json"
    found = run("bench_trainers.py", tmp_path, *line.split())
    rows = check_rows(found, "s", "of bare", "GB moved a step")
    assert [row["loop"] for row in rows] == ["bare", "bare-looks", "Trainer", "Lightning"]
    assert all(row["losses equal"] is True for row in rows)
    assert all(0 <= row["integration's share"] < 1 for row in rows)


@needs_transformers
@pytest.mark.thorough
def test_checkpoint(tmp_path) -> None:
    line = "--folder model --device cpu --shape tiny --tokens 4 --hbm 512KiB --dram 16MiB"
    line += " --roomy 64MiB --lora-dram 16MiB --warm 1 --repeats 1 --out out.json"
    line += " --what first disk dram lora lora_disk"
    rows = run("bench_checkpoint.py", tmp_path, *line.split())["rows"]
    assert [row["what"].split(",")[0] for row in rows] == [
        "first logits",
        "from disk",
        "from DRAM",
        "LoRA step",
        "LoRA step",
    ]
    assert all(row["s"] > 0 for row in rows)


@pytest.mark.thorough
def test_diffusers(tmp_path) -> None:
    line = "--device cpu --tiny --dram 16MiB --steps 1 --repeats 1 --group --out out.json"
    rows = check_rows(run("bench_diffusers.py", tmp_path, *line.split()), "s", "of bound")
    names = ["in HBM", "raw copy of what does not fit", "tiermem", "diffusers group offloading"]
    assert [row["what"] for row in rows] == names
    assert rows[2]["equal"] is True and rows[2]["GB moved"] > 0
    if find_spec("diffusers") is None:
        assert rows[3]["note"] == "not installed: diffusers"


def test_zoo(tmp_path) -> None:
    line = "--device cpu --set tiny --tokens 8 --train-tokens 8 --repeats 1 --steps 1"
    line += " --raw-nbytes 1000000 --only layers vit_h_14 --out out.json"
    rows = check_rows(run("bench_zoo.py", tmp_path, *line.split()), "GB", "raw s", "of bound")
    mine = [row for row in rows if row["model"] == "layers"]
    assert [row["what"] for row in mine] == ["forward", "train"]
    assert all(row["equal"] is True and row["GB moved"] > 0 for row in mine)
    bound = [max(row["in HBM s"], row["raw s"]) / row["tiermem s"] for row in mine]
    assert bound == pytest.approx([row["of bound"] for row in mine])
    if find_spec("torchvision") is None:  # one that fails keeps no other from its rows
        assert {row["note"] for row in rows[2:]} == {"not installed: torchvision"}


@needs_transformers
@pytest.mark.thorough
def test_run_gpu(tmp_path) -> None:
    line = "--small --only host --folder . --results found --name x"
    output("run_gpu.py", tmp_path, *line.split())
    found = json.loads((tmp_path / "found" / "required_x.json").read_text())
    assert [step["ended"] for step in found["steps"]] == ["exit 0"]
    reached = {row["work"]: row["reached"] for row in found["rows"]}
    assert isinstance(reached["host time per block, streamed, us"], float)
    assert reached["forward, DRAM, 1 tokens"] == "not measured"
    assert str(ROOT) not in json.dumps(found) + (tmp_path / "found" / "host_x.md").read_text()


@needs_transformers
@pytest.mark.thorough
def test_run_gpu_of_training(tmp_path) -> None:
    line = "--small --group train --only train-16k --folder . --results found --name x"
    output("run_gpu.py", tmp_path, *line.split())
    found = json.loads((tmp_path / "found" / "required_train_x.json").read_text())
    assert [step["ended"] for step in found["steps"]] == ["exit 0"]
    reached = {row["work"]: row["reached"] for row in found["rows"]}
    assert isinstance(reached["3.02 B, 16384 tokens, 4 GiB of HBM, 4 micro-batches"], float)
    assert reached["bits as resident, share of rows"] == "not measured", "the host rounds otherwise"
    assert reached["every saved tensor to DRAM, of the bound"] == "not measured"


@pytest.mark.thorough
def test_run_gpu_stops_what_takes_too_long(tmp_path) -> None:
    line = "--small --only host --results found --seconds 0.01"
    with pytest.raises(AssertionError, match="stopped after"):
        output("run_gpu.py", tmp_path, *line.split())
    assert (tmp_path / "found" / "required_gpu.json").exists()


@pytest.mark.thorough
def test_profile_of_the_host(tmp_path) -> None:
    line = "--device cpu --layers 16 --width 1024 --repeats 2 --lines 3"
    found = re.search(r"([0-9.]+) us per block", output("profile_host.py", tmp_path, *line.split()))
    assert found is not None and float(found[1]) > 0


@pytest.mark.thorough
def test_checksum(tmp_path) -> None:
    line = "--layers 6 --width 128 --batch 4 --dram 16MiB --rounds 2 --out out.json"
    rows = run("bench_checksum.py", tmp_path, *line.split())["rows"]
    assert rows[0]["step with s"] > 0 and rows[0]["GB from NVMe per step"] > 0


@pytest.mark.thorough
def test_codec(tmp_path) -> None:
    line = "--size 1MiB --repeats 1 --profile none --out out.json"
    rows = check_rows(run("bench_codec.py", tmp_path, *line.split()), "ratio", "pack, 1 thread")
    kinds = ["weights, bfloat16", "exp_avg (simulated)", "exp_avg_sq (simulated)"]
    assert [row["what"] for row in rows] == kinds
    assert all(row["read: GB/s"] == 3 for row in rows)


@pytest.mark.thorough
def test_planning(tmp_path) -> None:
    line = "--blocks 50 100 --repeats 1 --out out.json"
    rows = run("bench_planning.py", tmp_path, *line.split())["rows"]
    assert len(rows) >= 2
    for row in rows:
        figures = [value for value in row.values() if not isinstance(value, str)]
        assert figures and all(0 <= value < math.inf for value in figures), row
        assert any(value > 0 for value in figures), row


@pytest.mark.thorough
def test_mutation_check(tmp_path) -> None:
    """Only its list: a run of it runs the tests, for minutes."""
    assert len(output("mutation_check.py", tmp_path, "--list").splitlines()) > 1


def test_the_index_names_every_script_and_every_result_once() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(results/([^)]+)\)", text)
    assert sorted(linked) == sorted(p.name for p in (BENCHMARKS / "results").glob("*.md"))
    scripts = [p.name for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text()]
    assert [name for name in scripts if f"`{name}" not in text] == []
