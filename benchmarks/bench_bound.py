"""How near forwards come to the bus's bound in virtual time: real blocks and layouts, no GPU.

The quick models of the zoo are made without memory, divided into blocks as ``wrap`` does it with
a quarter of their bytes as HBM, planned and laid out. A pass is then played with a link, a device,
and a host that takes its time for every module's call, use and copy; each begins with all of them
at rest, and ends when they are again. ``--postponed 1`` leaves as much to the begin of a pass
as before it was chosen::

    python benchmarks/bench_bound.py llama vit layers gemma2 t5
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import zoo_kind
from common import report
from torch import nn
from zoo import KINDS

from tiermem.core.block import align_up
from tiermem.core.laps import play, postpone_more
from tiermem.core.loops import Loop
from tiermem.core.plans import share_hbm
from tiermem.core.rounds import Rounds, postponed
from tiermem.nn.groups.blocks import BlockPlan, Inventory
from tiermem.nn.groups.inspect import can_move, find

RATE = 55e9
MEMORY = 2.5e12
LATENCY = 30e-6
USE, COPY, BEGIN = 15e-6, 70e-6, 200e-6
KERNELS = 8e-6
"""Seconds of the device for a module's call, beside the reading of weights."""
CALLS = {
    "llama": 80e-6,
    "vit": 48e-6,
    "layers": 47e-6,
    "gemma2": 150e-6,
    "t5": 63e-6,
    "bart": 28e-6,
    "deberta": 58e-6,
    "swin": 39e-6,
    "phi3": 86e-6,
    "falcon": 83e-6,
    "gemma3": 65e-6,
    "mamba2": 270e-6,
}
"""Seconds of the host for a module's call: of passes on one H100's host, less what tiermem took;
from BART on, of the model in HBM on another one's (``results/calls_more_H100_2026-11-25.json``)."""
PREAMBLE = {"vit": 0.7e-3, "layers": 0.1e-3}
"""Seconds of the host between the begin of a pass and its first module, where not a millisecond."""
_LAID_OUT_LATENCY = 50e-6


@dataclass(frozen=True)
class Case:
    """A model's blocks, and a pass of it.

    Attributes:
        order: Ids of the blocks used.
        calls: Modules called up to each use, and after the last one.
        sizes: Bytes of the blocks that may move, by id.
        nbytes: Bytes of the model.
        hbm: The budget.
        room: What is left of it for those blocks.
    """

    order: list[int]
    calls: list[int]
    sizes: dict[int, int]
    nbytes: int
    hbm: int
    room: int


@contextmanager
def _without_memory() -> Iterator[None]:
    """Makes the zoo's models and inputs on the meta device."""
    import transformers.masking_utils as masks

    kept = zoo_kind.random_bf16, zoo_kind.Draw.normal, masks.find_packed_sequence_indices
    values = torch.Tensor.item, torch.Tensor.__bool__

    @contextmanager
    def bf16(device: torch.device) -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(torch.float32)

    def normal(_: Any, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    own: Any = zoo_kind
    own.random_bf16, own.Draw.normal = bf16, normal
    masks.find_packed_sequence_indices = lambda *_, **__: None  # it looks at values
    torch.Tensor.item = lambda _: 1  # type: ignore[assignment, method-assign]
    torch.Tensor.__bool__ = lambda _: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        own.random_bf16, own.Draw.normal, masks.find_packed_sequence_indices = kept
        torch.Tensor.item, torch.Tensor.__bool__ = values  # type: ignore[method-assign]


def calls_of(kind: zoo_kind.Kind, model: nn.Module) -> list[tuple[bool, str]]:
    """Returns the calls of modules in a forward of one token: begins (True) and ends."""
    seen: list[tuple[bool, str]] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, n=name: seen.append((True, n)))
        module.register_forward_hook(lambda *_, n=name: seen.append((False, n)))
    with torch.no_grad():
        model(**kind.given(model, 1, zoo_kind.Draw(torch.device("meta"), 1), False))
    return seen


def uses_of(blocks: BlockPlan, seen: Sequence[tuple[bool, str]]) -> tuple[list[str], list[int]]:
    """Returns the blocks used, by name, and the calls before each use and after the last."""
    of: dict[str, set[str]] = {}
    for name, members in blocks.params.items():
        for found in members if not name.startswith(".") else ():
            for module, _ in found.places:
                of.setdefault(blocks.territory[module], set()).add(name)
    held: Counter[str] = Counter()
    uses, calls, count = list[str](), list[int](), 0
    for begins, module in seen:
        needed = sorted(of.get(module, ())) if module in blocks.roots else []
        count += begins
        for name in needed:
            if begins and not held[name] and name not in uses[-1:]:
                uses.append(name)
                calls.append(count)
                count = 0
            held[name] += 1 if begins else -1
    return uses, [*calls, count]


