"""Full training of a Llama shape out of HBM, beside the resident step and measured bounds.

``--what`` says what is run, one table each; every row is kept as soon as it is measured:

* ``full``: weights, gradients, masters and states in DRAM (or, with ``--nvme``, weights, masters
  and states on disk and gradients in DRAM), beside the same model with everything in HBM, in one
  process, in turn. The bound is the longest of the resident compute, the bytes that moved copied
  both ways at once, and the host's share stepped by a bare AdamW beside those copies; with files
  it is the bytes that moved read and written at once by the bare I/O engine.
* ``peers``: the same step by FSDP2, torchao and DeepSpeed, with fp32 masters and states; one that
  is not installed or fails says so.
* ``capped``: a process that may use no more than ``--cap`` of the device, and the resident step
  in one of its own.
* ``residual``: forward and backward with recomputation, the residual stream in DRAM, beside the
  plain model, for each number of ``--layers``.
* ``saved``: the same without recomputation, with every saved tensor in DRAM.

    python benchmarks/bench_train.py --what full --out benchmarks/results/train_{what}_H200.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from functools import partial
from typing import Any

import torch
from bench_memory import host_memory
from common import failure, report
from llama import SHAPES, Clock, allow_deterministic_products, deterministic, give_back, peak_of
from offloaded import Offload
from profile_step import profile_step
from train_peers import PEERS
from train_rows import (
    Row,
    disk_bound,
    link_bound,
    moved_of,
    reasons,
    speeds_of,
    split_of,
    spread_of,
)
from training import (
    DTYPES,
    Data,
    Loop,
    Resident,
    Tiered,
    bits_of,
    build,
    differences,
    opened,
    parameters_of,
    settle_python,
    taking_turns,
)

from tiermem.config import format_size, parse_size

OVERLAPS = ("auto", "forward", "backward")
WHATS = ("full", "peers", "capped", "residual", "saved")
_HBM = {"6.7b": "2.25GiB", "3b": "2GiB", "1b": "1.75GiB", "narrow": "64MiB", "tiny": "1MiB"}
_LEAST_WARM = 4
"""Steps until a loop's plan is made, and what it keeps in HBM is there."""
_ZERO_INFINITY_S = 11.4
"""Its best step of the 1.0 B shape from NVMe on the reference machine, in seconds."""


