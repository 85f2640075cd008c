"""Races: thousands of random steps with streams that are late, freed slots poisoned.

The number of steps is ``TIERMEM_STRESS_STEPS``, the seed ``TIERMEM_STRESS_SEED``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support_stress import run

STEPS = int(os.environ.get("TIERMEM_STRESS_STEPS", "2000"))
SEED = int(os.environ.get("TIERMEM_STRESS_SEED", "0"))
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def test_streams_that_are_late_change_nothing(tmp_path: Path) -> None:
    seen = run("cuda", STEPS, SEED, tmp_path)
    assert seen["steps"] == STEPS
    if STEPS >= 1000:
        assert min(seen.values()) > 0, f"something never happened: {seen}"
