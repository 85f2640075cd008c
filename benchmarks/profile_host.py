"""Where the host's time goes per block while a model streams (cProfile, sorted)."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import torch
from bench_hooks import model

import tiermem


def main() -> None:
    """Streams layers of next to no work and prints the profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=1 << 12)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--lines", type=int, default=30)
    args = parser.parse_args()
    net = model(args.layers, args.width).to(args.device)
    x = torch.rand(args.width, device=args.device)
    block = args.width * 4 * 12
    with (
        tiermem.TierManager(
            args.device, hbm=args.layers // 4 * block, dram=2 * args.layers * block
        ) as tier,
        torch.no_grad(),
    ):
        tier.wrap(net)
        for _ in range(5):
            net(x)
        began = time.perf_counter()
        for _ in range(args.repeats):
            net(x)
        spent = (time.perf_counter() - began) / args.repeats / args.layers
        print(f"{spent * 1e6:.1f} us per block")
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(args.repeats):
            net(x)
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(args.lines)


if __name__ == "__main__":
    main()
