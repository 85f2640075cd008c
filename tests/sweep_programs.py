"""Runs programs drawn at random, plain and with tiermem, and compares all that they see.

``python tests/sweep_programs.py --seconds 600 --seed 1`` on the CPU, where a host's memory stands
in for HBM; with ``--lagging`` copies are made only as they are waited for. ``--device cuda`` runs
on a GPU, with larger layers, so that copies are late. ``--jobs 16`` runs as many processes side by
side: they share the GPU, and its streams are further behind than those of one. A program that
differs is told of by its seed::

    python tests/sweep_programs.py --only 123456 --show
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
warnings.simplefilter("ignore")

import torch  # noqa: E402
from support_lagging import lagging  # noqa: E402
from support_process import beside_each_other  # noqa: E402
from support_programs import Drawing, drawn, tried  # noqa: E402

WIDTH = {"cuda": 768, "cpu": 32}


def lagged(drawing: Drawing) -> tuple[Drawing, float | None, dict[str, Any]]:
    """Draws the homes, the share of DRAM and the lags of a program."""
    rng = random.Random(drawing.seed)
    roles = "params", "grads", "optimizer"
    homes = rng.choice(
        (
            drawing.homes,
            dict.fromkeys(roles, "auto"),
            dict.fromkeys(roles, "nvme"),
            {role: rng.choice(("auto", "nvme")) for role in roles},
        )
    )
    homes = homes | {"activations": rng.choice(("hbm", "dram", "nvme"))}
    lags = {
        "eager": rng.choice((0.0, 0.1, 0.5)),
        "chunks": rng.choice((2, 3, 5, 16)),
        "beside": rng.random() < 0.7,
    }
    return replace(drawing, homes=homes), rng.choice((None, 0.3, 1.0, 3.0)), lags


def main() -> int:
    """Runs the sweep; returns 1 where something differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lagging", action="store_true", help="links, and files below them")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each, at most")
    parser.add_argument("--only", type=int, nargs="*", help="seeds of programs")
    parser.add_argument("--show", action="store_true", help="print what is run")
    args = parser.parse_args()
    if args.jobs > 1:
        own = [str(args.seed * 1000 + number) for number in range(args.jobs)]
        return beside_each_other([*sys.argv, "--jobs", "1", "--seed", seed] for seed in own)
    device = torch.device(args.device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device.type == "cuda":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    until = time.monotonic() + args.seconds
    counts: Counter[str] = Counter()
    seeds = iter(args.only) if args.only else iter(lambda: rng.getrandbits(40), None)
    for seed in seeds:
        if time.monotonic() > until:
            break
        drawing = drawn(seed, WIDTH[device.type])
        links, dram = nullcontext([]), None
        if args.lagging:
            drawing, dram, lags = lagged(drawing)
            links = lagging(seed, **lags)
        if args.show:
            print(drawing, dram, flush=True)
        began = time.monotonic()
        faulthandler.dump_traceback_later(args.limit, exit=True)
        try:
            with links as engines:
                found = tried(drawing, device, dram)
            if any(engine.faults for engine in engines):
                found = f"differs: {[engine.faults for engine in engines]}"
        except Exception:
            found = f"differs: {traceback.format_exc()[-3000:]}"
        faulthandler.cancel_dump_traceback_later()
        taken = time.monotonic() - began
        if taken > args.limit / 4:
            print(f"{seed}: {taken:.1f} s", flush=True)
        counts[found.split(" at ")[0].split(":")[0]] += 1
        if found != "same":
            print(f"{seed}: {found}", flush=True)
    print(dict(counts), flush=True)
    return int(any(kind.startswith(("differs", "not")) for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
