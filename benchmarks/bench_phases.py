"""What a training step's forward, backward and ``step()`` take the host, plain and with defaults.

The device is idle as a step begins. Of each phase: how long the host's call takes, how long the
device takes from its begin to its end, and the process's own time. Where these agree and the device
has nothing left to do as a step ends (``left ms``), the host is what limits. Last, how often the
process gave its core away: waits that do not spin do. Medians of some steps::

    python benchmarks/bench_phases.py bart vit whisper --set quick --out phases.json
    python benchmarks/bench_phases.py layers --device cpu --set tiny --tokens 64
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import torch
from common import report, rows_of
from llama import give_back, nbytes_of
from torch import nn
from zoo import KINDS
from zoo_kind import SETS, Draw, Kind, loss_of

import tiermem

Row = dict[str, Any]
LEARNING_RATE = 1e-5
PHASES = ("forward", "backward", "step")


class Phases:
    """Makes steps of one model, and measures their phases."""

    def __init__(
        self, kind: Kind, model: nn.Module, optimizer: Any, tokens: int, device: torch.device
    ) -> None:
        """Prepares the inputs.

        Args:
            kind: Of the model.
            model: In training mode.
            optimizer: Of its parameters.
            tokens: Of a step.
            device: Where it runs.
        """
        self.model, self.optimizer, self.device = model, optimizer, device
        self.given = kind.given(model, tokens, Draw(device, tokens), True)
        torch.manual_seed(0)  # dropout

    def wait(self) -> None:
        """Waits until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def marks(self) -> tuple[float, float, Any]:
        """Returns the time, the process's own, and an event on the compute stream."""
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return time.perf_counter(), time.process_time(), event

    def make(self) -> Row:
        """Makes a step; returns its milliseconds."""
        self.wait()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        marks = [self.marks()]
        loss = loss_of(self.model(**self.given))
        marks.append(self.marks())
        loss.backward()
        marks.append(self.marks())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.marks())
        self.wait()
        end = time.perf_counter()
        found: Row = {"whole ms": 1e3 * (end - marks[0][0]), "left ms": 1e3 * (end - marks[-1][0])}
        for phase, begin, after in zip(PHASES, marks, marks[1:], strict=False):
            found[f"{phase} ms"] = 1e3 * (after[0] - begin[0])
            found[f"{phase}, processor ms"] = 1e3 * (after[1] - begin[1])
            if begin[2] is not None:
                found[f"{phase}, device ms"] = begin[2].elapsed_time(after[2])
        found["switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
        return found

    def measure(self, warm: int, steps: int) -> Row:
        """Returns the medians of some steps, after others that are not measured."""
        for _ in range(warm):
            self.make()
        rows = [self.make() for _ in range(steps)]
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(name: str, options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Measures one model, as it is and in the tiers."""
    kind = KINDS[name]
    tokens = min(options.tokens, kind.most_trained)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind.build(options.set, device).train()

    model = build()
    nbytes = nbytes_of([*model.parameters(), *model.buffers()])
    about = {"model": name, "GB": nbytes / 1e9, "parameters": len([*model.parameters()])}
    plain = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows = [about | {"how": "plain"} | Phases(kind, model, plain, tokens, device).measure(3, 7)]
    del model, plain
    give_back(device)
    model = build()
    with tiermem.TierManager(device=device, hbm=int(nbytes * options.share) // 4096 * 4096) as tier:
        model = tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=LEARNING_RATE)
        give_back(device)
        phases = Phases(kind, model, optimizer, tokens, device)
        rows.append(about | {"how": "tiermem"} | phases.measure(options.warm, options.steps))
        tier.close(discard=True)
    return rows


def main() -> None:
    """Measures the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["bart", "vit"], choices=[*KINDS])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--warm", type=int, default=24, help="steps before those measured")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--set", choices=SETS, default="full", help="sizes of the models")
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes, in HBM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = rows_of(
        options.models, lambda name: measure(name, options, device), lambda: give_back(device)
    )
    report("Phases of a training step, host and device", rows, options.out, tall=True)


if __name__ == "__main__":
    main()
