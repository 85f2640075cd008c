"""Trains one model resident and tiered, each in a DistributedDataParallel of its own.

Run as a program, it is one of several processes: ``support_replicas.py RANK PROCESSES FILE``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from support_nn import assert_same, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiermem

WIDTH, LAYERS = 32, 5
LEAST = "40KiB"
"""HBM for which the model (six blocks of 12 KiB, and a buffer of 4) is too large."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.01},
    "little memory": {"init_sync": False, "bucket_cap_mb": 0.01},
    "several backwards": {"init_sync": False},
    "kept gradients": {"init_sync": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
_TIGHT = ("little memory", "several backwards", "kept gradients")


class Net(nn.Module):
    """Layers, one of which some steps leave out, and a buffer that each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
            for _ in range(LAYERS)
        )
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(32, WIDTH))

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        self.seen += x.mean()
        for layer in self.layers:
            x = x + layer(x)
        return self.extra(x) if extra else x


def train(
    model: DistributedDataParallel, optimizer: Any, clip: Callable[[float], Any], case: str
) -> list[torch.Tensor]:
    """Takes four steps; every process has data of its own."""
    found = []
    for step in range(4):
        parts = 3 if case == "several backwards" else 1
        for part in range(parts):
            seed(100 * step + 10 * part + dist.get_rank())
            extra = case != "unused" or (step + dist.get_rank()) % 2 == 0
            with nullcontext() if part == parts - 1 else model.no_sync():
                loss = model(torch.randn(8, WIDTH), extra=extra).square().mean()
                loss.backward()
            found.append(loss.detach())
        found.append(clip(0.5).clone())
        optimizer.step()
        if case != "kept gradients" or step % 2:
            optimizer.zero_grad()
    return found


def run(case: str) -> None:
    """Runs one case; fails where anything differs."""
    options = CASES[case]
    adam = torch.optim.AdamW
    seed(1)
    plain = Net()
    around = DistributedDataParallel(plain, **options)
    optimizer = adam(plain.parameters(), lr=0.01)
    expected = train(
        around, optimizer, lambda n: nn.utils.clip_grad_norm_(plain.parameters(), n), case
    )
    with tiermem.TierManager("cpu", hbm=LEAST if case in _TIGHT else "256KiB", dram="4MiB") as tier:
        seed(1)
        model = Net()
        around = DistributedDataParallel(tier.wrap(model), **options)
        tiered = tier.optimizer(around.module, adam, lr=0.01)
        found = train(around, tiered, tiered.clip_grad_norm_, case)
        assert_same(expected, found, f"{case}: losses and norms")
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), f"{case}: state")
        for name, param in model.named_parameters():
            ours, theirs = param.grad, plain.get_parameter(name).grad
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                assert_same(theirs, ours.clone(), f"{case}: gradient of {name}")
        tier.unwrap(model)
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), f"{case}: unwrapped")


def exchange(model: Net, optimizer: Any) -> list[torch.Tensor]:
    """Takes three steps whose gradients, weights and state the loop itself exchanges."""
    found = []
    for step in range(3):
        seed(100 * step + dist.get_rank())
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            dist.broadcast(optimizer.state[param]["exp_avg"], 1)
            with torch.no_grad():
                dist.all_reduce(param, op=dist.ReduceOp.MAX)
    return found


def run_by_hand() -> None:
    """Runs a loop that calls collectives itself; fails where anything differs."""
    adam = torch.optim.AdamW
    seed(1)
    plain = Net()
    expected = exchange(plain, adam(plain.parameters(), lr=0.01))
    for hbm in (LEAST, "256KiB"):
        with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
            seed(1)
            model = tier.wrap(Net())
            found = exchange(model, tier.optimizer(model, adam, lr=0.01))
            assert_same(expected, found, f"by hand, {hbm}: losses and gradients")
            assert_same(
                dict(plain.state_dict()), dict(model.state_dict()), f"by hand, {hbm}: state"
            )


def main() -> None:
    """Runs every case as one of several processes."""
    rank, processes, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    for case in CASES:
        run(case)
    run_by_hand()
    print("equal", len(CASES), flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the other process


if __name__ == "__main__":
    main()
