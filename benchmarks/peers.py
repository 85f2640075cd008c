"""The same work, streamed by tiermem and by its peers, in the same run.

Every peer gets a fresh model of the same weights, and runs forward, ``generate()`` and
forward with backward (weights frozen, recomputation); outputs are compared with the resident
ones, element by element. What a peer cannot do, and peers that are not installed, say so in
the table.

With ``--half`` half of the layers' bytes may stay in HBM, and all that lies outside the layers:
tiermem gets that as its budget, peers keep every second layer there and stream the others, each
of which comes up while two are computed. The bound has half of the raw copy then.

With ``--nvme`` weights are on disk, for those that can. Peers read theirs through the page
cache, which is emptied of them before each call; what tiermem reads ahead for the next call has
to have come before its own call ends.

    python benchmarks/peers.py --out benchmarks/results/peers_h200.json
    python benchmarks/peers.py --half --out benchmarks/results/peers_half_h200.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from bench_stream import exactly
from common import bars, failure, report
from llama import (
    SHAPES,
    Call,
    Clock,
    allow_deterministic_products,
    both_ways,
    budget_of,
    build,
    forward,
    generation,
    give_back,
    layers_of,
    on_host,
    same,
)
from pagecache import evict
from raw import RawRead, raw_copy
from single_rank import process_group
from zero3 import zero3_forward

import tiermem

Works = dict[str, tuple[str, Callable[[Any, torch.device], Call]]]
"""Column, kind, and what makes the call."""


def odd_layers(model: Any) -> list[torch.nn.Module]:
    """Returns every second layer."""
    return list(layers_of(model))[1::2]


@contextmanager
def with_tiermem(model: Any, device: torch.device, args: Any) -> Iterator[Any]:
    """Wraps the model."""
    policy = tiermem.Policy(params="nvme" if args.nvme else "dram")
    hbm = budget_of(model, 0.5) if args.half else args.hbm
    with tiermem.TierManager(
        device, hbm=hbm, dram=args.dram, nvme=args.nvme, policy=policy
    ) as tier:
        tier.wrap(model)
        yield tier
        tier.close(discard=True)  # the weights are not needed any more


@contextmanager
def with_accelerate(model: Any, device: torch.device, args: Any) -> Iterator[Any]:
    """accelerate's hooks, weights in host memory or in memory-mapped files."""
    from accelerate import cpu_offload, disk_offload

    if args.half:
        for layer in odd_layers(model):
            cpu_offload(layer.to("cpu"), execution_device=device)
        yield None
        return
    model.to("cpu")
    if args.nvme is None:
        cpu_offload(model, execution_device=device)
        yield None
        return
    with tempfile.TemporaryDirectory(dir=args.nvme) as folder:
        disk_offload(model, folder, execution_device=device)
        yield None


@contextmanager
def with_diffusers(model: Any, device: torch.device, args: Any) -> Iterator[Any]:
    """diffusers' group offloading, a block at a time, on streams; the head stays in HBM."""
    from diffusers.hooks import apply_group_offloading

    settings = {
        "onload_device": device,
        "offload_device": torch.device("cpu"),
        "offload_type": "block_level",
        "num_blocks_per_group": 1,
        "use_stream": device.type == "cuda",
        "non_blocking": True,
    }
    if args.half:
        # It takes the blocks that a module has, and prefetches among those: it is shown the
        # streamed layers alone, and the norm, without which it would not prefetch.
        inner = model.model
        all_of_it = dict(inner._modules)
        streamed = torch.nn.ModuleList(odd_layers(model)).to("cpu")
        inner._modules = {"layers": streamed, "norm": inner.norm}
        try:
            apply_group_offloading(inner, **settings)
        finally:
            inner._modules = all_of_it
        yield None
        return
    model.to("cpu")
    model.lm_head.to(device)
    if args.nvme is None:
        apply_group_offloading(model.model, **settings)
        yield None
        return
    with tempfile.TemporaryDirectory(dir=args.nvme) as folder:
        apply_group_offloading(model.model, **settings, offload_to_disk_path=folder)
        yield None


