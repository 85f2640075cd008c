"""The steps of the race test on the CPU, shortly: they are alike, and all of them happen."""

from __future__ import annotations

from pathlib import Path

from support_stress import run


def test_random_steps_equal_the_resident_twins(tmp_path: Path) -> None:
    seen = run("cpu", 120, 0, tmp_path)
    assert min(seen.values()) > 0, f"something never happened: {seen}"
