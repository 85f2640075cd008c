"""Host time per block, streamed and resident: hooks and scheduling, nothing to wait for.

At one token the host asks for work faster than the device makes it, and waits for nothing:
what a wrapped forward takes longer than a plain one, until the call comes back, is tiermem's
own. Forwards of the two take turns, each begins with the device idle, and medians of the
differences count. In the 6.74 B shape a block is a layer's matrix; in the narrow one it is a
whole layer, with as many tensors as that has, and copies and kernels take next to no time.

On CUDA a third model has its weights in HBM, and beside them a copy for each block that a
streamed forward copies and a wait for it, asked for with nothing but the driver's calls: what
any ring of slots costs the host. What a streamed block takes beyond that is hooks and scheduling.

The parts are timed in a run of their own, each with what it calls in it; their timers add
about 0.3 µs a call.

    python benchmarks/bench_host.py --out benchmarks/results/host_h200.json
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import report
from llama import SHAPES, Call, Clock, budget_of, build, forward, nbytes_of

import tiermem
from tiermem.core.schedule import Planner
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.pointing import Pointing
from tiermem.runtime.acquire import Acquirer
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.replay import Replay
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.placement.evictor import Evictor
from tiermem.runtime.transfers.transfers import Transfers
from tiermem.transfer.copy import HostCopyEngine
from tiermem.transfer.streams import CudaCopyEngine, StreamCopyEngine

PARTS: tuple[tuple[type, str], ...] = (
    (Group, "hold_locked"),
    (Group, "let_go_locked"),
    (Pointing, "point"),
    (Pointing, "away"),
    (BlockManager, "begin_pass"),
    (Acquirer, "acquire"),
    (Acquirer, "decide"),
    (Replay, "use"),
    (Replay, "advance"),
    (Replay, "_swap"),
    (Planner, "touch"),
    (Prefetcher, "run"),
    (Evictor, "place"),
    (Transfers, "fill"),
    (Transfers, "leave"),
    (StreamCopyEngine, "up"),
    (StreamCopyEngine, "use"),
    (HostCopyEngine, "up"),
)


def host_time(clock: Clock, call: Call) -> float:
    """Returns the seconds until a call comes back, begun with the device idle."""
    clock.wait()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def no_collection() -> Iterator[None]:
    """Turns Python's garbage collector off, inside ``with``."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turn(clock: Clock, first: Call, second: Call, repeats: int) -> list[tuple[float, float]]:
    """Returns the host times of two calls that take turns."""
    return [(host_time(clock, first), host_time(clock, second)) for _ in range(repeats)]


