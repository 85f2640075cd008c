"""The quick measurements, and the profile they leave."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file

from tiermem import cli
from tiermem.cli import disks, measured
from tiermem.cli.links import MemoryLinks
from tiermem.cli.measured import Measurement, _draw_disks, picture, rounds
from tiermem.runtime.metrics import machine_profile as profile

MEMORY = ["bench", "--nvme", "none", "--size", "1MiB", "--repeat", "1", "--device", "cpu"]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def saved(tmp_path, monkeypatch):
    """Keeps the profile of the user who runs the tests out of it."""
    path = tmp_path / "cache" / "profile.json"
    monkeypatch.setenv(profile.VARIABLE, str(path))
    return path


def test_memory(saved, capsys) -> None:
    assert cli.main(MEMORY) == 0
    out = capsys.readouterr().out
    assert "dram->hbm" in out and f"saved as {saved}" in out
    assert cli.main([*MEMORY, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["link"] for row in rows] == ["dram->hbm", "hbm->dram", "dram->dram"] * 2
    assert {row["nbytes"] for row in rows} == {64 << 10, 1 << 20}
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_both_ways_at_once_without_a_gpu() -> None:
    with MemoryLinks("cpu", 64 << 10) as links:
        assert links.both(64 << 10) > 0


def test_disks(tmp_path, capsys) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    line = ["bench", "--nvme", str(folder), "--size", "9MiB", "--repeat", "1", "--device", "cpu"]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [row for row in found["results"] if "nvme" in row["link"]]
    assert [row["link"] for row in rows] == ["nvme->hbm", "hbm->nvme", "nvme<->hbm"]
    assert all(row["gb_per_s"] > 0 and "checksums" in row["note"] for row in rows)
    tried = {(row["chunk"], row["depth"]) for row in found["sweep"]}
    assert (rows[0]["chunk"], rows[0]["depth"]) in tried
    assert list(folder.iterdir()) == []


def test_the_profile_has_what_was_measured(tmp_path, saved, capsys) -> None:
    line = ["bench", "--nvme", str(tmp_path), "--size", "2MiB", "--repeat", "1", "--device", "cpu"]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = {row["link"]: row["bytes_per_s"] for row in found["results"]}  # the largest is last
    loaded = profile.load(saved).profile
    assert loaded is not None and found["saved"] == str(saved)
    assert loaded.device == "cpu" and loaded.folders == (str(tmp_path),)
    assert (loaded.h2d, loaded.d2h) == (rates["dram->hbm"], rates["hbm->dram"])
    assert (loaded.duplex, loaded.d2d) == (None, None)
    assert loaded.host_copy == rates["dram->dram"]
    assert (loaded.nvme_read, loaded.nvme_write) == (rates["nvme->hbm"], rates["hbm->nvme"])
    assert loaded.nvme_mixed == rates["nvme<->hbm"]
    assert loaded.nvme_chunk in (1 << 20, 2 << 20) and loaded.nvme_depth in disks.DEPTHS
    assert [size for size, _ in loaded.h2d_by_size] == [64 << 10, 1 << 20, 2 << 20]
    assert loaded.h2d_by_size[-1][1] == loaded.h2d


def test_not_saved_on_demand(saved, capsys) -> None:
    assert cli.main([*MEMORY, "--no-save"]) == 0
    assert "saved" not in capsys.readouterr().out and not saved.exists()


def test_saved_where_nothing_can_be(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "file" / "profile.json"))
    assert cli.main(MEMORY) == 2
    assert "--no-save" in capsys.readouterr().err


def test_picture(tmp_path, capsys) -> None:
    path = tmp_path / "links.png"
    line = ["bench", "--nvme", str(tmp_path), "--size", "1MiB", "--repeat", "1", "--device", "cpu"]
    assert cli.main([*line, "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(PNG)
    assert cli.main([*MEMORY, "--picture", str(tmp_path / "no" / "links.png")]) == 2
    assert "--picture" in capsys.readouterr().err


def test_lines_of_a_disk_can_be_told_apart() -> None:
    rows = [
        Measurement("nvme->dram", how, 1 << 20, 1e9, 1e9, 1e9, chunk=chunk << 20, depth=depth)
        for how in ("mover, uring", "raw")
        for chunk in (1, 4, 8)
        for depth in (1, 8)
    ]
    axis = Figure().subplots()
    _draw_disks(axis, rows)
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axis.lines]
    assert len(set(looks)) == 6
    of_one_kind = [
        look
        for look, line in zip(looks, axis.lines, strict=True)
        if line.get_label().startswith("mover")
    ]
    assert len({color for color, _, _ in of_one_kind}) == 3
    assert len({marker for _, marker, _ in of_one_kind}) == 3


def test_picture_without_anything(tmp_path) -> None:
    picture([], tmp_path / "empty.png", "nothing")
    assert (tmp_path / "empty.png").read_bytes().startswith(PNG)


def plan(capsys, *more: str) -> dict[str, Any]:
    """Returns what ``tiermem plan`` says."""
    line = ["plan", "--params", "7B", "--hbm", "10GiB", "--dram", "16GiB", "--nvme-bytes", "99GiB"]
    assert cli.main([*line, "--json", *more]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_plan_takes_the_measured_speeds(saved, tmp_path, monkeypatch, capsys) -> None:
    usual = plan(capsys, "--profile", "none")
    assert set(usual["speeds"].values()) == {"not measured: of the reference machine"}
    assert plan(capsys) == usual
    gpu = profile.MachineProfile(
        "GPU", "2026-11-21", "1", "2", h2d=55e9, d2h=27.5e9, nvme_read=1e9, nvme_write=2e9
    )
    profile.save(gpu)
    assert plan(capsys) == usual  # of another machine's device
    monkeypatch.setattr(profile, "device_name", lambda: "GPU")
    found = plan(capsys)
    assert set(found["speeds"].values()) == {f"measured 2026-11-21, {saved}"}
    for way in ("up", "down"):
        seconds = 2 * usual["seconds"][f"host link, {way}"]
        assert found["seconds"][f"host link, {way}"] == pytest.approx(seconds)
    traffic = found["traffic"]
    disks = traffic["nvme->hbm"] / 1e9 + traffic["hbm->nvme"] / 2e9
    assert found["seconds"]["disks"] == pytest.approx(disks) and disks > 0
    given = plan(capsys, "--link-gbps", "55", "--read-gbps", "3", "--write-gbps", "3")
    assert given["seconds"] == usual["seconds"]
    assert given["speeds"] == {link: f"--{link}-gbps" for link in ("link", "read", "write")}
    monkeypatch.undo()
    assert plan(capsys, "--profile", str(saved)) == found  # named, it may be of any device


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_plan_takes_only_the_disks_of_a_machine_without_gpu(saved, capsys) -> None:
    profile.save(profile.MachineProfile("cpu", "2026-11-21", "1", "2", h2d=1e9, nvme_read=1e9))
    found = plan(capsys)["speeds"]
    assert found["read"].startswith("measured")
    assert {found["link"], found["write"]} == {"not measured: of the reference machine"}
    line = ["plan", "--params", "7B", "--hbm", "10GiB", "--dram", "64GiB"]
    assert cli.main(line) == 0
    assert f"read: 1 GB/s (measured 2026-11-21, {saved})" in capsys.readouterr().out


def test_plan_with_a_profile_that_is_not_there(tmp_path, capsys) -> None:
    line = ["plan", "--params", "7B", "--hbm", "10GiB", "--dram", "64GiB"]
    assert cli.main([*line, "--profile", str(tmp_path / "none.json")]) == 2
    assert "--profile: there is no" in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path, saved, capsys) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["bench", "--nvme", missing, "--size", "4KiB", "--device", "cpu"]) == 2
    assert "missing does not exist" in capsys.readouterr().err
    assert not saved.exists()


def test_rounds_take_turns_and_stop_in_time(monkeypatch) -> None:
    calls: list[str] = []
    now = iter(range(1, 100))
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(now))

    def timed(name):
        return lambda: calls.append(name) or float(len(calls))

    timers = {"a": timed("a"), "b": timed("b")}
    assert rounds(timers, 2) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}  # a round before warms up
    assert calls == ["a", "b"] * 3
    calls.clear()
    assert rounds(timers, 5, until=1) == {"a": [3.0, 5.0], "b": [4.0]}
    calls.clear()
    assert rounds(timers, 5, until=0) == {"a": [3.0], "b": [4.0]}


def test_median_of_rates() -> None:
    found = Measurement.of("dram->hbm", "page-locked", 100, [1.0, 2.0, 50.0])
    assert (found.bytes_per_s, found.least, found.most) == (50.0, 2.0, 100.0)


def test_best_is_the_least_staging_that_is_as_fast() -> None:
    def read(rate: float, chunk: int, depth: int, link: str = "nvme->hbm") -> Measurement:
        return Measurement.of(link, "mover", int(rate), [1.0], chunk=chunk, depth=depth)

    small, large = read(980, 4, 8), read(1000, 8, 16)
    assert disks.best([large, small, read(900, 1, 1), read(2000, 1, 4, "hbm->nvme")]) is small
    assert disks.best([large, read(960, 4, 8)]) is large
    assert disks.best([read(1000, 8, 4), few := read(1000, 4, 8)]) is few


def test_sweep_stops_in_time_but_not_before_the_first(tmp_path) -> None:
    found = disks.sweep([str(tmp_path)], "cpu", 64 << 10, 1, until=0.0)
    assert [(m.link, m.depth) for m in found] == [("nvme->hbm", 1), ("hbm->nvme", 1)]
    found = disks.sweep([str(tmp_path)], "cpu", 64 << 10, 1, depths=(1, 2), engine="threads")
    # Chunks larger than the file are all the same one.
    assert [(m.chunk, m.depth) for m in found[::2]] == [(64 << 10, 1), (64 << 10, 2)]
    assert {m.how for m in found} == {"mover, threads"}


@pytest.mark.gpu
def test_on_cuda(tmp_path, saved, capsys) -> None:
    line = ["bench", "--nvme", str(tmp_path), "--size", "8MiB", "--repeat", "2"]
    assert cli.main([*line, "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["profile"]
    rates = ("h2d", "d2h", "duplex", "d2d", "host_copy", "nvme_read", "nvme_write", "nvme_mixed")
    assert all(found[rate] > 0 for rate in rates)
    assert found["d2d"] > found["h2d"] and found["device"] != "cpu"


CODEC = ["bench", "--size", "1MiB", "--repeat", "1", "--profile", "none"]


def test_codec(tmp_path, saved, capsys) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(600, 500).bfloat16(), "ids": torch.arange(3), "b": torch.ones(2, 0)}
    save_file(weights, tmp_path / "model.safetensors")
    line = [*CODEC, "--codec", str(tmp_path), "--read-gbps", "0.5"]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = ["weights, bfloat16", "exp_avg (simulated)", "exp_avg_sq (simulated)"]
    assert [row["what"] for row in found["results"]] == kinds
    assert all(1 < row["ratio"] < 2 and row["pack, 1 thread"] > 0 for row in found["results"])
    evens = [row for row in found["break_even"] if row["what"] == kinds[0]]
    assert [row["link"] for row in evens] == [0.5e9, 3e9, 55e9]
    for row in evens:
        needed = row["link"] / (1 - 1 / found["results"][0]["ratio"])
        assert row["needed"] == pytest.approx(needed)
        assert (row["codec"] > needed) == (row["gain"] > 1) == (row["link"] < row["pays_below"])
    assert found["speeds"]["read"] == "--read-gbps"
    assert not saved.exists(), "no link was measured"
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in [*kinds, "pack ×1", "of the reference machine"])


def test_codec_of_states_that_were_saved(tmp_path, capsys) -> None:
    save_file({"a": torch.randn(300_000)}, tmp_path / "model.safetensors")
    states = {"a.exp_avg": torch.randn(700_000), "a.step": torch.ones(1)}
    save_file(states, tmp_path / "optimizer-00001.safetensors")
    assert cli.main([*CODEC, "--codec", str(tmp_path), "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert set(rows) == {"weights, float32", "exp_avg, float32", "state, float32"}
    assert (rows["exp_avg, float32"]["sampled"], rows["exp_avg, float32"]["of"]) == (
        "1.00 MiB",
        "2.67 MiB",
    )


def test_codec_of_what_is_no_checkpoint(tmp_path, capsys) -> None:
    assert cli.main([*CODEC, "--codec", str(tmp_path)]) == 2
    assert "has no model.safetensors" in capsys.readouterr().err
    save_file({"ids": torch.arange(3)}, tmp_path / "model.safetensors")
    assert cli.main([*CODEC, "--codec", str(tmp_path)]) == 2
    assert "no floating-point tensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--profile", "machine.json"], "--profile says how fast links are, for --codec"),
        (["--read-gbps", "3"], "--read-gbps says how fast"),
        (["--codec", "folder", "--nvme", "folder"], "--nvme measures links"),
        (["--codec", "folder", "--picture", "links.png"], "--picture measures links"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, says, saved, capsys) -> None:
    """``--profile`` beside measuring does not say where the profile is saved."""
    assert cli.main(["bench", "--size", "4KiB", "--device", "cpu", *options]) == 2
    assert says in capsys.readouterr().err
    assert not saved.exists()
