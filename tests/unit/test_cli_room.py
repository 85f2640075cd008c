"""Default budgets of ``tiermem train`` that are too small are raised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import tiermem
from tiermem import cli
from tiermem.cli.room import with_room
from tiermem.config import exact_size


class Machine:
    """Runs where each budget is large enough, and asks for more in steps otherwise."""

    def __init__(self, **asks: list[int]) -> None:
        self.asks = asks

    def __call__(self, least: Mapping[str, int]) -> str:
        for tier, steps in self.asks.items():
            for step in steps:
                if least.get(tier, 0) >= step:
                    continue
                option = "nvme_bytes" if tier == "nvme" else tier
                raise tiermem.CapacityError(
                    f"no room; give {option}= at least {exact_size(step)}, or less"
                )
        return "done"


def test_budgets_grow_to_what_is_asked_for() -> None:
    told: list[tuple[str, int]] = []
    machine = Machine(dram=[512], hbm=[84, 128], nvme=[900])
    assert with_room(machine, [], lambda tier, nbytes: told.append((tier, nbytes))) == "done"
    assert told == [("dram", 512), ("hbm", 84), ("hbm", 128), ("nvme", 900)]


def test_what_the_managers_own_errors_ask_for_is_given(tmp_path: Path) -> None:
    told = []

    def wrap(least: Mapping[str, int]) -> None:
        budgets = {"hbm": 4096, "dram": 1 << 19, "nvme_bytes": least.get("nvme", 4096)}
        budgets |= {tier: least[tier] for tier in ("hbm", "dram") if tier in least}
        with tiermem.TierManager(
            device="cpu", nvme=str(tmp_path), policy="nvme", **budgets
        ) as tier:
            tier.wrap(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))

    with_room(wrap, [], lambda tier, nbytes: told.append(tier))
    assert {"hbm", "nvme"} <= set(told)


def test_what_was_given_stays() -> None:
    with pytest.raises(tiermem.CapacityError, match="hbm= at least 84 B"):
        with_room(Machine(dram=[512], hbm=[84]), ["hbm"], lambda tier, nbytes: None)


def test_what_does_not_help_is_not_tried_again() -> None:
    def never(least: Mapping[str, int]) -> None:
        raise tiermem.CapacityError(f"give hbm= at least {exact_size(7)}")

    def says_nothing(least: Mapping[str, int]) -> None:
        raise tiermem.CapacityError("the disk is full")

    for run, said in ((never, "least 7"), (says_nothing, "disk is full")):
        with pytest.raises(tiermem.CapacityError, match=said):
            with_room(run, [], lambda tier, nbytes: None)


def test_a_small_model_trains_with_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "train --layers 2 --width 32 --context 8 --batch 1 --steps 2 --device cpu --json"
    more = ["--out", str(tmp_path / "out"), "--nvme", str(tmp_path), "--threads", "1"]
    assert cli.main([*line.split(), *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["equal"] is True and report["interrupted"] is False
    assert report["settings"]["shape"]["heads"] == 4  # six do not divide 32
    assert report["threads"] == 1
    runs = report["tiered"]["seconds"] + report["resident"]["seconds"]
    assert 0 < runs < report["seconds"]
