"""Programs drawn at random see the same with tiermem as without; the sweep draws many more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support_lagging import lagging
from support_programs import Drawing, drawn, tried

HABITS = "train", "train", "accumulated", "evaluated", "train"


@pytest.mark.parametrize("seed", range(8))
def test_programs_see_the_same(seed: int) -> None:
    found = tried(drawn(seed, 16), torch.device("cpu"))
    assert found.startswith("same"), found


def tried_with_lagging_links(drawing: Drawing, dram: float | None = None, **lags: Any) -> None:
    with lagging(drawing.seed, **lags) as engines:
        found = tried(drawing, torch.device("cpu"), dram)
    assert found.startswith("same"), found
    assert not any(engine.faults for engine in engines)


@pytest.mark.parametrize("seed", [3, 9, 11, 14])
def test_programs_see_the_same_while_links_lag(seed: int) -> None:
    drawing = drawn(seed, 16)
    tried_with_lagging_links(replace(drawing, homes={"activations": "dram"}))


@pytest.mark.parametrize(
    ("seed", "home", "activations", "dram", "beside"),
    [(1, "nvme", "nvme", 1.0, True), (3, "auto", "nvme", 0.3, False)],
)
def test_programs_see_the_same_while_files_lag(
    seed: int, home: str, activations: str, dram: float, beside: bool
) -> None:
    drawing = drawn(seed, 16)
    habits = [(name, seed + number) for number, name in enumerate(HABITS)]
    drawing = replace(
        drawing,
        kinds=["mlp", "raw", "mlp"],
        homes=dict.fromkeys(("params", "grads", "optimizer"), home) | {"activations": activations},
        share=0.5,
        acts=habits + drawing.acts[:4],
    )
    tried_with_lagging_links(drawing, dram, chunks=3, beside=beside)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_leaves_the_first_place_has_left_before_it_is_used_again(share: float) -> None:
    """Saved tensors leave beside it, and the first block is used at both ends of the model."""
    drawing = drawn(284152439415, 32)
    acts = [("accumulated", 7 * number + 1) for number in range(9)]
    tried_with_lagging_links(replace(drawing, kinds=["mlp"] * 3, share=share, acts=acts))
