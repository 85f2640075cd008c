"""What the checksum of every read costs a step that streams its weights from NVMe.

The same forward and backward with frozen weights, verification switched on and
off in turn, so that a drifting disk meets both alike. With bytes on the disk
being the bottleneck, the checksum works in helper threads beside the I/O thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import report, spread
from torch import nn

import tiermem
from tiermem.config import parse_size


def main() -> None:
    """Measures and prints one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dram", default="512MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    net = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(args.layers)])
    net.requires_grad_(False).to(args.device)
    x = torch.rand(args.batch, args.width, device=args.device, requires_grad=True)
    layer = (args.width + 1) * args.width * 4 + 8192
    with tiermem.TierManager(
        args.device,
        hbm=4 * layer,
        dram=parse_size(args.dram),
        nvme=args.folder,
        policy=tiermem.Policy(params="nvme"),
    ) as tier:
        tier.wrap(net)
        pieces = tier._manager.parts.mover._pump.pieces

        def step(*, verify: bool) -> float:
            pieces.verify = verify
            began = time.perf_counter()
            net(x).sum().backward()
            if args.device != "cpu":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        for _ in range(3):
            step(verify=True)
        on, off = [], []
        for index in range(args.rounds):
            pair = (True, False) if index % 2 else (False, True)
            for verify in pair:
                (on if verify else off).append(step(verify=verify))
        stats = tier.stats()
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    row = {
        "layers": args.layers,
        "MiB per layer": layer / 2**20,
        "step with s": spread(on)["median"],
        "step without s": spread(off)["median"],
        "cost %": (statistics.median(ratios) - 1) * 100,
        "GB from NVMe per step": stats.links["nvme->hbm"].nbytes / (2 * args.rounds + 3) / 1e9,
        "engine": stats.io_engine,
    }
    report("The checksum's cost in a step that streams from NVMe", [row], args.out)


if __name__ == "__main__":
    main()
