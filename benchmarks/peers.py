"""The same forward, streamed by tiermem and by its peers, in the same run.

Peers that are not installed are left out, and the table says so. Every one gets
a fresh model of the same weights; outputs are compared with the resident ones.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bench_stream import SHAPES, Clock, build, raw_copy, workload
from common import report, spread

import tiermem

Runner = Callable[[torch.nn.Module, torch.device, argparse.Namespace], Any]


@contextmanager
def with_tiermem(model: torch.nn.Module, device: torch.device, args: Any) -> Iterator[Any]:
    """Wraps the model."""
    with tiermem.TierManager(device, hbm=args.hbm, dram=args.dram) as tier:
        tier.wrap(model)
        yield tier


@contextmanager
def with_accelerate(model: torch.nn.Module, device: torch.device, args: Any) -> Iterator[Any]:
    """accelerate's hooks, weights in host memory."""
    from accelerate import cpu_offload

    model.to("cpu")
    cpu_offload(model, execution_device=device)
    yield None


@contextmanager
def with_diffusers(model: torch.nn.Module, device: torch.device, args: Any) -> Iterator[Any]:
    """diffusers' group offloading, a block at a time, on streams."""
    from diffusers.hooks import apply_group_offloading

    model.to("cpu")
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",
        non_blocking=True,
    )
    yield None


@contextmanager
def with_fsdp2(model: torch.nn.Module, device: torch.device, args: Any) -> Iterator[Any]:
    """torch's FSDP2 with CPUOffloadPolicy, one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
        model.to("cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        yield None
    finally:
        dist.destroy_process_group()


PEERS = {
    "tiermem": with_tiermem,
    "diffusers group offloading": with_diffusers,
    "accelerate cpu_offload": with_accelerate,
    "FSDP2 CPUOffloadPolicy": with_fsdp2,
}


def free(device: torch.device) -> None:
    """Gives memory back between peers."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Measures every peer at every token count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="6.7b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2048, 8192, 16384])
    parser.add_argument("--hbm", default="2.5GiB")
    parser.add_argument("--dram", default="14GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=None, help="names of peers")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    clock = Clock(device)
    rows: list[dict[str, Any]] = []
    resident, outputs = {}, {}
    model = build(args.shape, device)
    for tokens in args.tokens:
        torch.manual_seed(tokens)
        call = workload(model, tokens, train=False, device=device)
        outputs[tokens] = call()
        resident[tokens] = spread(clock.time(call, args.repeats))["median"]
        del call  # it holds the model
    rows.append(
        {"what": "everything in HBM", **{f"{t} tokens s": resident[t] for t in args.tokens}}
    )
    raw = 0.0
    for name, peer in PEERS.items():
        if args.only is not None and name not in args.only:
            continue
        row: dict[str, Any] = {"what": name}
        del model
        free(device)
        model = build(args.shape, device)
        try:
            with peer(model, device, args) as tier:
                free(device)
                if name == "tiermem":
                    raw = spread(raw_copy(tier, "layers", clock, args.repeats))["median"]
                    rows.append({"what": "raw copy", **{f"{t} tokens s": raw for t in args.tokens}})
                for tokens in args.tokens:
                    torch.manual_seed(tokens)
                    call = workload(model, tokens, train=False, device=device)
                    same = torch.equal(call(), outputs[tokens])
                    median = spread(clock.time(call, args.repeats))["median"]
                    row[f"{tokens} tokens s"] = median
                    row[f"{tokens} of bound"] = max(raw, resident[tokens]) / median
                    row["equal"] = row.get("equal", True) and same
                if device.type == "cuda":
                    row["peak HBM GB"] = torch.cuda.max_memory_allocated() / 1e9
        except ImportError as error:
            row["note"] = f"not installed: {error.name}"
        except Exception as error:  # a peer's failure is a result
            row["note"] = f"{type(error).__name__}: {str(error)[:80]}"
        rows.append(row)
    report(f"Peers: forward of Llama {args.shape}, tiermem's hbm {args.hbm}", rows, args.out)


if __name__ == "__main__":
    main()