@contextmanager
def with_fsdp2(model: Any, device: torch.device, args: Any) -> Iterator[Any]:
    """torch's FSDP2 with CPUOffloadPolicy, one rank; the head stays in HBM."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if args.nvme is not None:
        raise NotImplementedError("has no NVMe tier")
    with process_group(device):
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
        if args.half:
            streamed = odd_layers(model)
            for layer in streamed:
                fully_shard(layer.to("cpu"), mesh=mesh, offload_policy=CPUOffloadPolicy())
            its = {p for layer in streamed for p in layer.parameters()}
            resident = {p for p in model.parameters() if p not in its}
            fully_shard(model.model, mesh=mesh, ignored_params=resident)  # has the others go again
            yield None
            return
        model.to("cpu")
        model.lm_head.to(device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
        fully_shard(model.model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        yield None


@contextmanager
def with_torchao(model: Any, device: torch.device, args: Any) -> Iterator[Any]:
    """torchao's CPUOffloadOptimizer, which is for training every parameter."""
    import torchao.optim  # noqa: F401

    raise NotImplementedError("moves gradients and optimizer state; weights stay in HBM")
    yield None


@contextmanager
def with_zero3(model: Any, device: torch.device, args: Any) -> Iterator[Any]:
    """DeepSpeed's ZeRO-3, weights in page-locked host memory or on disk."""
    if args.half:
        raise NotImplementedError("keeps small parameters in HBM, not every second layer")
    if args.nvme is None:
        with zero3_forward(model, device, None):
            yield None
        return
    with tempfile.TemporaryDirectory(dir=args.nvme) as folder:  # it empties its folder first
        with zero3_forward(model, device, folder):
            yield None


PEERS = {
    "tiermem": with_tiermem,
    "diffusers group offloading": with_diffusers,
    "FSDP2 CPUOffloadPolicy": with_fsdp2,
    "torchao CPUOffloadOptimizer": with_torchao,
    "DeepSpeed ZeRO-3": with_zero3,
    "accelerate offload": with_accelerate,
}


PACKAGES = {
    "tiermem": "tiermem",
    "diffusers group offloading": "diffusers",
    "FSDP2 CPUOffloadPolicy": "torch.distributed.fsdp",
    "torchao CPUOffloadOptimizer": "torchao",
    "DeepSpeed ZeRO-3": "deepspeed",
    "accelerate offload": "accelerate",
}


def works(args: argparse.Namespace) -> Works:
    """Returns what is run, the quickest first: training changes the model's mode."""
    found: Works = {}
    for tokens in args.tokens:
        found[f"{tokens} tokens"] = (
            "forward",
            lambda model, device, tokens=tokens: forward(model.model, tokens, device),
        )
    if args.new_tokens:
        found[f"{args.new_tokens} generated"] = (
            "generate",
            lambda model, device: generation(model.eval(), args.new_tokens, device),
        )
    for tokens in args.train_tokens:
        found[f"{tokens} with backward"] = (
            "train",
            lambda model, device, tokens=tokens: both_ways(model.model, tokens, device),
        )
    return found


def raw_seconds(tier: Any, clock: Clock, args: argparse.Namespace) -> float:
    """Returns how long the layers' bytes that have to move take, with nothing around them."""
    if args.nvme is None:
        whole = statistics.median(clock.time(raw_copy(tier), 5, warm=1))
        return whole / 2 if args.half else whole
    with RawRead(tier) as raw:
        return statistics.median(clock.time(partial(raw.read), 5, warm=1))


