"""What byte planes and lz4 give for a checkpoint's weights and for moments, and when it pays.

As ``tiermem bench --codec``, with the files that a result has. Without --folder it packs random
numbers of a trained model's spread, which shrink a little less than trained ones.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import report
from safetensors.torch import save_file

from tiermem.cli.bench import packing_row
from tiermem.cli.codec import Packing, break_evens, measure, samples, usual_threads
from tiermem.cli.plan import add_speed_arguments, read_speeds
from tiermem.config import parse_size


def main() -> None:
    """Measures and prints a row for each kind of numbers and each link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", nargs="+", default=[], help="checkpoints")
    parser.add_argument("--size", default="256MiB", help="most bytes of each kind")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--fastest",
        action="store_true",
        help="the fastest round counts, not the median: on a machine that others use, too",
    )
    parser.add_argument("--note", help="what else is to be known of the run")
    parser.add_argument("--out", default=None)
    add_speed_arguments(parser.add_argument_group("speeds"))
    args = parser.parse_args()
    links, sources = read_speeds(args)
    nbytes = parse_size(args.size)
    with tempfile.TemporaryDirectory() as random:
        folders = args.folder or [_random_weights(Path(random), nbytes)]
        found = {s.what: s for folder in folders for s in samples(folder, nbytes)}
    packings = [measure(sample, usual_threads(), args.repeats) for sample in found.values()]
    if args.fastest:
        packings = [_fastest(packing) for packing in packings]
    rows: list[dict[str, Any]] = [_row(packing, links) for packing in packings]
    notes = {"speeds": ", ".join(f"{link}: {source}" for link, source in sources.items())}
    if args.note:
        notes["note"] = args.note
    report("Byte planes and lz4: ratio, speed, break-even", rows, args.out, tall=True, **notes)


def _row(packing: Packing, links: dict[str, float]) -> dict[str, Any]:
    """Returns a row; speeds are in GB/s of numbers, before packing."""
    row: dict[str, Any] = packing_row(packing)
    for even in break_evens(packing, links):
        row[f"{even.way}: GB/s"] = even.link / 1e9
        row[f"{even.way}: codec would need GB/s"] = even.needed and even.needed / 1e9
        row[f"{even.way}: pays below GB/s"] = even.pays_below / 1e9
        row[f"{even.way}: packed, then moved, of plain"] = even.gain
        row[f"{even.way}: both at once, of plain"] = even.gain_beside
    return row


def _fastest(packing: Packing) -> Packing:
    best = {key: replace(speed, bytes_per_s=speed.most) for key, speed in packing.speeds.items()}
    return replace(packing, speeds=best)


def _random_weights(folder: Path, nbytes: int) -> str:
    torch.manual_seed(0)
    weights = torch.randn(nbytes // 2) * 0.02
    save_file({"weights": weights.to(torch.bfloat16)}, folder / "model.safetensors")
    return str(folder)


if __name__ == "__main__":
    main()
