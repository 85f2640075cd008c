"""``tiermem train``: with a manager that keeps everything resident in its place.

What the real manager does is shown in tests of its own; here it is the command
that is tested: what it prints, writes and returns, also when results differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import nn

import tiermem
from tiermem import cli
from tiermem.cli.display import LiveDisplay, PlainDisplay, new_display
from tiermem.cli.report import caption, write_pictures
from tiermem.cli.training import Progress
from tiermem.runtime.metrics.counters import LinkStats, ResidencyRow, Stats
from tiermem.runtime.metrics.timeline import Timeline

STATS = Stats(
    links={"dram->hbm": LinkStats(2**20, 7, 0.5), "hbm->dram": LinkStats(0, 0, 0.0)},
    hits=3,
    misses=1,
    stalls=2,
    used={"hbm": 1024, "dram": 2048, "nvme": 0},
    budget={"hbm": 2048, "dram": 4096, "nvme": 0},
    peak={"hbm": 2048, "dram": 2048, "nvme": 0},
    io_engine="threads",
    io_reason="a fake",
    efficiency=0.75,
    measured_seconds=2.0,
    bound_seconds=1.5,
    limit="dram->hbm",
    losses={"dram->hbm": 0.25, "host": 1.25, "host wait": 0.0},
)


class FakeManager:
    """Wraps nothing; may falsify the weights it gives back."""

    options: ClassVar[dict[str, Any]] = {}
    falsify = 0.0
    closed = False

    def __init__(self, **options: Any) -> None:
        type(self).options = options
        type(self).closed = False
        self.timeline = Timeline()

    def __enter__(self) -> FakeManager:
        return self

    def __exit__(self, *_: object) -> None:
        type(self).closed = True

    def close(self, *, discard: bool = False) -> None:
        assert discard  # its weights were copied out
        type(self).closed = True

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(self, model: nn.Module, kind: Any, **options: Any) -> Any:
        assert options.pop("where") == options.pop("overlap") == "auto"
        assert options.pop("master_dtype") is None
        optimizer = kind(model.parameters(), **options)
        optimizer.clip_grad_norm_ = lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)
        return optimizer

    def residency(self) -> list[ResidencyRow]:
        return [ResidencyRow("layer", "param", "dram", 2048, {"hbm": "absent"}, 0)]

    def stats(self) -> Stats:
        self.timeline.add("compute", "layer", len(self.timeline), len(self.timeline) + 1)
        return STATS

    @contextlib.contextmanager
    def materialize(self, model: nn.Module) -> Iterator[None]:
        with torch.no_grad():
            model.head.weight[3, 1] += self.falsify
        yield


SMALL = "train --layers 2 --width 16 --heads 2 --context 8 --batch 2 --steps 4 --device cpu".split()


@pytest.fixture
def fake(monkeypatch) -> type[FakeManager]:
    monkeypatch.setattr(tiermem, "TierManager", FakeManager, raising=False)
    return FakeManager


def _train(tmp_path, *more: str) -> int:
    return cli.main([*SMALL, "--out", str(tmp_path / "out"), "--nvme", str(tmp_path), *more])


def test_equal(fake, tmp_path, capsys) -> None:
    assert _train(tmp_path) == 0
    out = capsys.readouterr().out
    assert "equal bit for bit" in out and "NOT" not in out
    assert "efficiency 75.0%: 2 s measured where dram->hbm alone takes 1.5 s" in out
    assert "not compute: host 1.25 s, dram->hbm 0.25 s" in " ".join(out.split())
    assert "dram->hbm" in out and "hit rate 75.0%" in out and "2 stalls" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"timeline.png", "trace.json", "report.json"}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["equal"] is True and len(report["tiered"]["losses"]) == 4
    assert report["stats"]["hit_rate"] == 0.75
    assert fake.closed


def test_different(fake, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(fake, "falsify", 1e-3)
    assert _train(tmp_path) == 1
    out = capsys.readouterr().out
    assert "NOT equal" in out and "head.weight differs in 1 of 4096" in " ".join(out.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["equal"] is False and "head.weight" in report["difference"]


def test_without_comparison(fake, tmp_path, capsys) -> None:
    assert _train(tmp_path, "--no-compare") == 0
    assert "equal" not in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["equal"] is None and report["resident"] is None


def test_quiet_prints_the_verdict_only(fake, tmp_path, capsys) -> None:
    assert _train(tmp_path, "--quiet") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("equal bit for bit")


def test_default_budgets(fake, tmp_path) -> None:
    assert _train(tmp_path, "--quiet", "--no-compare") == 0
    weights = 4 * tiermem.cli.model.Shape(2, 16, 2, 8).parameters
    assert fake.options["hbm"] == weights // 4
    assert weights < fake.options["dram"] < 4 * weights
    assert fake.options["nvme"] == [str(tmp_path)] and fake.options["device"] == "cpu"


def test_options_reach_the_manager(fake, tmp_path) -> None:
    more = "--hbm 1MiB --dram 2MiB --nvme-bytes 3MiB --policy optimizer=nvme --prefetch-depth 2"
    extra = "--accumulate 2 --checkpointing --dtype bfloat16 --quiet"
    assert _train(tmp_path, *more.split(), *extra.split()) == 0
    assert fake.options["hbm"] == 2**20 and fake.options["dram"] == 2**21
    assert fake.options["nvme_bytes"] == 3 * 2**20 and fake.options["prefetch_depth"] == 2
    assert fake.options["policy"].optimizer == "nvme"


def test_no_disk(fake, tmp_path) -> None:
    out = str(tmp_path / "out")
    assert cli.main([*SMALL, "--out", out, "--nvme", "none", "--quiet", "--no-compare"]) == 0
    assert fake.options["nvme"] is None and fake.options["nvme_bytes"] is None
    assert fake.options["dram"] > 4 * fake.options["hbm"] * 4


def test_ctrl_c_closes_the_tiers(fake, tmp_path, monkeypatch, capsys) -> None:
    def interrupt(self: FakeManager) -> Stats:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "stats", interrupt)
    assert _train(tmp_path) == 130
    assert fake.closed and "interrupted" in capsys.readouterr().err


def test_ctrl_c_keeps_the_report_of_what_was_done(fake, tmp_path, monkeypatch, capsys) -> None:
    stats, calls = fake.stats, []

    def interrupt(self: FakeManager) -> Stats:
        calls.append(1)
        if len(calls) == 3:  # as the third step is shown
            raise KeyboardInterrupt
        return stats(self)

    monkeypatch.setattr(fake, "stats", interrupt)
    assert _train(tmp_path, "--json") == 130
    out, err = capsys.readouterr()
    assert err.strip().endswith("interrupted")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report == json.loads(out)
    assert report["interrupted"] is True and report["equal"] is None
    assert len(report["tiered"]["losses"]) == 3 and report["resident"] is None
    tokens = 3 * 2 * 8
    speed, seconds = report["tiered"]["tokens_per_second"], report["tiered"]["seconds"]
    assert speed == pytest.approx(tokens / seconds)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "timeline.png",
        "trace.json",
        "report.json",
    }


def test_ctrl_c_in_the_resident_run_keeps_the_tiered_one(
    fake, tmp_path, monkeypatch, capsys
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiermem.cli.training.run_resident", interrupt)
    assert _train(tmp_path) == 130
    assert "interrupted" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["interrupted"] is True and report["resident"] is None
    assert len(report["tiered"]["losses"]) == 4


def test_json_is_all_that_is_printed(fake, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(fake, "falsify", 1e-3)
    assert _train(tmp_path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is False and "head.weight differs" in report["difference"]
    assert report["tiered"]["seconds"] + report["resident"]["seconds"] < report["seconds"]


def test_the_time_is_that_of_the_steps_and_of_the_whole(fake, tmp_path, capsys) -> None:
    assert _train(tmp_path, "--no-compare") == 0
    out = " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert f"s in all, {report['tiered']['seconds']:.1f} s of them in the tiered run's steps" in out
    assert 0 < report["tiered"]["seconds"] < report["seconds"]


@pytest.mark.parametrize(
    ("steps", "whole", "last", "text"),
    [
        (1, 1, 0, "1 step"),
        (2, 2, 1, "2 steps; below, the last one"),
        (80, 80, 2, "80 steps; below, the last 2"),
        (80, 7, 2, "the last 7 of 80 steps; below, the last 2"),
        (0, 0, 0, "0 steps"),
    ],
)
def test_captions_count_the_steps_they_show(steps: int, whole: int, last: int, text: str) -> None:
    assert caption(steps, whole, last) == text


def test_the_pictures_panels_are_the_steps_of_its_caption(tmp_path, monkeypatch) -> None:
    shown: dict[str, Any] = {}
    monkeypatch.setattr(Timeline, "picture", lambda self, path, **how: shown.update(how))
    timeline = Timeline(limit=2)
    second = 10**9
    progress = Progress([1.0] * 4, [second * at for at in (5, 10, 15, 20, 25)], second * 25)
    timeline.add("compute", "layer", 7 * second, 9 * second)  # of the first step, half is gone
    timeline.add("compute", "layer", 20 * second, 26 * second)
    write_pictures(tmp_path, timeline, 3, progress)
    assert shown["title"] == "3 layers, the last 3 of 4 steps; below, the last 2"
    assert shown["last_seconds"] == 26 - 15
    timeline = Timeline()
    timeline.add("compute", "layer", 6 * second, 26 * second)  # after data and zero_grad
    write_pictures(tmp_path, timeline, 3, progress)
    assert shown["title"] == "3 layers, 4 steps; below, the last 2"


def test_out_must_be_a_folder(fake, tmp_path, capsys) -> None:
    (tmp_path / "out").write_text("a file")
    assert _train(tmp_path) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["timeline.png", "trace.json", "report.json"])
def test_a_report_that_could_not_be_written_is_refused_before_the_run(
    fake, tmp_path, capsys, name
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    fake.options = {}
    assert _train(tmp_path) == 2
    assert f"--out {tmp_path / 'out' / name}: Is a directory" in capsys.readouterr().err
    assert fake.options == {}  # no manager was made


def test_files_of_an_earlier_report_stay_until_there_is_another(
    fake, tmp_path, monkeypatch, capsys
) -> None:
    assert _train(tmp_path) == 0
    former = (tmp_path / "out" / "report.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tiermem.cli.report.write_pictures", full)
    assert _train(tmp_path) == 2
    err = capsys.readouterr().err
    assert f"--out {tmp_path / 'out'}: No space left on device; name another" in err
    assert (tmp_path / "out" / "report.json").read_bytes() == former


def test_live_panel() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    display = new_display("tiered", 10, 100, console, quiet=False)
    assert isinstance(display, LiveDisplay)
    with display:
        display.show_step(0, 5.5, STATS)
        display.show_step(1, 5.25, dataclasses.replace(STATS, stalls=9))
    text = console.file.getvalue()
    assert "2/10" in text and "loss 5.2500" in text and "9 stalls" in text
    assert "1.00 KiB of 2.00 KiB" in text


def test_plain_lines(capsys) -> None:
    display = new_display("tiered", 80, 100, Console(file=io.StringIO()), quiet=False)
    assert isinstance(display, PlainDisplay)
    with display:
        for step in range(80):
            display.show_step(step, 1.0, STATS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and "step 80/80" in lines[-1] and "hbm 1.00 KiB/2.00 KiB" in lines[-1]
