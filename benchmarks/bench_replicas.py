"""Replicas that exchange gradients: a process for each GPU, resident and with the defaults.

Every process trains its replica of a model in a ``DistributedDataParallel``, first as it is, then
in tiers that hold half of the weights' bytes in HBM. Times are those of the slowest process; losses
and weights of all processes are compared with those of the resident run, bit for bit::

    python benchmarks/bench_replicas.py llama gpt2 --set quick --processes 2 --out replicas.json
    python benchmarks/bench_replicas.py layers --device cpu --set tiny --tokens 64 --steps 2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from common import failure, report
from llama import allow_deterministic_products, deterministic, give_back, nbytes_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zoo import KINDS
from zoo_kind import SETS, Draw, loss_of

import tiermem

Row = dict[str, Any]
LEARNING_RATE = 1e-5
OVERLAPS = {"auto": "auto", "forward": "forward", "none": False}


class Steps:
    """Makes steps of one model, and keeps their losses and times."""

    def __init__(self, kind: Any, model: nn.Module, tokens: int, device: torch.device) -> None:
        """Puts the model into a ``DistributedDataParallel``.

        Args:
            kind: Of the model.
            model: In training mode, wrapped or not.
            tokens: Of a step, in each process.
            device: Where it runs.
        """
        self.given = kind.given(model, tokens, Draw(device, tokens + dist.get_rank()), True)
        self.around = DistributedDataParallel(model)
        self.device = device
        self.losses: list[torch.Tensor] = []
        torch.manual_seed(0)  # dropout

    def make(self, optimizer: Any, steps: int) -> list[float]:
        """Makes steps; returns the seconds of each, in the slowest process."""
        times = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            loss = loss_of(self.around(**self.given))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            taken = torch.tensor(time.perf_counter() - began, device=self.device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times.append(taken.item())
            self.losses.append(loss.detach().clone())
        return times


def measure(name: str, options: argparse.Namespace, device: torch.device) -> Row:
    """Measures one model in one of the processes."""
    kind = KINDS[name]
    tokens = min(options.tokens, kind.most_trained)
    steps = options.warm + options.steps

    def build() -> nn.Module:
        torch.manual_seed(dist.get_rank())  # the first one's weights are sent to the others
        return kind.build(options.set, device).train()

    model = build()
    nbytes = nbytes_of([*model.parameters(), *model.buffers()])
    plain = Steps(kind, model, tokens, device)
    resident = plain.make(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), steps)
    kept = [value.cpu() for value in model.state_dict().values()]
    losses = plain.losses
    del model, plain
    give_back(device)
    model = build()
    with tiermem.TierManager(device=device, hbm=int(nbytes * options.share) // 4096 * 4096) as tier:
        tiered = Steps(kind, tier.wrap(model), tokens, device)
        settings: Any = {} if options.overlap is None else {"overlap": OVERLAPS[options.overlap]}
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=LEARNING_RATE, **settings)
        first = tiered.make(optimizer, options.warm)
        tier.reset_stats()
        times = tiered.make(optimizer, options.steps)
        links = tier.stats().links
        up, down = (
            sum(link.nbytes for name, link in links.items() if name.endswith(end)) / options.steps
            for end in (">hbm", ">dram")
        )
        found = [value.cpu() for value in model.state_dict().values()]
        equal = all(map(torch.equal, kept + losses, found + tiered.losses))
        del optimizer
        tier.close(discard=True)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, equal)
    mine, theirs = statistics.median(times), statistics.median(resident[options.warm :])
    return {
        "model": name, "GB": nbytes / 1e9, "tokens": tokens, "processes": dist.get_world_size(),
        "resident s": theirs, "tiermem s": mine, "of resident": theirs / mine,
        "equal": all(every), "first step s": first[0],
        "up of all weights": up / nbytes, "down of all weights": down / nbytes,
    }  # fmt: skip


def run(rank: int, options: argparse.Namespace, store: str) -> None:
    """Measures all models as one of the processes; the first one reports."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    allow_deterministic_products(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.processes,
    )
    rows: list[Row] = []
    for name in options.models:
        try:
            with deterministic():
                rows.append(measure(name, options, device))
        except Exception as error:  # the other processes wait in vain: no further model
            rows.append({"model": name, "note": failure(error)})
            break
        finally:
            give_back(device)
    if rank == 0:
        report("Replicas that exchange gradients", rows, options.out, tall=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["llama"], choices=[*KINDS])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step, in each process")
    parser.add_argument("--warm", type=int, default=24, help="steps before those measured")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--set", choices=SETS, default="full", help="sizes of the models")
    parser.add_argument("--overlap", choices=OVERLAPS, help="of the optimizer; its default if none")
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes, in HBM")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (options, f"{folder}/store"), options.processes)


if __name__ == "__main__":
    main()
