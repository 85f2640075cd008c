"""Trains one model resident and tiered, each in a DistributedDataParallel of its own.

Run as a program, it is one of several processes: ``support_replicas.py RANK PROCESSES FILE``, and
with ``cuda`` behind it each has a GPU of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Place:
    """Where it is trained: how wide the model is, HBM that is too small for it, HBM that is not."""

    device: str = "cpu"
    width: int = WIDTH
    least: str = LEAST
    room: str = "256KiB"
    dram: str = "4MiB"

    def tier(self, *, tight: bool) -> tiermem.TierManager:
        hbm = self.least if tight else self.room
        return tiermem.TierManager(self.device, hbm=hbm, dram=self.dram)

    def net(self) -> Net:
        return Net(self.width).to(self.device)

    def batch(self) -> torch.Tensor:
        return torch.randn(8, self.width).to(self.device)


ON_HOST, ON_GPU = Place(), Place("cuda", 512, "5MiB", "48MiB", "256MiB")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.01},
    "little memory": {"bucket_cap_mb": 0.01},
    "several backwards": {"init_sync": False},
    "kept gradients": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
_TIGHT = ("little memory", "several backwards", "kept gradients")


class Net(nn.Module):
    """Layers, one of which some steps leave out, and a buffer that each forward writes.

    The layer has a transposed weight: torch's reducer goes by strides.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())
            for _ in range(LAYERS)
        )
        self.extra = nn.Linear(width, width)
        self.extra.weight = nn.Parameter(self.extra.weight.detach().t())
        self.register_buffer("seen", torch.zeros(32, width))

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        self.seen += x.mean()
        for layer in self.layers:
            x = x + layer(x)
        return self.extra(x) if extra else x


def train(
    model: DistributedDataParallel,
    optimizer: Any,
    clip: Callable[[float], Any],
    case: str,
    place: Place,
) -> list[torch.Tensor]:
    """Takes four steps; every process has data of its own."""
    found = []
    for step in range(4):
        parts = 3 if case == "several backwards" else 1
        for part in range(parts):
            seed(100 * step + 10 * part + dist.get_rank())
            extra = case != "unused" or (step + dist.get_rank()) % 2 == 0
            with nullcontext() if part == parts - 1 else model.no_sync():
                loss = model(place.batch(), extra=extra).square().mean()
                loss.backward()
            found.append(loss.detach())
        found.append(clip(0.5).clone())
        optimizer.step()
        if case != "kept gradients" or step % 2:
            optimizer.zero_grad()
    return found


def run(case: str, place: Place = ON_HOST) -> None:
    """Runs one case; fails where anything differs."""
    options = CASES[case]
    adam = torch.optim.AdamW
    # those that are made alike need not begin alike
    first = 1 if "init_sync" in options else dist.get_rank()
    seed(first)
    plain = place.net()
    plain(place.batch())
    around = DistributedDataParallel(plain, **options)
    optimizer = adam(plain.parameters(), lr=0.01)
    expected = train(
        around, optimizer, lambda n: nn.utils.clip_grad_norm_(plain.parameters(), n), case, place
    )
    with place.tier(tight=case in _TIGHT) as tier:
        seed(first)
        model = tier.wrap(place.net())
        model(place.batch())  # where HBM has room, its weights are there now
        around = DistributedDataParallel(model, **options)
        tiered = tier.optimizer(around.module, adam, lr=0.01)
        found = train(around, tiered, tiered.clip_grad_norm_, case, place)
        assert_same(expected, found, f"{case}: losses and norms")
        assert_same(on_host(plain), on_host(model), f"{case}: state")
        for name, param in model.named_parameters():
            ours, theirs = param.grad, plain.get_parameter(name).grad
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                assert_same(theirs, ours.clone(), f"{case}: gradient of {name}")
        tier.unwrap(model)
        assert_same(on_host(plain), on_host(model), f"{case}: unwrapped")


def exchange(model: Net, optimizer: Any, place: Place) -> list[torch.Tensor]:
    """Takes three steps whose gradients, weights and state the loop itself exchanges."""
    found = []
    for step in range(3):
        seed(100 * step + dist.get_rank())
        loss = model(place.batch()).square().mean()
        loss.backward()
        # NCCL takes contiguous tensors only
        grads = [p.grad for p in model.parameters() if p.grad.is_contiguous()]
        for grad in grads:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        works = [dist.all_reduce(grad, async_op=True) for grad in grads]
        for work in works:
            work.wait()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            if param.is_contiguous():
                dist.broadcast(optimizer.state[param]["exp_avg"], 1)
                with torch.no_grad():
                    dist.all_reduce(param, op=dist.ReduceOp.MAX)
    return found


def run_by_hand(place: Place = ON_HOST) -> None:
    """Runs a loop that calls collectives itself; fails where anything differs."""
    adam = torch.optim.AdamW
    seed(1)
    plain = place.net()
    expected = exchange(plain, adam(plain.parameters(), lr=0.01), place)
    for tight in (True, False):
        with place.tier(tight=tight) as tier:
            seed(1)
            model = tier.wrap(place.net())
            found = exchange(model, tier.optimizer(model, adam, lr=0.01), place)
            assert_same(expected, found, f"by hand, {tight}: losses and gradients")
            assert_same(on_host(plain), on_host(model), f"by hand, {tight}: state")


def on_host(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state of a model in host memory, where that of a wrapped one is."""
    return {name: value.cpu() for name, value in model.state_dict().items()}


def main() -> None:
    """Runs every case as one of several processes."""
    rank, processes, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    place = ON_GPU if "cuda" in sys.argv[4:] else ON_HOST
    torch.set_num_threads(1)
    if place is ON_GPU:
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if place is ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=processes)
    if rank:  # other weights are away in the first one
        place = replace(place, least=place.room)
    for case in CASES:
        run(case, place)
    run_by_hand(place)
    print("equal", len(CASES), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the backend may outlive the other process


if __name__ == "__main__":
    main()