def case_of(name: str, share: float) -> Case:
    """Returns the blocks and a pass of a model of the zoo with a share of its bytes as HBM."""
    kind = KINDS[name]
    with _without_memory():
        model = kind.build("quick", torch.device("meta"))
        tie = getattr(model, "tie_weights", None)
        if tie is not None:
            tie()
        seen = calls_of(kind, model)
    params, buffers = find(model, "_parameters"), find(model, "_buffers")
    nbytes = sum(f.tensor.numel() * f.tensor.element_size() for f in [*params, *buffers])
    hbm = int(nbytes * share) // 4096 * 4096
    inventory = Inventory(model, "auto", params, [f for f in buffers if can_move(f)], {}, "auto")
    blocks = inventory.plan(hbm)
    uses, calls = uses_of(blocks, seen)
    packed = {block: align_up(inventory.packed(found)) for block, found in blocks.params.items()}
    ids = {block: number for number, block in enumerate(packed) if not block.startswith(".")}
    sizes = {ids[block]: packed[block] for block in ids}
    fixed = sum(packed.values()) - sum(sizes.values())
    return Case([ids[use] for use in uses], calls, sizes, nbytes, hbm, hbm - fixed - 3 * 4096)


def play_pass(case: Case, name: str, rounds: Rounds) -> tuple[float, float, float]:
    """Returns the seconds of a pass once passes repeat, of the host in it, and the bytes moved."""
    number, found = 0, []
    for _ in range(8 + len(rounds.fetches)):
        host, link, device, moved = BEGIN, 0.0, 0.0, 0
        arrived: dict[int, float] = {}
        free: dict[int, float] = {}
        fetches = list(rounds.fetches[number])
        number = rounds.after(number)
        for event in range(len(case.order) + 1):
            if event:
                block, calls = case.order[event - 1], case.calls[event - 1]
                host += USE + CALLS[name] * calls
                host += PREAMBLE.get(name, 1e-3) if event == 1 else 0.0
                device = max(device, host, arrived.get(block, 0.0))
                device += case.sizes[block] / MEMORY + KERNELS * calls
                free[block] = device
            while fetches and fetches[0].event == event:
                fetch = fetches.pop(0)
                host += COPY
                behind = (free.get(block, 0.0) + LATENCY for block in fetch.leaves)
                link = max(link, host, *behind) + fetch.nbytes / RATE
                arrived[fetch.block] = link
                moved += fetch.nbytes
        host += CALLS[name] * case.calls[-1]
        found.append((max(host, link, device), host, moved))
    seconds, hosts, bytes_moved = zip(*found[-4:], strict=True)
    return sum(seconds) / 4, sum(hosts) / 4, sum(bytes_moved) / 4


def measure(name: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Plans, lays out and plays one model."""
    case = case_of(name, options.share)
    calls = zip(case.order, case.calls, strict=False)
    compute = [KERNELS * count + case.sizes[block] / MEMORY for block, count in calls]
    transfer = {block: nbytes / RATE for block, nbytes in case.sizes.items()}
    loop = Loop(
        3 * case.order, case.sizes, case.room, 3 * compute, transfer, _LAID_OUT_LATENCY,
        laid_out=True,
    )  # fmt: skip
    plan = share_hbm(loop)
    out = loop.slower.by_laps(plan)
    ways = loop.ways.get(plan.residents)
    if out is None or ways is None:
        raise SystemExit(f"{name} cannot be laid out")
    out = postpone_more(out, ways, compute, transfer, _LAID_OUT_LATENCY)
    rounds = play(out.visits, out.layout, ways.one, {})
    if rounds is None:
        raise SystemExit(f"{name} cannot be laid out")
    count = out.postponed if options.postponed is None else options.postponed
    seconds, host, moved = play_pass(case, name, postponed(rounds, count, ways.one.lengths))
    beyond = case.nbytes - case.hbm
    return {
        "model": name,
        "uses": len(case.order),
        "copies": len(out.visits),
        "slots MB": plan.reserve / 1e6,
        "moved beyond what does not fit, %": 100 * (moved / beyond - 1),
        "left to the begin": count,
        "raw ms": 1e3 * beyond / RATE,
        "ms": 1e3 * seconds,
        "host ms": 1e3 * host,
        "share of raw": beyond / RATE / seconds,
    }


def main() -> None:
    """Plays the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=[*CALLS])
    parser.add_argument("--share", type=float, default=0.25, help="of the bytes, in HBM")
    parser.add_argument("--postponed", type=int, help="fetches left to the begin of a pass")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    rows = [dict(measure(name, options)) for name in options.models]
    report("Forwards in virtual time", rows, options.out)


if __name__ == "__main__":
    main()
