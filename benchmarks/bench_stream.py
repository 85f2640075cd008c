"""A Llama shape streamed from DRAM (or NVMe): time per forward beside the bound.

The bound is max(everything in HBM, raw copy of the layers' bytes), both
measured in the same run. With ``--train`` the weights are frozen and the time
is of forward plus backward with recomputation.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import torch
from common import report, spread

import tiermem
import tiermem.core.block

SHAPES = {
    "6.7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "heads": 32},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "heads": 24},
    "1b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 8, "heads": 24},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "heads": 4},
}


def build(shape: str, device: torch.device) -> torch.nn.Module:
    """Returns a bf16 Llama of random weights without its head."""
    from transformers import LlamaConfig, LlamaModel

    sizes = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    config = LlamaConfig(
        vocab_size=32000 if shape != "tiny" else 128,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation="sdpa",
        **sizes,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaModel(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


class Clock:
    """Times calls on the device, or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        """Remembers the device."""
        self.cuda = device.type == "cuda"

    def time(self, call: Any, repeats: int, warm: int = 2) -> list[float]:
        """Returns seconds per call."""
        for _ in range(warm):
            call()
        times = []
        for _ in range(repeats):
            if self.cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return times


def raw_copy(tier: tiermem.TierManager, names: str, clock: Clock, repeats: int) -> list[float]:
    """Times one copy of every layer's home bytes to the device, back to back."""
    manager = tier._manager
    records = [r for r in manager.table if names in r.block.name and r.home_extent is not None]
    sources = [manager.homes.arena.bytes_of(r.home_extent) for r in records]
    target = torch.empty(max(s.numel() for s in sources), dtype=torch.uint8, device=manager.device)

    def copy() -> None:
        for source in sources:
            target[: source.numel()].copy_(source, non_blocking=True)

    return clock.time(copy, repeats, warm=1)


def raw_read(tier: tiermem.TierManager, names: str, clock: Clock, repeats: int) -> list[float]:
    """Times one O_DIRECT read of every layer's home bytes by the bare I/O engine."""
    from tiermem.io.engine import IoOp, IoRequest
    from tiermem.io.probe import choose_engine
    from tiermem.storage.arena import HostArena

    manager = tier._manager
    swap = manager.homes.swap
    chunk, depth = manager.homes.chunk, 8
    arena = HostArena(tiermem.Tier.DRAM, chunk * depth)
    arena.bytes_of(tiermem.core.block.Extent(0, chunk * depth)).fill_(1)
    records = [r for r in manager.table if names in r.block.name and r.home_extent is not None]
    pieces = [piece for r in records for piece in swap.pieces(r.home_extent)]
    engine = choose_engine()[0]()
    engine.open(swap.fds, [(arena.address, chunk * depth)])

    def read() -> None:
        free, waiting, left = list(range(depth)), list(pieces), len(pieces)
        while left:
            batch = []
            while free and waiting:
                piece, slot = waiting.pop(), free.pop()
                batch.append(
                    IoRequest(
                        IoOp.READ,
                        piece.file,
                        piece.file_offset,
                        arena.address + slot * chunk,
                        piece.nbytes,
                        slot,
                    )
                )
            engine.submit(batch)
            for done in engine.wait(None):
                if done.errno:
                    raise OSError(done.errno, "raw read failed")
                free.append(done.token)
                left -= 1

    times = clock.time(read, repeats, warm=1)
    engine.close()
    return times


def workload(model: torch.nn.Module, tokens: int, *, train: bool, device: torch.device) -> Any:
    """Returns a call that runs the model once."""
    length = min(tokens, 4096)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (max(1, tokens // length), length), device=device)
    if not train:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=ids).last_hidden_state

        return forward
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()

    def both() -> torch.Tensor:
        embedded.grad = None
        model(inputs_embeds=embedded).last_hidden_state.float().sum().backward()
        return embedded.grad

    return both


def main() -> None:
    """Measures every token count and prints a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="6.7b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2048, 8192, 16384])
    parser.add_argument("--hbm", default="2.5GiB")
    parser.add_argument("--dram", default="14GiB")
    parser.add_argument("--nvme", default=None)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--trace", default=None, help="write a Chrome trace of the last forward")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    clock = Clock(device)
    model = build(args.shape, device)
    if args.train:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    resident, outputs = {}, {}
    for tokens in args.tokens:
        call = workload(model, tokens, train=args.train, device=device)
        torch.manual_seed(tokens)
        call = workload(model, tokens, train=args.train, device=device)
        outputs[tokens] = call().float().sum().item()
        resident[tokens] = clock.time(call, args.repeats)
        del call
    depth: Any = args.depth if args.depth == "auto" else int(args.depth)
    began = time.perf_counter()
    policy = tiermem.Policy(params="nvme" if args.nvme else "dram")
    rows = []
    with tiermem.TierManager(
        device, hbm=args.hbm, dram=args.dram, nvme=args.nvme, policy=policy, prefetch_depth=depth
    ) as tier:
        opened = time.perf_counter() - began
        tier.wrap(model)
        wrapped = time.perf_counter() - began - opened
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raw = (raw_read if args.nvme else raw_copy)(tier, "layers", clock, args.repeats)
        for tokens in args.tokens:
            torch.manual_seed(tokens)
            call = workload(model, tokens, train=args.train, device=device)
            same = call().float().sum().item() == outputs[tokens]
            call()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            tier.reset_stats()
            times = clock.time(call, args.repeats)
            stats = tier.stats()
            if args.nvme:  # a shared disk drifts: the bound is from just before and just after
                raw = [*raw[-args.repeats :], *raw_read(tier, "layers", clock, args.repeats)]
            bound = max(spread(resident[tokens])["median"], spread(raw)["median"])
            median = spread(times)["median"]
            link = "nvme->hbm" if args.nvme else "dram->hbm"
            moved = stats.links[link].nbytes / (args.repeats + 2) if link in stats.links else 0
            rows.append(
                {
                    "tokens": tokens,
                    "in HBM s": spread(resident[tokens])["median"],
                    "raw copy s": spread(raw)["median"],
                    "tiermem s": median,
                    "min": min(times),
                    "max": max(times),
                    "of bound": bound / median,
                    "GB moved": moved / 1e9,
                    "GB/s": moved / median / 1e9,
                    "hit rate": stats.hit_rate,
                    "equal": same,
                    "peak HBM GB": torch.cuda.max_memory_allocated() / 1e9
                    if device.type == "cuda"
                    else 0.0,
                }
            )
            host = time.perf_counter()
            call()
            rows[-1]["host us/block"] = (
                (time.perf_counter() - host) / model.config.num_hidden_layers * 1e6
            )
        if args.trace:
            tier.timeline.chrome_trace(args.trace)
    report(
        f"Llama {args.shape}, {'forward + backward, frozen' if args.train else 'forward'}, "
        f"hbm {args.hbm}, from {'nvme' if args.nvme else 'dram'}",
        rows,
        args.out,
        opened_s=opened,
        wrap_s=wrapped,
    )


if __name__ == "__main__":
    main()
