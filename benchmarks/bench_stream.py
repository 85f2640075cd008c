"""A Llama shape streamed from DRAM or NVMe, beside the bound measured in the same run.

``--what`` says what is run, one table each:

* ``forward``: the bound is max(everything in HBM, raw copy of the layers' bytes).
* ``half``: half of the layers' bytes are allowed in HBM beside what lies outside the
  layers, and the bound has half of the raw copy. Room that an embedding does not need,
  since its rows are read where they lie, is for layers; those rows count as moved.
* ``train``: forward and backward with recomputation, weights frozen. Outputs and input
  gradients are compared under deterministic kernels, on the device, element by element; the
  columns say first whether two resident runs agree.
* ``generate``: seconds per token with a KV cache, beside the raw copy of what moves for one.

From NVMe the bound is max(raw O_DIRECT read of the bytes that moved, everything in HBM);
reads and runs take turns, because shared disks drift.

Forwards are timed ``--row`` at a time, as in a loop, streamed and resident rows in turns. What is
fetched ahead for the next row has to have come before a row ends, as many bytes as were there
when it began; with one at a time that counts for each of them, though the next would hide it.

    python benchmarks/bench_stream.py --what forward half train generate \\
        --out benchmarks/results/stream_{what}_H200.json
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import bars, report
from llama import (
    SHAPES,
    Call,
    Clock,
    Peak,
    allow_deterministic_products,
    both_ways,
    budget_of,
    build,
    deterministic,
    forward,
    generation,
    give_back,
    nbytes_of,
    on_host,
    peak_of,
    same,
)
from raw import RawRead, nbytes_of_blocks, raw_copy

import tiermem
from tiermem.config import parse_size

WHATS = ("forward", "half", "train", "generate")
_WORK: dict[str, Callable[[Any, int, torch.device], Call]] = {
    "forward": forward,
    "half": forward,
    "train": both_ways,
    "generate": generation,
}


@dataclass(frozen=True)
class Resident:
    """What a run with everything in HBM gave.

    Attributes:
        call: Runs it again, on weights of its own.
        outputs: In host memory.
        again: Whether a second run gave the same bits.
        peak: The device's memory.
        own: Bytes that the run keeps on the device from call to call, beside the weights: its
            input and what comes back.
    """

    call: Call
    outputs: tuple[torch.Tensor, ...]
    again: bool
    peak: Peak
    own: int


class Bench:
    """The rows of one shape on one device.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        allow_deterministic_products(self.device)
        self.clock = Clock(self.device)

    def sizes(self, what: str) -> list[int]:
        """Returns the token counts to run."""
        if what == "generate":
            return [self.options.new_tokens]
        return self.options.train_tokens if what == "train" else self.options.tokens

    def resident(self, twin: Any, what: str, tokens: int) -> Resident:
        """Prepares the run with everything in HBM."""
        call = _WORK[what](twin, tokens, self.device)
        self.clock.time(call, 1)
        with exactly(what):
            outputs = on_host(call())
            again = same(call(), outputs)
        peak = peak_of(call, self.device)  # kernels are loaded
        own = 0
        if self.device.type == "cuda":
            weights = nbytes_of([*twin.parameters(), *twin.buffers()])
            own = torch.cuda.memory_allocated(self.device) - weights
        return Resident(call, outputs, again, peak, own)

    @contextmanager
    def streamed(self, model: Any, what: str, notes: dict[str, Any]) -> Iterator[Any]:
        """Wraps the model; from here on its own memory is free."""
        options = self.options
        hbm = budget_of(model, 0.5) if what == "half" else parse_size(options.hbm)
        depth: Any = options.depth if options.depth == "auto" else int(options.depth)
        began = time.perf_counter()
        with tiermem.TierManager(
            self.device,
            hbm=hbm,
            dram=options.dram,
            nvme=options.nvme,
            policy=tiermem.Policy(params="nvme" if options.nvme else "dram"),
            prefetch_depth=depth,
        ) as tier:
            notes["opened_s"] = time.perf_counter() - began
            tier.wrap(model)
            notes["wrap_s"] = time.perf_counter() - began - notes["opened_s"]
            notes["hbm"], notes["layers_nbytes"] = hbm, nbytes_of_blocks(tier)
            give_back(self.device)
            yield tier
            tier.close(discard=True)  # the weights are not needed any more

    def rows(self, what: str, notes: dict[str, Any]) -> list[dict[str, Any]]:
        """Measures one kind of work."""
        head = what == "generate"
        twin = build(self.options.shape, self.device, head=head)
        references = [self.resident(twin, what, tokens) for tokens in self.sizes(what)]
        model = build(self.options.shape, self.device, head=head)
        rows = []
        with self.streamed(model, what, notes) as tier:
            for tokens, reference in zip(self.sizes(what), references, strict=True):
                call = _WORK[what](model, tokens, self.device)
                measure = self.from_nvme if self.options.nvme else self.from_dram
                row = {"tokens": tokens} | measure(tier, call, reference, what, tokens)
                with exactly(what):
                    row["resident again equal"] = reference.again
                    row["equal"] = same(call(), reference.outputs)
                row |= self.memory(call, reference, notes["hbm"])
                rows.append(row)
                self.losses(tier, call, row)
            if self.options.trace:
                tier.timeline.chrome_trace(self.options.trace)
            del call
        return rows

    def from_dram(
        self, tier: Any, call: Call, reference: Resident, what: str, tokens: int
    ) -> dict[str, Any]:
        """Measures beside raw copies from the same memory."""
        repeats = self.options.repeats
        copy, total = raw_copy(tier), nbytes_of_blocks(tier)
        raw = self.clock.time(copy, repeats, warm=1)
        for _ in range(self.options.warm):
            call()
        row_of = self.options.row if what in ("forward", "half") else 1
        times, resident, moved, stats = self.timed(tier, call, reference, row_of, repeats)
        raw += self.clock.time(copy, repeats, warm=1)
        whole = statistics.median(raw)
        needed = whole / 2 if what == "half" else whole
        per_move = whole * moved / total
        row = self.spread(times, resident, moved, stats, row_of)
        row["raw copy s"] = whole
        if what == "generate":
            second = statistics.median(times) / tokens
            row["s per token"] = second
            row["raw per token s"] = per_move / tokens
            row["of raw"] = per_move / tokens / second
            row["of raw, layers"] = whole / second
            return row
        median, within = statistics.median(times), statistics.median(resident)
        row["of bound"] = max(within, needed) / median
        row["of bound, moved"] = max(within, per_move) / median
        return row

    def from_nvme(
        self, tier: Any, call: Call, reference: Resident, what: str, tokens: int
    ) -> dict[str, Any]:
        """Measures in turn with raw reads of as many bytes of the same file.

        The disk is left alone by tiermem while the raw reads run. Calls are timed a few in a
        row, as in a loop: what is read ahead in one is used in the next.
        """
        for _ in range(self.options.warm):
            call()
        tier._manager.flush()
        found: list[tuple[float, float, float]] = []
        whole, moves = [], []
        with RawRead(tier) as raw:
            row_of = self.options.row
            *_, moved, stats = self.timed(tier, call, reference, row_of)
            for _ in range(self.options.repeats):
                before = self.clock.once(partial(raw.read, int(moved)))
                took, within, moved, stats = self.timed(tier, call, reference, row_of)
                after = self.clock.once(partial(raw.read, int(moved)))
                whole.append(self.clock.once(raw.read))
                moves.append(moved)
                found.append((took[0], within[0], (before + after) / 2))
        row = self.spread([f[0] for f in found], [f[1] for f in found], 0.0, stats, row_of)
        row["GB moved"] = statistics.median(moves) / 1e9
        row["raw read of the moved s"] = statistics.median(f[2] for f in found)
        row["raw read of all s"] = statistics.median(whole)
        row["GB in all"] = nbytes_of_blocks(tier) / 1e9
        row["of bound"] = statistics.median(max(within, raw) / took for took, within, raw in found)
        row["O_DIRECT"], row["engine"] = stats.direct_io, stats.io_engine
        row["reads into"], row["GB kept in DRAM"] = stats.reads_into, stats.kept_in_dram / 1e9
        return row

    def timed(
        self, tier: Any, call: Call, reference: Resident, in_a_row: int, repeats: int = 1
    ) -> tuple[list[float], list[float], float, Any]:
        """Times a call in turns with the resident one: a device's clocks drift with its heat.

        The last call in a row ends when what is fetched ahead for the next one has come: as
        many bytes were there before the first began.

        Returns:
            Seconds, seconds resident, bytes that came up from the weights' home per call, rows
            looked at in place among them, and statistics.
        """

        def whole(one: Call, end: Callable[[], None] | None) -> None:
            for _ in range(in_a_row):
                one()
            if end is not None:
                end()

        tier.reset_stats()
        times, resident = [], []
        for _ in range(repeats):
            alone = self.clock.once(partial(whole, reference.call, None))
            resident.append(alone / in_a_row)
            times.append(self.clock.once(partial(whole, call, tier._manager.flush)) / in_a_row)
        stats = tier.stats()
        links = ("nvme->hbm", "nvme->dram") if self.options.nvme else ("dram->hbm",)
        moved = sum(stats.links[link].nbytes for link in links if link in stats.links)
        moved += stats.read_in_place
        return times, resident, moved / repeats / in_a_row, stats

    def losses(self, tier: Any, call: Call, row: dict[str, Any]) -> None:
        """Adds where the time goes: calls in a row, measured by tiermem itself."""
        tier.reset_stats()
        for _ in range(3):
            call()
        self.clock.wait()
        call()
        found = tier.stats()
        row["limit"] = found.limit
        for name, seconds in sorted(found.losses.items()):
            row[f"{name} lost"] = seconds

    def spread(
        self, times: list[float], resident: list[float], moved: float, stats: Any, row_of: int
    ) -> dict[str, Any]:
        """Returns the columns that every row has; statistics are of so many calls in a row."""
        calls = row_of if self.options.nvme else row_of * len(times)
        return {
            "in HBM s": statistics.median(resident),
            "tiermem s": statistics.median(times),
            "min": min(times),
            "max": max(times),
            "GB moved": moved / 1e9,
            "GB of it in place": stats.read_in_place / 1e9 / calls,
            "hit rate": stats.hit_rate,
            "stalls ms": stats.stall_seconds * 1e3 / calls,
        }

    def memory(self, call: Call, reference: Resident, hbm: int) -> dict[str, Any]:
        """Returns the device's memory above the budget, beyond the resident run's.

        The resident model is there in both, and what it keeps is there twice.
        """
        if self.device.type != "cuda":
            return {}
        peak = peak_of(call, self.device)
        resident = reference.peak
        mib, twice = 2**20, hbm + reference.own
        return {
            "peak HBM GB": peak.allocated / 1e9,
            "above budget MiB": (peak.allocated - twice - resident.allocated) / mib,
            "above budget, device MiB": (peak.device - twice - resident.device) / mib,
        }


