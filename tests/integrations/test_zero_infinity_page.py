"""The page in docs is the one that the tables make, and the tests it names are there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

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
