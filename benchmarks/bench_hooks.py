"""Host time per block of the hook pair with everything resident, and step time by depth.

Each layer has the parameters of a transformer layer (12) but almost no
arithmetic, so what is measured is what tiermem adds on the host.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import report, spread
from torch import nn

import tiermem


class Layer(nn.Module):
    """A dozen parameters, next to no work."""

    def __init__(self, width: int) -> None:
        """Makes the parameters."""
        super().__init__()
        for index in range(12):
            self.register_parameter(f"w{index}", nn.Parameter(torch.rand(width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses one of them, so that backward has something to do."""
        return x * self.w0


def model(layers: int, width: int) -> nn.Module:
    """Returns a stack of layers."""
    return nn.Sequential(*[Layer(width) for _ in range(layers)])


def forward_time(net: nn.Module, x: torch.Tensor, repeats: int) -> list[float]:
    """Returns host seconds per forward without gradients, one per repeat."""
    times = []
    with torch.no_grad():
        for _ in range(3):
            net(x)
        for _ in range(repeats):
            if x.is_cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            net(x)
            times.append(time.perf_counter() - began)
    return times


def hook_pair(
    layers: int, width: int, repeats: int, device: str, share: float = 0.0
) -> dict[str, float | int | str]:
    """Measures plain and wrapped forwards in turn and takes the difference per block.

    Args:
        layers: Blocks.
        width: Elements of each of a block's parameters.
        repeats: Measurements.
        device: Where.
        share: Share of the blocks that HBM holds; 0 for all of them and room to spare.
    """
    x = torch.rand(width, device=device)
    plain, wrapped = model(layers, width).to(device), model(layers, width).to(device)
    block = -(-width * 4 // 256) * 256 * 12 + 4096
    hbm = int(layers * share) * block if share else 256 << 20
    with tiermem.TierManager(
        device=device, hbm=hbm, dram=max(64 << 20, 2 * layers * block)
    ) as tier:
        tier.wrap(wrapped)
        forward_time(wrapped, x, 3)
        differences = []
        for _ in range(repeats):
            a = forward_time(plain, x, 3)[1]
            b = forward_time(wrapped, x, 3)[1]
            differences.append((b - a) / layers * 1e6)
        stats = tier.stats()
    part = f"{share:.0%} of it" if share else "all"
    return {
        "what": f"hook pair, {part} resident, no_grad, {device}",
        "layers": layers,
        "parameters per block": 12,
        "us per block (median)": spread(differences)["median"],
        "us (min)": spread(differences)["min"],
        "us (max)": spread(differences)["max"],
        "evictions": stats.evictions,
    }


def step_time(layers: int, width: int, repeats: int) -> dict[str, float | int | str]:
    """Measures a training step with a quarter of the layers resident."""
    x = torch.rand(8, width)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    layer = (width * width + width) * 4 + 8192
    with tiermem.TierManager(
        device="cpu", hbm=max(layers // 4, 6) * layer, dram=layers * layer * 5
    ) as tier:
        tier.wrap(net)
        optimizer = tier.optimizer(net, torch.optim.SGD, lr=1e-3, momentum=0.9)
        times = []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            times.append(time.perf_counter() - began)
    per_layer = [t / layers * 1e6 for t in times[2:]]
    return {
        "what": "training step, a quarter resident",
        "layers": layers,
        "us per layer (median)": spread(per_layer)["median"],
        "us (min)": spread(per_layer)["min"],
        "us (max)": spread(per_layer)["max"],
    }


def main() -> None:
    """Runs both and prints a table each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--depths", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--out", default=None, help="JSON file; Markdown is written beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [hook_pair(args.layers, args.width, args.repeats, args.device)]
    if args.device != "cpu":
        rows.append(hook_pair(args.layers, 1 << 16, args.repeats, args.device, 0.25))
    rows += [step_time(depth, args.width * 2, max(3, args.repeats // 7)) for depth in args.depths]
    report("Host time of tiermem", rows, args.out)


if __name__ == "__main__":
    main()
