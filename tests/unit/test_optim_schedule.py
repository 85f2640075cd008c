"""State on NVMe in simulated time: a step takes as long as the disk, not the sum of its parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_disk import SPEEDS, Sweep

from tiermem.testing.disk import Speeds

NARROW = {"layers": 12, "width": 512}


@pytest.mark.parametrize("slots", [3.3, 6.5])
@pytest.mark.parametrize("seconds", [0.0, 0.8])
@pytest.mark.parametrize("params", ["dram", "nvme"])
@pytest.mark.one_in(2)
def test_reads_updates_and_writes_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: float, seconds: float, params: str
) -> None:
    sizes = {**NARROW, "seconds": seconds, "slots": slots, "params": params}
    with Sweep(tmp_path, monkeypatch, **sizes) as sweep:
        shares = [sweep.step(number) for number in range(2)]
        assert shares[1] > 0.9, shares


@pytest.mark.parametrize("overlap", [False, True])
def test_updates_that_take_longer_than_the_disk_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    sizes = {**NARROW, "seconds": 3.2, "slots": 4.3, "overlap": overlap}
    with Sweep(tmp_path, monkeypatch, **sizes) as sweep:
        shares = [sweep.step(number) for number in range(2)]
        assert shares[1] > 0.9, shares


@pytest.mark.parametrize("seconds", [0.0, 0.8, 3.2])
@pytest.mark.parametrize("params", ["dram", "nvme"])
def test_on_the_host_they_overlap_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, params: str
) -> None:
    sizes = {**NARROW, "seconds": seconds, "slots": 2.2, "params": params, "dram": 32 << 20}
    with Sweep(tmp_path, monkeypatch, **sizes, where="host") as sweep:
        assert all(unit.host is not None for unit in sweep.optimizer._units)
        shares = [sweep.step(number) for number in range(2)]
        assert shares[1] > 0.9, shares


@pytest.mark.parametrize(
    "speeds", [Speeds(6e6, 3e6, 7e6), Speeds(3e6, 1.5e6, 3e6), Speeds(3e6, 3e6, 6e6)]
)
def test_disks_of_other_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speeds: Speeds
) -> None:
    sizes = {**NARROW, "seconds": 0.1, "slots": 4.3, "speeds": speeds}
    with Sweep(tmp_path, monkeypatch, **sizes) as sweep:
        shares = [sweep.step(number) for number in range(2)]
        assert shares[1] > 0.85, shares


def test_two_slots_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is read the other is written; only the updates hide behind nothing."""
    with Sweep(tmp_path, monkeypatch, **NARROW, seconds=0.0, slots=2.2) as sweep:
        sweep.step(0)
        assert sweep.step(1) > 0.9


def test_the_bound_of_a_disk() -> None:
    assert SPEEDS.bound(3_000_000, 0) == 1.0
    assert SPEEDS.bound(2_000_000, 2_000_000) == 1.0
    assert SPEEDS.bound(2_000_000, 5_000_000) == 2.0
    assert Speeds(3.0, 3.0, 2.0).bound(3, 3) == 2.0, "one after the other is quicker"
