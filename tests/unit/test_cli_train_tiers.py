"""``tiermem train`` with the real manager: small, all three tiers, all options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tiermem import cli
from tiermem.runtime.metrics.timeline import Timeline

SMALL = (
    "train --layers 12 --width 32 --heads 2 --context 16 --batch 2 --steps 3 --device cpu --quiet"
).split()


def _train(tmp_path, *more: str) -> dict:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        if more:  # a picture takes as long as a run; that of the plain run is drawn
            patch.setattr(Timeline, "picture", lambda *_args, **_options: None)
        assert cli.main([*SMALL, "--out", str(out), "--nvme", str(tmp_path), *more]) == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out"}, left
    return json.loads((out / "report.json").read_text())


def test_three_tiers_and_the_same_bits(tmp_path) -> None:
    report = _train(tmp_path)
    assert report["equal"] is True
    stats = report["stats"]
    for link in ("dram->hbm", "hbm->dram", "nvme->hbm", "hbm->nvme"):
        assert stats["links"][link]["nbytes"] > 0, link
    for tier, peak in stats["peak"].items():
        assert 0 < peak <= stats["budget"][tier], tier
    weights = report["weight_bytes"]
    assert stats["budget"]["hbm"] == weights // 4
    assert stats["budget"]["dram"] < 4 * weights


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("--checkpointing", marks=pytest.mark.thorough),
        "--accumulate 2",
        pytest.param("--dtype bfloat16", marks=pytest.mark.thorough),
        "--policy nvme",
        "--policy params=dram,optimizer=nvme --prefetch-depth 2",
        pytest.param("--prefetch-depth 0", marks=pytest.mark.thorough),
        pytest.param("--dtype bf16 --master fp32", marks=pytest.mark.thorough),
        "--dtype bf16 --master fp32 --overlap --accumulate 2",
        "--dtype bf16 --master fp32 --overlap backward --accumulate 2 --clip 0 --checkpointing",
    ],
)
@pytest.mark.one_in(2)
def test_options_change_no_bit(tmp_path, more) -> None:
    assert _train(tmp_path, *more.split())["equal"] is True


def test_without_a_disk(tmp_path) -> None:
    out = tmp_path / "out"
    assert cli.main([*SMALL, "--out", str(out), "--nvme", "none"]) == 0
    stats = json.loads((out / "report.json").read_text())["stats"]
    assert stats["io_engine"] == "none" and stats["used"]["nvme"] == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--hbm 8KiB", "hbm"),
        ("--overlap backward", "leave --overlap out"),
        ("--clip -1", "--clip"),
        ("--dram 1MiB --nvme none", "dram"),
        ("--nvme /nowhere/at/all", "/nowhere/at/all"),
        ("--nvme-bytes 64KiB", "nvme"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, capsys, more, said) -> None:
    line = [*SMALL, "--out", str(tmp_path / "out"), "--nvme", str(tmp_path)]
    if "--nvme " in more:
        line = line[:-2]
    assert cli.main([*line, *more.split()]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path) -> None:
    line = [sys.executable, "-m", "tiermem", *SMALL, "--steps", "100000"]
    line += ["--out", str(tmp_path / "out"), "--nvme", str(tmp_path)]
    line.remove("--quiet")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()  # it has started, and speaks before the first step
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.strip().endswith("interrupted") and "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} <= {"out"}


@pytest.mark.parametrize("home", ["dram", "nvme"])
@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param("--checkpointing", marks=pytest.mark.thorough),
        "--loss-chunks 3 --activation-layers 5",
    ],
)
@pytest.mark.one_in(2)
def test_activations_below_hbm(tmp_path, home, more) -> None:
    line = f"--layers 24 --activations {home} --activation-min 4KiB --context 32 {more}"
    report = _train(tmp_path, *line.split())
    assert report["equal"] is True
    found = report["stats"]["activations"]
    assert found["offloaded"] > 0 and found["fetched_ahead"] > 0 and found["used"] == 0
    assert report["settings"]["loss_chunks"] == (3 if "chunks" in more else 0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--loss-chunks -1", "--loss-chunks"),
        ("--activation-layers few", "--activation-layers"),
        ("--activation-min -1", "--activation-min"),
    ],
)
def test_bad_options_of_activations_are_one_line(tmp_path, capsys, more, said) -> None:
    line = [*SMALL, "--out", str(tmp_path / "out"), "--nvme", str(tmp_path), *more.split()]
    assert cli.main(line) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err


@pytest.mark.parametrize("side", ["host", "both"])
@pytest.mark.one_in(2)
def test_steps_on_the_host(tmp_path, side) -> None:
    policy = "--dram 16MiB --policy dram".split()
    report = _train(
        tmp_path, "--optimizer-on", side, "--dtype", "bf16", "--master", "fp32", *policy
    )
    assert report["equal"] is None
    for mine, theirs in zip(report["tiered"]["losses"], report["resident"]["losses"], strict=True):
        assert abs(mine - theirs) < 0.05 * theirs
    assert set(report["roles"]) >= {"param", "grad", "master", "optimizer"}
    assert all(set(homes) == {"dram"} for homes in report["roles"].values())
