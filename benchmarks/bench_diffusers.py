"""Denoising steps of a transformer of Flux's sizes through a part of its bytes in HBM.

Beside them: the same with everything in HBM, the bytes that do not fit copied with nothing around
(the bound is the longer of both), and, with ``--group``, the group offloading of diffusers where
that is installed. The weights are random; the pipeline has the transformer alone.

    python benchmarks/bench_diffusers.py --hbm 6GiB --out benchmarks/results/diffusers_H200.json
    python benchmarks/bench_diffusers.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import statistics
from types import SimpleNamespace
from typing import Any

import torch
from common import failure, integration, report
from flux import build, inputs
from llama import Clock, deterministic, give_back
from raw import nbytes_of_blocks, raw_copy
from torch import nn

from tiermem.config import format_size, parse_size

Row = dict[str, Any]


class Bench:
    """One model, its input, and what is run on it.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.clock = Clock(self.device)
        self.shape = "tiny" if options.tiny else "flux"
        self.hbm = parse_size(options.hbm or ("512KiB" if options.tiny else "6GiB"))
        self.model: nn.Module = build(self.shape, self.device)
        self.inputs = inputs(self.shape, self.device)
        self.expected = torch.empty(0)

    def step(self) -> torch.Tensor:
        """Makes one denoising step."""
        with torch.no_grad():
            latents: torch.Tensor = self.model(*self.inputs)
            return latents

    def seconds(self) -> list[float]:
        """Returns the seconds of steps that follow one another, by the device's own clock."""
        self.step()
        options = self.options
        took = self.clock.time(lambda: [self.step() for _ in range(options.steps)], options.repeats)
        return [seconds / options.steps for seconds in took]

    def resident(self) -> Row:
        """Everything in HBM."""
        with deterministic():
            self.expected = self.step().cpu()
        return {"what": "in HBM", "s": statistics.median(self.seconds())}

    def tiered(self, resident: float) -> list[Row]:
        """tiermem, and the bytes that do not fit copied alone."""
        pipe = SimpleNamespace(components={"transformer": self.model})
        where = {"device": self.device, "hbm": self.hbm, "dram": self.options.dram}
        with integration("diffusers").offload(pipe, **where) as tier:
            give_back(self.device)
            nbytes = nbytes_of_blocks(tier, "")
            with deterministic():
                equal = torch.equal(self.step().cpu(), self.expected)
            seconds = self.seconds()
            tier.reset_stats()
            self.step()
            self.clock.wait()
            moved = sum(link.nbytes for link in tier.stats().links.values())
            left = max(0, nbytes - self.hbm)
            raw = statistics.median(self.clock.time(raw_copy(tier, left, ""), 3, warm=1))
            if not self.options.group:
                tier.close(discard=True)
        bound, took = max(raw, resident), statistics.median(seconds)
        return [
            {"what": "raw copy of what does not fit", "s": raw, "GB moved": left / 1e9},
            {
                "what": "tiermem",
                "s": took,
                "max s": max(seconds),
                "of bound": bound / took,
                "equal": equal,
                "GB moved": moved / 1e9,
                "GB of weights": nbytes / 1e9,
            },
        ]

    def grouped(self) -> Row:
        """The group offloading of diffusers, block by block, with streams where there are any."""
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            self.model,
            onload_device=self.device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=self.device.type == "cuda",
        )
        with deterministic():
            equal = torch.equal(self.step().cpu(), self.expected)
        took = statistics.median(self.seconds())
        return {"what": "diffusers group offloading", "s": took, "equal": equal}


def main() -> None:
    """Measures and reports."""
    options = _options()
    bench = Bench(options)
    rows = [bench.resident()]
    rows += bench.tiered(rows[0]["s"])
    title = f"A denoising step of a transformer of Flux's sizes, {format_size(bench.hbm)} of HBM"
    report(title, rows, options.out, hbm=bench.hbm)
    if not options.group:
        return
    bound = max(row["s"] for row in rows[:2])
    try:
        row = bench.grouped()
        rows.append({**row, "of bound": bound / row["s"]})
    except (ImportError, RuntimeError) as error:
        rows.append({"what": "diffusers group offloading", "note": failure(error)})
    report(title, rows, options.out, hbm=bench.hbm)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it")
    parser.add_argument("--hbm", help="by default 6GiB; 512KiB with --tiny")
    parser.add_argument("--dram", help="by default half of what is available")
    parser.add_argument("--steps", type=int, default=4, help="in a row, timed together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--group", action="store_true", help="diffusers' group offloading, too")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