class Bench:
    """The rows of one shape on one device.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.perf_counter()
        self.device = torch.device(options.device)
        allow_deterministic_products(self.device)
        self.clock = Clock(self.device)
        square = torch.ones(256, 256, device=self.device, dtype=torch.bfloat16)
        (square @ square).sum().item()  # the context, and the libraries that every model loads
        self.before = host_memory()["rss"]
        self.rows: list[Row] = []

    # -- what all of them need -------------------------------------------

    def build(self, recompute: bool = True, layers: int | None = None) -> Any:
        """Returns a fresh model."""
        options = self.options
        layers = layers or (options.layers[0] if options.layers else None)
        return build(
            options.shape, self.device, chunks=options.chunks, layers=layers, recompute=recompute
        )

    def loop(self, trainer: Any, tokens: int, micro: int) -> Loop:
        """Returns a trainer's steps."""
        data = Data(tokens, trainer.model.head.out_features, self.device)
        if isinstance(trainer, Tiered):
            trainer.optimizer.accumulate(micro)
        return Loop(trainer, data, micro, self.clock)

    def keep(self, what: str, row: Row) -> None:
        """Prints and writes what there is so far; a row that is kept again has grown."""
        if not any(row is known for known in self.rows):
            self.rows.append(row)
        options = self.options
        out = options.out and options.out.replace("{what}", what)
        home = "NVMe" if options.nvme else "DRAM"
        title = f"Full training, Llama {options.shape}, {what}, out of HBM in {home}"
        report(title, self.rows, out, tall=True, what=what, shape=options.shape)
        sys.stdout.flush()

    def reached(self, what: str) -> None:
        """Prints the seconds since the beginning, so that one sees where they go."""
        print(f"{time.perf_counter() - self.began:7.1f} s: {what}", file=sys.stderr, flush=True)

    def tokens_and_micro(self) -> list[tuple[int, int]]:
        """Returns what is run: tokens of a micro-batch, and how many are a step."""
        return [(tokens, micro) for tokens in self.options.tokens for micro in self.options.micro]

    def manager(self, model: Any, **settings: Any) -> Any:
        """Opens the tiers for a model and all that belongs to it."""
        options = self.options
        count = parameters_of(model)
        gradients = 4 if options.grad_dtype == "fp32" else 2
        kept = gradients if options.nvme else 2 + gradients + 4 + 8
        # a block is whole pages, and its tensors whole 256 bytes
        dram = int(count * kept * 1.005) + (64 << 20) + settings.pop("activations_nbytes", 0)
        if options.dram:
            dram = parse_size(options.dram)
        elif options.nvme:
            dram += parse_size(options.staging) + parse_size(options.spare)
        below = "nvme" if options.nvme else "dram"
        state = "auto" if options.nvme and parse_size(options.spare) else below
        policy = {"params": below, "master": state, "optimizer": state, "grads": "dram"}
        policy |= settings.pop("policy", {})
        return opened(
            self.device,
            options.hbm or _HBM[options.shape],
            dram,
            options.nvme,
            policy=policy,
            **settings,
        )

    def tiered(self, tier: Any, model: Any) -> Tiered:
        """Wraps a model and makes its optimizer."""
        options = self.options
        grad_dtype = DTYPES[options.grad_dtype]
        return Tiered(tier, model, grad_dtype, options.where, options.overlap)

    # -- full ------------------------------------------------------------

    def full(self) -> None:
        """Measures steps beside resident ones."""
        plain = self.build()
        model = copy.deepcopy(plain)  # far quicker than the same random weights once more
        resident = Resident(plain, DTYPES[self.options.grad_dtype])
        del plain
        count = parameters_of(model)
        self.reached("models built")
        with self.manager(model) as tier:
            trainer = self.tiered(tier, model)
            give_back(self.device)
            same = self.compare(trainer, resident) if self.options.check_steps else {}
            self.reached("wrapped and compared")
            rows = []
            for tokens, micro in self.tokens_and_micro():
                row: Row = {"tokens": tokens, "micro": micro, "where": self.options.where}
                row |= {"overlap": self.options.overlap, "parameters": count, **same}
                row |= self.beside(trainer, resident, tokens, micro)
                rows.append(row)
                self.keep("full", row)
                self.reached(f"{tokens} tokens, {micro} micro-batches")
            del resident  # what is measured now is of the tiered run alone
            give_back(self.device)
            for row, (tokens, micro) in zip(rows, self.tokens_and_micro(), strict=True):
                loop = self.loop(trainer, tokens, micro)
                row |= self.memory(loop, count)
            self.reached("memory")
            self.keep("full", rows[-1])
            if self.options.profile:
                profile_step(partial(loop.run, 1), self.options.profile, self.device)
            if self.options.trace:
                tier.timeline.chrome_trace(self.options.trace)

    def compare(self, trainer: Tiered, resident: Resident) -> Row:
        """Makes a few steps of both under deterministic kernels, and compares all bits."""
        tokens, micro = self.tokens_and_micro()[0]
        found = []
        with deterministic():
            for each in (resident, trainer):
                losses = self.loop(each, tokens, micro).run(self.options.check_steps)
                found.append([loss.item() for loss in losses])
        differ, total = differences(trainer, resident, self.device)
        furthest = max(abs(a - b) / abs(a) for a, b in zip(*found, strict=True))
        return {
            "equal": differ == 0 and found[0] == found[1],
            "weights that differ": differ / total,
            "losses differ by": furthest,
        }

    def beside(self, trainer: Tiered, resident: Resident, tokens: int, micro: int) -> Row:
        """Times both in turn, and then what bounds the tiered one."""
        options = self.options
        loops = [self.loop(each, tokens, micro) for each in (resident, trainer)]
        for loop in loops:
            loop.run(max(_LEAST_WARM, options.warm // micro))
        settle_python()
        tier = trainer.tier
        self.clock.wait()
        tier.reset_stats()
        self.reached("warm")
        steps = max(2, options.steps // micro)
        times = taking_turns(loops, options.repeats, steps)
        self.reached("timed")
        stats = tier.stats()
        made = options.repeats * (steps + 1)
        row = spread_of(times, loops)
        row |= moved_of(stats, made)
        plain = loops[0].split
        host = trainer.on_host() / parameters_of(trainer.model)
        compute = statistics.median(plain.forward) + statistics.median(plain.backward)
        compute += statistics.median(plain.step) * (1 - host)
        row |= {"host's share": host, "compute s": compute, **speeds_of(trainer.optimizer)}
        took = statistics.median(times[1])
        bound = disk_bound if options.nvme else link_bound
        row |= bound(options, self.clock, loops[1], stats, made, compute, took)
        if options.nvme:
            row["times as fast as ZeRO-Infinity"] = _ZERO_INFINITY_S / took
        return row | reasons(stats)

    def memory(self, loop: Loop, count: int) -> Row:
        """Returns the memory of the device and of the host."""
        row: Row = {}
        if self.device.type == "cuda":
            peak = peak_of(partial(loop.run, 1), self.device)
            row |= {"peak HBM GB": peak.allocated / 1e9, "the device's GB": peak.device / 1e9}
        return row | self.on_host(count)

    def on_host(self, count: int) -> Row:
        """Returns the memory of the host alone."""
        row: Row = {}
        self.clock.wait()
        rss = host_memory()["rss"]
        row["host RSS GB"] = rss / 1e9
        row["of it before the model GB"] = self.before / 1e9  # python, torch, the context
        row["host bytes per parameter less 2 GiB"] = (rss - (2 << 30)) / count
        return row

    # -- peers -----------------------------------------------------------

    def peers(self) -> None:
        """Measures tiermem's step and its peers', each with a fresh model."""
        tokens, micro = self.tokens_and_micro()[0]
        model = self.build()
        with self.manager(model) as tier:
            trainer = self.tiered(tier, model)
            give_back(self.device)
            self.keep("peers", self.one("tiermem", trainer, tokens, micro))
            del model, trainer
        mine = self.rows[0]["s"]
        for name, peer in PEERS.items():
            if name not in self.options.peers:
                continue
            give_back(self.device)
            try:
                with peer(self.build, self.device, micro) as trainer:
                    row = self.one(name, trainer, tokens, micro)
                    row["tiermem is so many times as fast"] = row["s"] / mine
                    del trainer
            except Exception as error:  # a peer's failure is a result
                row = {"what": name, "note": failure(error)}
            self.keep("peers", row)

    def one(self, name: str, trainer: Any, tokens: int, micro: int) -> Row:
        """Times one of them."""
        options = self.options
        loop = self.loop(trainer, tokens, micro)
        first = loop.run(options.warm)[0].item()
        settle_python()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = taking_turns([loop], options.repeats, options.steps)[0]
        row: Row = {"what": name, "tokens": tokens, "micro": micro}
        row |= {"s": statistics.median(seconds), "first loss": first}
        if self.device.type == "cuda":
            row["peak HBM GB"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return row | {"host RSS GB": host_memory()["rss"] / 1e9}

    # -- capped ----------------------------------------------------------

    def capped(self) -> None:
        """Runs resident and tiered in processes of their own."""
        rows = {}
        for part in ("tiered", "resident"):
            line = [sys.executable, __file__, *sys.argv[1:], "--what", "capped", "--part", part]
            settings = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=settings)
            if done.returncode:
                rows[part] = {"note": f"the {part} process ended with {done.returncode}"}
            else:
                rows[part] = json.loads(done.stdout.splitlines()[-1])
            both = [rows.get("resident", {}), rows["tiered"]]
            row = {k: v for each in both for k, v in each.items() if k != "bits"}
            if len(rows) == 2 and "note" not in row:
                row["of resident"] = row["resident s"] / row["tiermem s"]
                row["equal"] = both[0].get("bits") == both[1].get("bits")
            self.rows.clear()
            self.keep("capped", row)
        if any("note" in row for row in rows.values()):
            raise RuntimeError("a process of the capped run failed")

    def part(self) -> Row:
        """Is one of those processes."""
        options = self.options
        tokens, micro = self.tokens_and_micro()[0]
        model = self.build()
        count = parameters_of(model)
        if options.part == "resident":
            trainer: Any = Resident(model, DTYPES[options.grad_dtype])
            give_back(self.device)
            loop = self.loop(trainer, tokens, micro)
            return self.exact(loop) | self.alone("resident", loop)
        width = model.model.config.hidden_size
        residual = tokens * width * 2 * (model.model.config.num_hidden_layers + 6)
        row = {"tokens": tokens, "micro": micro, "parameters": count}
        row |= {"where": options.where, "overlap": options.overlap}
        with self.manager(
            model, activations_nbytes=residual, policy={"activations": "dram"}
        ) as tier:
            trainer = self.tiered(tier, model)
            loop = self.loop(trainer, tokens, micro)
            row |= self.exact(loop)
            give_back(self.device)
            row["capped at GB"] = self.cap() / 1e9
            row |= self.alone("tiermem", loop, tier)
            row |= self.on_host(count)
            if options.profile:
                profile_step(partial(loop.run, 1), options.profile, self.device)
        return row

    def exact(self, loop: Loop) -> Row:
        """Makes the first steps under deterministic kernels, for the other process to compare."""
        if not self.options.check_steps:
            return {}
        with deterministic():
            losses = loop.run(self.options.check_steps)
            bits = [loss.item().hex() for loss in losses] + bits_of(loop.trainer, self.device)
        return {"bits": bits}

    def cap(self) -> int:
        """Caps what torch may take of the device, tiermem's arena included.

        Set when the model is wrapped (its random weights were made on the device) and its bits
        were compared (deterministic attention takes memory that the other does not).
        """
        wanted = parse_size(self.options.cap)
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            torch.cuda.set_per_process_memory_fraction(wanted / total)
            torch.cuda.reset_peak_memory_stats(self.device)
        return wanted

    def alone(self, name: str, loop: Loop, tier: Any = None) -> Row:
        """Times one trainer."""
        options = self.options
        loop.run(options.warm)
        self.clock.wait()
        if tier is not None:
            tier.reset_stats()
        times = taking_turns([loop], options.repeats, options.steps)[0]
        row: Row = {f"{name} s": statistics.median(times)}
        row |= split_of(name, loop.split)
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            row[f"{name} peak GB"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            row[f"{name}, the device's GB"] = (total - free) / 1e9
        if tier is not None:
            stats = tier.stats()
            row |= moved_of(stats, options.repeats * (options.steps + 1)) | reasons(stats)
            row["saved tensors kept"] = stats.activations.kept
        return row

    # -- activations -----------------------------------------------------

    def residual(self) -> None:
        """The residual stream in DRAM under recomputation."""
        Offload(self).activations("residual", recompute=True)

    def saved(self) -> None:
        """Every saved tensor in DRAM, nothing recomputed."""
        Offload(self).activations("saved", recompute=False)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--what", nargs="*", default=["full"], choices=WHATS)
    add("--shape", default="3b", choices=sorted(SHAPES))
    add("--device", default="cuda")
    add("--tokens", type=int, nargs="*", default=[16384], help="of a micro-batch")
    add("--micro", type=int, nargs="*", default=[1], help="micro-batches of a step")
    add("--layers", type=int, nargs="*", default=[], help="instead of the shape's own")
    add("--chunks", type=int, default=16, help="in which logits and loss are made")
    add("--where", default="auto", choices=("auto", "device", "host", "both"))
    add("--overlap", nargs="?", default="auto", const="forward", choices=OVERLAPS)
    add("--no-overlap", dest="overlap", action="store_false", help="step() makes the steps")
    add("--grad-dtype", default="weights", choices=("weights", "fp32"))
    add("--hbm", default=None, help="default: by shape")
    add("--dram", default=None, help="default: what is needed")
    add("--nvme", default=None, help="folder: weights, masters and states are there")
    add("--staging", default="512MiB", help="DRAM beside the gradients with --nvme")
    add("--spare", default="0", help="DRAM that masters and states have with --nvme before files")
    add("--scratch", default="2GiB", help="bytes that raw writes go to")
    add("--cap", default="8GiB", help="of the device's memory, with capped")
    add("--activation-min", default="1MiB")
    add("--repeats", type=int, default=3, help="turns")
    add("--steps", type=int, default=4, help="of a turn that count; with micro-batches fewer")
    add("--warm", type=int, default=4, help="steps before those that count")
    add("--check-steps", type=int, default=2, help="deterministic ones to compare; 0 for none")
    add("--raw-repeats", type=int, default=3)
    add("--raw-nbytes", default="16GB", help="copied one way, at most, in a raw run")
    add("--raw-share", type=float, default=1.0, help="of a step's bytes in a raw disk run")
    add("--adam-elements", type=int, default=1 << 24, help="of a piece of the bare AdamW")
    add("--peers", nargs="*", default=list(PEERS), help="names of those to run")
    add("--profile", default=None, help="write a summary of one step under torch.profiler")
    add("--trace", default=None, help="write a Chrome trace of the last steps")
    add("--part", choices=("resident", "tiered"), help="be that process (used by this script)")
    add("--out", default=None, help="JSON file; {what} in it is replaced")
    return parser.parse_args()


def main() -> int:
    """Runs every kind; one that fails does not keep the others from running."""
    options = arguments()
    bench = Bench(options)
    if options.part:
        print(json.dumps(bench.part()))
        return 0
    failed = 0
    for what in options.what:
        bench.rows = []
        try:
            getattr(bench, what)()
        except Exception as error:
            traceback.print_exc()
            bench.keep(what, {"note": f"{type(error).__name__}: {str(error)[:300]}"})
            failed += 1
        give_back(bench.device)
    if options.device != "cpu" and not options.part:
        print(f"at most {format_size(torch.cuda.max_memory_allocated())} of the device")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
