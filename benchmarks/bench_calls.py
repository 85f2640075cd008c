"""How each of the first forwards of a model goes, with defaults, a quarter of its bytes in HBM.

A caller who measures makes one or two calls to warm up and times the next few, so what counts is
how soon passes are no longer measured, planned and decided. Each call is timed by itself, the
device idle before it. ``later`` is the median of those from the third on, as a share of the bound,
and ``first of later`` the first call's speed as a share of theirs; ``equal`` says whether the first
call's output and a last one's have the bits of the model in HBM. A model that fails is a row that
says so. Any model of :mod:`zoo`, those of :mod:`zoo_more` included::

    python benchmarks/bench_calls.py llama vit layers --tokens 1 2048 --calls 8 --out calls.json
    python benchmarks/bench_calls.py phi3 bert swin --device cpu --set tiny --tokens 1 128
    python benchmarks/bench_calls.py llama --torchao Int8WeightOnlyConfig --out quantized.json

On a machine whose host others use as well the model in HBM is faster or slower from minute to
minute: ``--turns`` calls one that stays there after each call, and shares are of those.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from common import report, rows_of
from llama import give_back, on_host
from raw import raw_copy
from torch import Tensor
from zoo import KINDS
from zoo_kind import SETS, Draw, first_of

import tiermem
from tiermem.nn.tensors.shells import nbytes_of as bytes_inside
from tiermem.runtime.services.packer import Packer

Row = dict[str, Any]


class Watch:
    """Counts the plans that a manager makes, and the seconds that takes."""

    def __init__(self, tier: tiermem.TierManager) -> None:
        """Watches the manager of a tier."""
        self.manager: Any = tier._manager
        self.seconds = 0.0
        maker = self.manager.prefetcher._maker
        make = maker.make

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return make(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began

        maker.make = timed

    def how(self) -> str:
        """Returns how the pass under way goes."""
        run = self.manager.replay.run
        how = "decided" if run is None else "laid out" if run.arranged else "recorded"
        return f"{how}, measured" if self.manager.parts.pass_timer.pending else how

    def moved(self) -> int:
        """Returns the bytes moved so far."""
        return sum(self.manager.parts.counters.bytes_by_link().values())  # stats() would measure


def seconds_of(call: Callable[[], Any], device: torch.device) -> tuple[float, float, Any]:
    """Returns the seconds of a call to its end on the device, those to its return, its output."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    output = call()
    returned = time.perf_counter()
    wait()
    return time.perf_counter() - began, returned - began, output


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, element by element, NaN equal to NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    )


def later(times: Sequence[float], bound: float) -> Row:
    """Returns the figures of the calls from the third on, where there are any."""
    if len(times) < 3:
        return {}
    usual = statistics.median(times[2:])
    return {"later": bound / usual, "first of later": usual / times[0]}


def measure(name: str, options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Measures one model; yields a row for each length."""
    kind = KINDS[name]
    torch.manual_seed(0)
    model = kind.build(options.set, device)
    if options.torchao:
        quantization = import_module("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, options.torchao)())
    nbytes = sum(map(bytes_inside, [*model.parameters(), *model.buffers()]))
    hbm = int(nbytes * options.share) // 4096 * 4096
    draws = {
        tokens: kind.given(model, tokens, Draw(device, tokens), False) for tokens in options.tokens
    }
    inside, expected = {}, {}
    with torch.no_grad():
        for tokens, given in draws.items():
            call = partial(model, **given)
            inside[tokens] = statistics.median(seconds_of(call, device)[0] for _ in range(8))
            (expected[tokens],) = on_host((first_of(call()),))
    beside = copy.deepcopy(model) if options.turns else None
    give_back(device)
    with tiermem.TierManager(device=device, hbm=hbm) as tier, torch.no_grad():
        model = tier.wrap(model)
        give_back(device)
        up = raw_copy(tier, nbytes - hbm, "")
        raw = statistics.median(seconds_of(up, device)[0] for _ in range(3))
        watch = Watch(tier)
        for tokens, given in draws.items():
            resident = partial(beside, **given) if beside is not None else None
            measured = Measured(inside[tokens], raw, expected[tokens])
            row = {"model": name, "tokens": tokens, "GB": nbytes / 1e9}
            calls = partial(model, **given), resident
            yield row | in_turn(calls, watch, measured, options.calls, device)
        tier.close(discard=True)


@dataclass(frozen=True)
class Measured:
    """What was measured of a length beforehand.

    Attributes:
        inside: Seconds of a call with everything in HBM.
        raw: Seconds of the raw copy of what does not fit.
        expected: The output.
    """

    inside: float
    raw: float
    expected: Tensor


def in_turn(
    calls: tuple[Callable[[], Any], Callable[[], Any] | None],
    watch: Watch,
    measured: Measured,
    count: int,
    device: torch.device,
) -> Row:
    """Measures so many calls, each followed by one of the model in HBM if that is given.

    Returns:
        What a row says of them.
    """
    call, resident = calls
    times, beside, notes = [], [], []
    for number in range(count):
        before, watch.seconds = watch.moved(), 0.0
        took, host, output = seconds_of(call, device)
        note = watch.how()
        if watch.seconds:
            note += f", plan {1e3 * watch.seconds:.0f} ms"
        notes.append(note)
        moved = watch.moved() - before
        times.append(took)
        if number == 0:
            first = first_of(output)
        del output  # the next call has the memory
        if resident is not None:
            beside.append(seconds_of(resident, device)[0])
    inside = statistics.median(beside) if beside else measured.inside
    bound = max(inside, measured.raw)
    row: Row = {"in HBM ms": 1e3 * inside, "raw ms": 1e3 * measured.raw}
    for number, (took, note) in enumerate(zip(times, notes, strict=True), 1):
        row[f"call {number}"] = f"{bound / took:.2f} ({1e3 * took:.1f} ms, {note})"
    row |= {"host ms, last": 1e3 * host, "GB moved, last": moved / 1e9, **later(times, bound)}
    found = on_host((first, first_of(call())))
    row["equal"] = all(same_bits(output, measured.expected) for output in found)
    return row


def main() -> None:
    """Measures the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["llama", "vit", "layers"], choices=[*KINDS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2048])
    parser.add_argument("--calls", type=int, default=8, help="of each length")
    parser.add_argument("--set", choices=SETS, default="quick", help="sizes of the models")
    parser.add_argument("--share", type=float, default=0.25, help="of the bytes, in HBM")
    parser.add_argument(
        "--turns", action="store_true", help="after each call one of the model in HBM"
    )
    parser.add_argument("--no-packing", action="store_true", help="weights come up as they are")
    parser.add_argument(
        "--torchao", help="a class of its configurations: weights are quantized by it"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.no_packing:
        Packer.pack = lambda *_: 0  # type: ignore[method-assign]
    rows = rows_of(
        options.models,
        partial(measure, options=options, device=device),
        partial(give_back, device),
    )
    title = "First forwards with defaults: share of max(in HBM, raw copy of what does not fit)"
    report(title, rows, options.out, tall=True)


if __name__ == "__main__":
    main()
