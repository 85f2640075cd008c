"""How far a use of a block and a step walk through the files of tiermem, counted without a GPU.

Counted are files entered, and changes from one file of tiermem to another, by a call or a return.
A *miss* is one ``acquire`` of a block that is not in HBM, in an order that nothing foresees; a
*replayed use* is one call of a layer in a pass that repeats others, with a copy; a *step* is one
``optimizer.step()`` of a loop that repeats, divided by its units. Copies go through the engine and
the calls of CUDA, by the stand-in driver of ``bench_uses.py``. Nothing is timed: a machine's speed
and load change no figure of the misses and the step.

    python benchmarks/count_walks.py [--sequence] [--lines N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_uses import as_on_cuda, smaller, stand_in
from torch import nn

import tiermem
from tiermem.core.block import Role
from tiermem.core.residency import State

_ROOT = str(Path(tiermem.__file__).parent)
_BY = 800  # sizes by which blocks are made are divided so: each layer is a block
_STEPS = 6


class Walk:
    """The files of tiermem that one call passes through, in order.

    Attributes:
        files: One entry for each time that a file is entered or returned to.
        functions: How often each function was called.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.functions: Counter[str] = Counter()
        self._stack: list[str] = []

    def take(self, call: Callable[[], Any]) -> Any:
        """Makes a call and notes its walk; returns what it returns."""
        sys.setprofile(self._look)
        try:
            return call()
        finally:
            sys.setprofile(None)

    @property
    def changes(self) -> int:
        """How often it goes from one file to another."""
        return max(0, len(self.files) - 1)

    def legs(self) -> Counter[str]:
        """Returns how often it goes from which file to which."""
        pairs = zip(self.files, self.files[1:], strict=False)
        return Counter(f"{one} -> {other}" for one, other in pairs)

    def _look(self, frame: Any, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(_ROOT) or event not in ("call", "return"):
            return
        if event == "call":
            self._stack.append(name[len(_ROOT) + 1 :])
            self.functions[f"{self._stack[-1]}:{frame.f_code.co_name}"] += 1
        elif self._stack:
            self._stack.pop()
        if self._stack and (not self.files or self.files[-1] != self._stack[-1]):
            self.files.append(self._stack[-1])


class Layers(nn.Module):
    """Small layers, of which one call can be walked.

    Args:
        widths: Of what is inside each; its block is as large.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)) for width in widths
        )
        self.walked: int | None = None
        self.walk = Walk()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them.

        Args:
            x: (batch, 64).
        """
        for number, layer in enumerate(self.layers):
            if number == self.walked:
                x = x + self.walk.take(lambda layer=layer, x=x: layer(x))
            else:
                x = x + layer(x)
        return x


@contextmanager
def in_tiers(model: nn.Module, part: float, dram: int) -> Iterator[Any]:
    """Yields a manager whose HBM has a part of the bytes of a model, which is wrapped."""
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    hbm = int(nbytes * part) // 4096 * 4096
    with smaller(_BY), stand_in(), tiermem.TierManager("cpu", hbm=hbm, dram=dram) as tier:
        as_on_cuda(tier, _BY)
        tier._manager.parts.pass_timer.estimates.wants = lambda _key: False  # plans stay
        tier.wrap(model)
        yield tier


def misses(widths: Sequence[int]) -> list[Walk]:
    """Returns the walks of demand misses for which others leave, in an order drawn at random."""
    model, found = Layers(widths).requires_grad_(False), []
    with in_tiers(model, 0.25, 1 << 24) as tier:
        manager, draw = tier._manager, random.Random(0)
        records = [r for r in manager.parts.table if r.block.role is Role.PARAM]
        for number in range(400):
            record = draw.choice(records)
            if record.in_hbm is not State.ABSENT:
                continue
            walk = Walk()
            walk.take(lambda record=record: manager.acquire(record.block))
            manager.release(record.block)
            if number >= 100:
                found.append(walk)
    return found


def replayed_use() -> list[Walk]:
    """Returns the walks of calls of a layer that comes up ahead for another, replayed."""
    model, found = Layers([64] * 120).requires_grad_(False), []
    with in_tiers(model, 0.25, 1 << 24), torch.no_grad():
        x = torch.rand(1, 64)
        for _ in range(20):
            model(x)
        for number in range(40, 80):
            model.walked, model.walk = number, Walk()
            model(x)
            if any(name.endswith(":copy_behind") for name in model.walk.functions):
                found.append(model.walk)
    return found


def step() -> tuple[list[Walk], int]:
    """Returns the walks of steps, and of how many units each is: weights, gradient and state."""
    model, found = Layers([64] * 16), []
    with in_tiers(model, 1.5, 1 << 24) as tier:
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3, overlap=False)
        x = torch.rand(1, 64)
        for number in range(3 * _STEPS):
            model(x).square().mean().backward()
            walk = Walk()
            walk.take(optimizer.step)
            optimizer.zero_grad()
            if number >= 2 * _STEPS:
                found.append(walk)
        units = len(optimizer._units)
    return found, units


def report(what: str, walks: Sequence[Walk], options: argparse.Namespace, units: int = 1) -> Any:
    """Prints the median of some walks; returns it."""
    ordered = sorted(walks, key=lambda walk: walk.changes)
    files = statistics.median_low(len(set(walk.files)) for walk in walks)
    middle = ordered[(len(ordered) - 1) // 2]
    row = {
        "what": what,
        "files": files,
        "changes": round(middle.changes / units),
        "most changes": round(ordered[-1].changes / units),
        "calls": round(sum(middle.functions.values()) / units),
        "walks": len(walks),
    }
    print(", ".join(f"{key} {value}" if key != "what" else value for key, value in row.items()))
    if options.sequence:
        print("  " + "\n  ".join(middle.files[: options.lines]))
    elif options.lines:
        for name, number in middle.legs().most_common(options.lines):
            print(f"  {number / units:7.2f}  {name}")
        for name, number in middle.functions.most_common(options.lines):
            print(f"  {number / units:7.2f}  {name}")
    return row


def main() -> None:
    """Counts, and prints a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=0, help="most frequent changes and functions")
    parser.add_argument("--sequence", action="store_true", help="the files in order instead")
    parser.add_argument("--json", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [
        report("miss, blocks of one size", misses([64] * 40), options),
        report("miss, other sizes", misses([48 + 16 * (i % 5) for i in range(40)]), options),
        report("replayed use, with a copy", replayed_use(), options),
    ]
    walks, units = step()
    rows.append(report("step, a unit", walks, options, units=units))
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
