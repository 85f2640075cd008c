"""Loss curves of a real small training run, tiered and resident, on top of each other.

A byte-level GPT is trained on the source of Python's standard library in bf16 with fp32 masters,
recomputation, accumulation over micro-batches, clipping of the global norm and a learning-rate
schedule; weights, gradients, masters, states and activations are out of HBM. Steps on the device
give the resident run's bits; those on the host round differently, and their curve shows by how
much.

    python benchmarks/bench_losses.py --out benchmarks/results/loss_curves.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import report

import tiermem
from tiermem.cli.data import load_corpus
from tiermem.cli.model import Shape
from tiermem.cli.training import (
    Outcome,
    Settings,
    copy_weights,
    deterministic,
    first_difference,
    largest_loss_difference,
    new_model,
    run_resident,
    run_steps,
)

RUNS = {
    "resident": None,
    "tiered, DRAM": {"home": "dram", "where": "device", "overlap": False},
    "tiered, DRAM, steps in the next forward": {"home": "dram", "where": "device", "overlap": True},
    "tiered, NVMe": {"home": "nvme", "where": "device", "overlap": True},
    "tiered, DRAM, steps on the host": {"home": "dram", "where": "host", "overlap": True},
}
"""What is trained; ``where`` says where steps are made, ``home`` where everything lives."""


def tiered(settings: Settings, corpus: Any, how: dict[str, Any], folder: str) -> Outcome:
    """Trains with everything out of HBM."""
    whole = settings.state_bytes + settings.weight_bytes + (8 << 20)
    activations = settings.activation_bytes + (8 << 20)
    on_disk = how["home"] == "nvme"
    with tiermem.TierManager(
        settings.device,
        hbm=max(1 << 20, settings.state_bytes // 8),
        dram=(4 << 20) + activations if on_disk else whole + activations,
        nvme=folder if on_disk else None,
        policy=dict.fromkeys(("params", "grads", "master", "optimizer"), how["home"])
        | {"activations": "dram"},
        activation_min="4KiB",
    ) as tier:
        model = tier.wrap(new_model(settings))
        optimizer = tier.optimizer(
            model,
            torch.optim.AdamW,
            lr=settings.lr,
            master_dtype=settings.master,
            overlap=how["overlap"],
            where=how["where"],
        )
        progress = run_steps(model, optimizer, optimizer.clip_grad_norm_, corpus, settings, said)
        with tier.materialize(model):
            weights = copy_weights(model)
        stats = tier.stats()
    moved = sum(link.nbytes for link in stats.links.values())
    if not moved or not stats.activations.offloaded:
        raise RuntimeError("nothing left HBM: the run shows nothing")
    return Outcome(progress.losses, weights, progress.seconds)


def said(step: int, loss: float) -> None:
    """Prints a loss now and then."""
    if step % 25 == 0:
        print(f"  step {step}: {loss:.4f}", flush=True)


def row_of(name: str, found: Outcome, resident: Outcome) -> dict[str, Any]:
    """Returns what a run gave, beside the resident one."""
    pairs = zip(found.losses, resident.losses, strict=True)
    return {
        "run": name,
        "first loss": found.losses[0],
        "last loss": found.losses[-1],
        "largest difference": max(abs(a - b) for a, b in pairs),
        "relative": largest_loss_difference(found, resident),
        "weights": "equal" if first_difference(found, resident) is None else "differ",
        "s per step": found.seconds / len(found.losses),
    }


def draw(curves: dict[str, Sequence[float]], title: str, out: str) -> None:
    """Draws the curves on top of each other, and below what is between them and the first."""
    from matplotlib.figure import Figure  # a figure of its own needs no display

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    first = next(iter(curves.values()))
    widest = len(curves) + 1.0
    for number, (name, losses) in enumerate(curves.items()):  # the later, the thinner
        line = {"linewidth": widest - number, "label": name, "color": f"C{number}"}
        above.plot(range(1, len(losses) + 1), losses, **line)
        apart = [a - b for a, b in zip(losses, first, strict=True)]
        below.plot(range(1, len(losses) + 1), apart, **line)
    above.set_ylabel("loss, nats per byte")
    above.set_title(title, fontsize=9)
    above.legend(fontsize=8)
    below.set_ylabel("less resident")
    below.set_xlabel("step")
    figure.savefig(Path(out).with_suffix(".png"), dpi=120)


def main() -> int:
    """Trains every run from the same seed; keeps what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--folder", default=".", help="of the swap file")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    settings = Settings(
        shape=Shape(args.layers, args.width, max(1, args.width // 32), args.context),
        batch=args.batch,
        accumulate=args.accumulate,
        steps=args.steps,
        lr=args.lr,
        seed=0,
        dtype=torch.bfloat16,
        device=args.device,
        checkpointing=True,
        loss_chunks=4,
        master=torch.float32,
    )
    corpus = load_corpus()
    title = (
        f"Loss of a byte-level GPT, {settings.shape.parameters / 1e6:.1f} M parameters, bf16 with "
        f"fp32 masters, {corpus.source}"
    )
    rows: list[dict[str, Any]] = []
    curves: dict[str, Sequence[float]] = {}
    resident: Outcome | None = None
    wrong = 0
    with deterministic(args.device):
        for name in dict.fromkeys(["resident", *args.runs]):
            print(name, flush=True)
            how = RUNS[name]
            if how is None:
                found = resident = run_resident(corpus, settings, said)
            else:
                found = tiered(settings, corpus, how, args.folder)
            assert resident is not None
            rows.append(row_of(name, found, resident))
            curves[name] = found.losses
            exact = how is None or how["where"] == "device"
            wrong += exact and rows[-1]["weights"] != "equal"
            report(title, rows, args.out, losses=curves)
            if args.out:
                draw(curves, title, args.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
