"""``tiermem train``: with a manager that keeps everything resident in its place.

What the real manager does is shown in tests of its own; here it is the command
that is tested: what it prints, writes and returns, also when results differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import nn

import tiermem
from tiermem import cli
from tiermem.cli.display import LiveDisplay, PlainDisplay, new_display
from tiermem.runtime.stats import LinkStats, ResidencyRow, Stats
from tiermem.runtime.timeline import Timeline

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

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(self, model: nn.Module, kind: Any, **options: Any) -> Any:
        assert options.pop("where") == "device" and not options.pop("overlap")
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


def test_out_must_be_a_folder(fake, tmp_path, capsys) -> None:
    (tmp_path / "out").write_text("a file")
    assert _train(tmp_path) == 2
    assert "--out" in capsys.readouterr().err


def test_live_panel() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    display = new_display("tiered", 10, 100, console, quiet=False)
    assert isinstance(display, LiveDisplay)
    with display:
        display.step(0, 5.5, STATS)
        display.step(1, 5.25, dataclasses.replace(STATS, stalls=9))
    text = console.file.getvalue()
    assert "2/10" in text and "loss 5.2500" in text and "9 stalls" in text
    assert "1.00 KiB of 2.00 KiB" in text


def test_plain_lines(capsys) -> None:
    display = new_display("tiered", 80, 100, Console(file=io.StringIO()), quiet=False)
    assert isinstance(display, PlainDisplay)
    with display:
        for step in range(80):
            display.step(step, 1.0, STATS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and "step 80/80" in lines[-1] and "hbm 1.00 KiB/2.00 KiB" in lines[-1]