def exactly(what: str) -> Any:
    """Returns the context in which bits can be compared: flash backward adds in any order."""
    return deterministic() if what == "train" else nullcontext()


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="*", default=["forward"], choices=WHATS)
    parser.add_argument("--shape", default="6.7b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2048, 8192, 16384])
    parser.add_argument("--train-tokens", type=int, nargs="*", default=[16384])
    parser.add_argument("--new-tokens", type=int, default=16, help="that generate() makes")
    parser.add_argument("--hbm", default="2.5GiB")
    parser.add_argument("--dram", default="14GiB")
    parser.add_argument("--nvme", default=None, help="folder for the swap file")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--repeats", type=int, default=7, help="rows of calls")
    parser.add_argument("--row", type=int, default=4, help="forwards that are timed as one")
    parser.add_argument("--warm", type=int, default=8, help="calls before those that count")
    parser.add_argument("--trace", default=None, help="write a Chrome trace of the last run")
    parser.add_argument("--out", default=None, help="JSON file; {what} in it is replaced")
    options = parser.parse_args()
    if options.out and len(options.what) > 1 and "{what}" not in options.out:
        parser.error("--out needs {what} in its name where several kinds of work are run")
    return options


def main() -> int:
    """Runs every kind of work; one that fails does not keep the others from running."""
    options = arguments()
    bench = Bench(options)
    home = "nvme" if options.nvme else "dram"
    failed = 0
    for what in options.what:
        notes: dict[str, Any] = {"what": what, "shape": options.shape, "home": home}
        try:
            rows = bench.rows(what, notes)
        except Exception as error:
            traceback.print_exc()
            rows = [{"note": f"{type(error).__name__}: {str(error)[:300]}"}]
            failed += 1
        give_back(bench.device)
        title = f"Llama {options.shape}, {what}, hbm {notes.get('hbm', '?')}, weights in {home}"
        out = options.out and options.out.replace("{what}", what)
        report(title, rows, out, **notes)
        if out and "note" not in rows[0]:
            names = ("in HBM s", "raw copy s", "raw read of the moved s", "tiermem s")
            series = {n: [row[n] for row in rows] for n in names if n in rows[0]}
            bars(title, [f"{row['tokens']} tokens" for row in rows], series, out)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
