"""The page in docs is the one that the tables make, and the tests it names are there."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest

import tiermem
from tiermem.integrations.zero_infinity.explaining import page
from tiermem.integrations.zero_infinity.schema import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    """Make it anew with ``python -m tiermem.integrations.zero_infinity``."""
    written = (ROOT / "docs/integrations/zero_infinity.md").read_text(encoding="utf-8")
    assert written == page()
    assert all(f"`{path}`" in written for path in OPTIONS)


def test_the_tests_that_it_names_are_there_and_name_the_option() -> None:
    for option in OPTIONS.values():
        if option.test:
            text = (Path(__file__).parent / option.test).read_text(encoding="utf-8")
            assert f"{option.path.rpartition('.')[2]}" in text, option.path


def test_what_takes_each_setting_of_tiermem_is_named() -> None:
    takers = {"TierManager": tiermem.TierManager, "tier.optimizer": tiermem.TierManager.optimizer}
    own = [option for option in OPTIONS.values() if option.path.startswith("tiermem.")]
    assert own
    for option in own:
        name, _, taker = option.setting.partition(" of ")
        assert option.path == f"tiermem.{name.strip('`')}"
        assert name.strip("`") in inspect.signature(takers[taker]).parameters, option.setting


def test_the_default_of_the_ratio_is_none() -> None:
    """DeepSpeed's 1.0 would step all of it on the host, and without a ratio none of it is."""
    assert OPTIONS["zero_optimization.offload_optimizer.ratio"].default is None


def test_the_command_explains_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}}))
    monkeypatch.setattr(sys, "argv", ["zero_infinity", str(path)])
    runpy.run_module("tiermem.integrations.zero_infinity", run_name="__main__")
    assert "zero_optimization.overlap_comm = True: no effect" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["zero_infinity"])
    runpy.run_module("tiermem.integrations.zero_infinity", run_name="__main__")
    assert capsys.readouterr().out == page()