@contextmanager
def timers(spent: dict[str, float], calls: dict[str, int]) -> Iterator[None]:
    """Times the parts: seconds and calls by name."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
                calls[name] = calls.get(name, 0) + 1

        return run

    kept = [(owner, name, owner.__dict__[name]) for owner, name in PARTS if name in owner.__dict__]
    try:
        for owner, name, function in kept:
            setattr(owner, name, timed(f"{owner.__name__}.{name}", function))
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


class Ring:
    """Copies of a model's blocks into two slots, a block ahead, beside a model that stays.

    Args:
        model: Has its weights on a CUDA device, and computes with those.
        blocks: Names of the modules where blocks begin that have a copy, and its bytes.
    """

    def __init__(self, model: Any, blocks: Sequence[tuple[str, int]]) -> None:
        device = next(model.parameters()).device
        layers = [model.get_submodule(name) for name, _ in blocks]
        self._copy = CudaCopyEngine(device)
        sizes = [nbytes for _, nbytes in blocks]
        self._slots = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in "ab"]
        source = torch.empty(max(sizes), dtype=torch.uint8).pin_memory()
        self._sources = [source[:size] for size in sizes]
        self._stream = self._copy.up_stream.cuda_stream
        self._events = [self._copy.calls.record(self._stream) for _ in layers]
        for number, layer in enumerate(layers):
            layer.forward = functools.partial(self._run, layer.forward, number)

    def _run(self, inner: Callable[..., Any], number: int, *args: Any, **settings: Any) -> Any:
        """Waits for a layer's copy, computes, and begins a later layer's copy into its slot."""
        calls, compute = self._copy.calls, self._copy.calls.current()
        calls.wait(compute, self._events[number])
        result = inner(*args, **settings)
        slot, later = self._slots[number % 2], (number + 2) % len(self._events)
        source = self._sources[later]
        self._events[later] = calls.copy_behind(
            self._stream,
            (compute,),
            slot.data_ptr(),
            source.data_ptr(),
            source.numel(),
            self._events[later],
        )
        return result


def blocks_of(model: Any) -> list[tuple[str, int]]:
    """Returns where the blocks of a wrapped model begin, by name, and their bytes."""
    calls = [(name, module.__dict__.get("_call_impl")) for name, module in model.named_modules()]
    scopes = [(name, call.scope) for name, call in calls if call is not None and name]
    return [(name, s.groups[0].block.nbytes) for name, s in scopes if s.begins and s.groups]


def measure_ring(
    options: argparse.Namespace,
    plain: Any,
    streamed: dict[str, Any],
    blocks: Sequence[tuple[str, int]],
) -> None:
    """Measures what the same copies cost without us, and enters it into the row of a run."""
    device = torch.device(options.device)
    clock = Clock(device)
    model = build(options.shape, device)
    copies = round(streamed["copies per forward"])
    Ring(model, [blocks[len(blocks) * i // copies] for i in range(copies)])  # modules keep it
    call, reference = forward(model, 1, device), forward(plain, 1, device)
    for _ in range(10):
        call()
        reference()
    with no_collection():
        pairs = in_turn(clock, reference, call, options.repeats)
    clock.wait()  # its memory is in use until then
    extra = statistics.median(mine - theirs for theirs, mine in pairs) / streamed["blocks"] * 1e6
    streamed["of it the driver's us"] = extra
    streamed["hooks and scheduling us"] = streamed["us per block"] - extra


def measure(
    options: argparse.Namespace, what: str, plain: Any
) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """Measures one state of residency; returns a row, one for each of its parts, and the blocks."""
    device = torch.device(options.device)
    clock = Clock(device)
    model = build(options.shape, device)
    weights = nbytes_of([*model.parameters(), *model.buffers()])
    hbm = budget_of(model, 0.2) if what == "streamed" else 2 * weights + (4 << 20)
    reference = forward(plain, 1, device)
    with tiermem.TierManager(device, hbm=hbm, dram=2 * weights + (1 << 20)) as tier:
        tier.wrap(model)
        call = forward(model, 1, device)
        begins = blocks_of(model)
        blocks = sum(r.block.role is tiermem.Role.PARAM for r in tier._manager.parts.table)
        for _ in range(10):
            call()
            reference()
        tier.reset_stats()
        with no_collection():
            pairs = in_turn(clock, reference, call, options.repeats)
            stats = tier.stats()
            spent: dict[str, float] = {}
            calls: dict[str, int] = {}
            with timers(spent, calls):
                for _ in range(options.repeats):
                    host_time(clock, call)
    extra = [(mine - theirs) / blocks * 1e6 for theirs, mine in pairs]
    quarters = statistics.quantiles(extra, n=4) if len(extra) > 1 else extra * 3
    row = {
        "what": what,
        "blocks": blocks,
        "us per block": statistics.median(extra),
        "us per layer": statistics.median(extra)
        * blocks
        / SHAPES[options.shape]["num_hidden_layers"],
        "quartiles": f"{quarters[0]:.1f} to {quarters[2]:.1f}",
        "plain model us per block": statistics.median(p for p, _ in pairs) / blocks * 1e6,
        "copies per forward": sum(link.moves for link in stats.links.values()) / options.repeats,
        "stalls": stats.stalls,
    }
    parts = [
        {
            "what": f"  {name}",
            "us per block": seconds / options.repeats / blocks * 1e6,
            "calls per block": calls[name] / options.repeats / blocks,
        }
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]
    return [row, *parts], begins


def main() -> None:
    """Measures with a fifth of the layers allowed in HBM, and with all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="narrow", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    plain = build(options.shape, torch.device(options.device))
    rows, blocks = measure(options, "streamed", plain)
    if options.device != "cpu":
        measure_ring(options, plain, rows[0], blocks)
    rows += measure(options, "resident", plain)[0]
    report(f"Host time per block, Llama {options.shape}, 1 token", rows, options.out)


if __name__ == "__main__":
    main()