class Comparison:
    """The rows, and what they are compared with.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        allow_deterministic_products(self.device)
        self.clock = Clock(self.device)
        self.works = works(args)
        self.rows: list[dict[str, Any]] = []
        self.outputs: dict[str, tuple[torch.Tensor, ...]] = {}
        self.seconds: dict[str, float] = {}
        self.raw = 0.0

    def resident(self) -> None:
        """Measures with everything in HBM."""
        model = build(self.args.shape, self.device, head=True)
        for column, (kind, make) in self.works.items():
            call = make(model, self.device)
            with exactly(kind):
                self.outputs[column] = on_host(call())
            self.seconds[column] = statistics.median(self.clock.time(call, 3, warm=1))
        row = {f"{column} s": seconds for column, seconds in self.seconds.items()}
        self.rows.append({"what": "everything in HBM", **row})

    def run(self, name: str) -> None:
        """Measures one peer, as far as it comes."""
        row: dict[str, Any] = {"what": name, "equal": True}
        try:
            import_module(PACKAGES[name])  # no model is built for what is not there
            model = build(self.args.shape, self.device, head=True)
            with PEERS[name](model, self.device, self.args) as tier:
                give_back(self.device)
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                if tier is not None:
                    self.raw = raw_seconds(tier, self.clock, self.args)
                    raw = {f"{column} s": self.raw for column in self.works}
                    share = "half of the layers" if self.args.half else "all layers"
                    self.rows.append({"what": f"raw, {share} once", **raw})
                self.measure(model, row, tier)
                if self.device.type == "cuda":
                    row["peak HBM GB"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        except Exception as error:  # a peer's failure is a result
            row |= {"equal": "", "note": failure(error)}
        self.rows.append(row)

    def measure(self, model: Any, row: dict[str, Any], tier: Any) -> None:
        """Times every kind of work; the first call, whose bits count, warms up.

        Args:
            model: As the peer has made it.
            row: Takes the figures.
            tier: tiermem's, which learns in a few more calls; None for the others, which do not.
        """
        notes = []
        for column, (kind, make) in self.works.items():
            try:
                call = make(model, self.device)
                with exactly(kind):
                    equal = same(call(), self.outputs[column])
                if not equal:
                    row["equal"] = False
                    notes.append(f"{column}: differs")
                for _ in range(self.args.warm if tier is not None else 0):
                    call()
                seconds = statistics.median(self.times(call, tier))
            except Exception as error:
                notes.append(f"{column}: {failure(error)}")
                continue
            row[f"{column} s"] = seconds
            if kind == "forward":
                row[f"{column} of bound"] = max(self.raw, self.seconds[column]) / seconds
            elif kind == "train":
                row[f"{column} of in HBM"] = self.seconds[column] / seconds
        if notes:
            row["note"] = "; ".join(notes)

    def times(self, call: Call, tier: Any) -> list[float]:
        """Returns the seconds of calls, whose bytes come from where they are at home."""
        files = self.args.nvme is not None

        def whole() -> None:
            call()
            if files and tier is not None:
                tier._manager.flush()

        found = []
        for _ in range(self.args.repeats):
            if files:
                evict(self.args.nvme)
            found.append(self.clock.once(whole))
        return found

    def report(self) -> None:
        """Prints and keeps what there is so far."""
        where = "nvme" if self.args.nvme else "dram"
        hbm = "half of the layers" if self.args.half else f"tiermem's hbm {self.args.hbm}"
        title = f"Peers: Llama {self.args.shape}, weights in {where}, {hbm}"
        report(title, self.rows, self.args.out)
        if self.args.out:
            found = {row["what"]: [row.get(f"{c} s") for c in self.works] for row in self.rows}
            drawn = {what: values for what, values in found.items() if any(values)}
            bars(title, list(self.works), drawn, self.args.out)


def main() -> None:
    """Measures every peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="6.7b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2048, 8192, 16384])
    parser.add_argument("--train-tokens", type=int, nargs="*", default=[16384])
    parser.add_argument("--new-tokens", type=int, default=3, help="of generate(); 0 for none")
    parser.add_argument("--hbm", default="2.5GiB")
    parser.add_argument("--dram", default="14GiB")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--nvme", default=None, help="folder: weights on disk")
    where.add_argument("--half", action="store_true", help="half of the layers stay in HBM")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=6, help="calls of tiermem that do not count")
    parser.add_argument("--only", nargs="*", default=list(PEERS), help="names of peers")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    with ExitStack() as stack:
        if args.nvme is not None:  # a folder of its own, whose files the page cache is to lose
            args.nvme = stack.enter_context(tempfile.TemporaryDirectory(dir=args.nvme))
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Runs the resident model and every peer."""
    comparison = Comparison(args)
    comparison.resident()
    for name in PEERS:
        if name in args.only:
            give_back(comparison.device)
            comparison.run(name)
            comparison.report()  # a time limit then leaves what there is


if __name__ == "__main__":
    main()
