"""Races: thousands of random steps with streams that are late, freed slots poisoned.

The number of steps is ``TIERMEM_STRESS_STEPS``, the seed ``TIERMEM_STRESS_SEED``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_stress import run

STEPS = int(os.environ.get("TIERMEM_STRESS_STEPS", "2000"))
SEED = int(os.environ.get("TIERMEM_STRESS_SEED", "0"))
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TIERMEM_POISON", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_streams_that_are_late_change_nothing(tmp_path: Path) -> None:
    seen = run("cuda", STEPS, SEED, tmp_path)
    assert seen["steps"] == STEPS
    if STEPS >= 1000:
        assert min(seen.values()) > 0, f"something never happened: {seen}"
