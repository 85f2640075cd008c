"""Many architectures with tiermem's defaults alone, each beside its bound.

For each model of :mod:`zoo` (random weights, bf16), a row for

* a forward of so many tokens, and ``generate()`` where there is one, with a quarter of the bytes
  in HBM: the bound is max(everything in HBM, raw copy of the bytes that do not fit);
* full training, bf16 AdamW, with half of the weights' bytes in HBM for weights, gradients and
  state: the bound is max(everything in HBM, the least bytes both ways at once): weights twice
  up, less what stays, state up and down, weights down.

Each model has a process of its own, which is ended where it takes longer than it may: whatever
becomes of it, the others have their rows.

Times are of calls from the third on, the device idle at the begin and the end of each; those of
training are of steps in a row. ``first`` is the first call of that length, as a share of the
later ones' speed. A model that fails is a row that says so, rows are written as soon as they are
there, and no row of a model begins after its ``--model-seconds``, nor a model after ``--seconds``.

    python benchmarks/bench_zoo.py --quick --out benchmarks/results/zoo_H200.json
    python benchmarks/bench_zoo.py --only llama3b --rows train --recompute --fused \\
        --hbm 3GiB --train-tokens 4096 16384 --clip 1e9
    python benchmarks/bench_zoo.py --device cpu --set tiny --only llama layers
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from common import failure, report
from llama import Clock, allow_deterministic_products, deterministic, give_back, nbytes_of
from raw import raw_copy
from raw_train import BothWays
from torch import Tensor, nn
from zoo import KINDS
from zoo_kind import SETS, Draw, Kind, first_of, loss_of

import tiermem
from tiermem.config import parse_size

Row = dict[str, Any]
Call = Callable[[], Tensor]
ROWS = ("forward", "generate", "train")
_FATAL: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
"""After one of these no other call of the device's works in the process."""
_LR = 1e-5
_EXACT_STEPS = 3
_LOOKED_AT = 6


class Sheet:
    """All rows, printed and written as they come.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.perf_counter()
        self.rows: list[Row] = []

    def keep(self, row: Row) -> None:
        """Prints and writes a row."""
        self.rows.append(row)
        cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{self.spent():7.1f} s: {', '.join(cells)}", flush=True)
        if self.options.out:
            with _silence():
                self.write()

    def write(self) -> None:
        """Prints what there is as a table, and writes it."""
        report(
            "Defaults alone, many architectures, random weights in bf16",
            self.rows,
            self.options.out,
        )

    def spent(self) -> float:
        """Returns the seconds since the beginning."""
        return time.perf_counter() - self.began

    def run(self) -> None:
        """Measures all that were asked for."""
        for name in self.options.only or [name for name, kind in KINDS.items() if not kind.apart]:
            if self.spent() > self.options.seconds:
                self.keep({"model": name, "note": "no time left"})
            elif self.options.apart:
                self.apart(name)
            else:
                Bench(self.options, name, self.keep).run()

    def apart(self, name: str) -> None:
        """Measures a model in a process of its own."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers", "tiermem", "zoo", "raw_train"])
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_measure, args=(self.options, name, theirs))
        process.start()
        theirs.close()
        until = time.perf_counter() + self.options.model_seconds * 1.5
        note = "ended"
        while True:
            if not mine.poll(max(0.0, until - time.perf_counter())):
                process.kill()
                note = "stopped: it took too long"
                break
            try:
                self.keep(mine.recv())
            except EOFError:
                break
        process.join()
        if process.exitcode:
            self.keep({"model": name, "note": f"{note}, exit code {process.exitcode}"})


def _measure(options: argparse.Namespace, name: str, rows: Any) -> None:
    """Measures a model, and sends its rows."""
    Bench(options, name, rows.send).run()
    rows.close()
    sys.stdout.flush()
    sys.stderr.flush()


class Bench:
    """One model.

    Args:
        options: The command line.
        name: A key of ``KINDS``.
        keep: Is called with each row.
    """

    def __init__(self, options: argparse.Namespace, name: str, keep: Callable[[Row], None]) -> None:
        self.options = options
        self.name = name
        self.keep = keep
        self.device = torch.device(options.device)
        allow_deterministic_products(self.device)
        self.clock = Clock(self.device)
        self.began = time.perf_counter()

    def late(self) -> bool:
        """Whether no further row is to begin."""
        return time.perf_counter() - self.began > self.options.model_seconds

    def run(self) -> None:
        """Measures all that was asked for."""
        name = self.name
        if not KINDS[name].cudnn:
            torch.backends.cuda.enable_cudnn_sdp(False)
        for what, part in (("forward", self.passes), ("train", self.training)):
            try:
                part(name, KINDS[name])
                give_back(self.device)
            except Exception as error:
                traceback.print_exc()
                self.keep({"model": name, "what": what, "note": failure(error)})
                if isinstance(error, _FATAL):
                    return

    # -- forwards and generation -----------------------------------------

    def passes(self, name: str, kind: Kind) -> None:
        """Measures forwards and generation of one model."""
        options = self.options
        wanted: list[tuple[str, int]] = []
        if "forward" in options.rows:
            wanted += [("forward", tokens) for tokens in options.tokens]
        if "generate" in options.rows and kind.generates:
            wanted.append(("generate", options.new_tokens))
        if not wanted:
            return
        began = time.perf_counter()
        model = kind.build(options.set, self.device).requires_grad_(False)
        nbytes = nbytes_of([*model.parameters(), *model.buffers()])
        built = time.perf_counter() - began
        known: list[tuple[str, int, list[float], float, Tensor]] = []
        for what, size in wanted:
            call = self.call(kind, model, what, size)
            try:
                first = call()
                times = self.clock.time(call, options.repeats, warm=1)
                known.append((what, size, times, self.host(call), first))
            except Exception as error:
                self.keep({"model": name, "what": what, "size": size, "note": failure(error)})
                if isinstance(error, torch.OutOfMemoryError):
                    give_back(self.device)
        began = time.perf_counter()
        hbm = int(nbytes * options.share) // 4096 * 4096
        with tiermem.TierManager(device=self.device, hbm=hbm) as tier:
            model = tier.wrap(model)
            wrapped = time.perf_counter() - began
            give_back(self.device)
            raw = statistics.median(self.clock.time(raw_copy(tier, nbytes - hbm, ""), 2, warm=1))
            for what, size, resident, host, expected in known:
                if self.late():
                    self.keep({"model": name, "what": what, "size": size, "note": "no time left"})
                    continue
                row: Row = {"model": name, "what": what, "size": size, "GB": nbytes / 1e9}
                call = self.call(kind, model, what, size)
                try:
                    row |= self.tiered(tier, call, what, size, resident, host, raw, expected)
                except Exception as error:
                    traceback.print_exc()
                    row["note"] = failure(error)
                if what == "forward" and size == 1 and kind.experts:
                    row |= self.chosen(kind, model, row, raw)
                self.keep({**row, "built s": built, "wrap s": wrapped})
            tier.close(discard=True)

    def call(self, kind: Kind, model: Any, what: str, size: int) -> Call:
        """Returns what is timed."""
        draw = Draw(self.device, size)
        if what == "forward":
            given = kind.given(model, size, draw, False)

            def forward() -> Tensor:
                with torch.no_grad():
                    return first_of(model(**given))

            return forward
        given = kind.given(model, 16, draw, False)
        prompt = {k: v for k, v in given.items() if k in ("input_ids", "input_features")}
        if "input_ids" in prompt:
            prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        model.generation_config.eos_token_id = None  # always as many tokens as asked for
        settings = {"max_new_tokens": size, "min_new_tokens": size, "do_sample": False}

        def generate() -> Tensor:
            found: Tensor = model.generate(**prompt, pad_token_id=0, use_cache=True, **settings)
            return found

        return generate

    def host(self, call: Call) -> float:
        """Returns the seconds until a call comes back, begun with the device idle."""
        found = []
        for _ in range(self.options.repeats):
            self.clock.wait()
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        self.clock.wait()
        return statistics.median(found)

    def tiered(
        self,
        tier: Any,
        call: Call,
        what: str,
        size: int,
        resident: list[float],
        host: float,
        raw: float,
        expected: Tensor,
    ) -> Row:
        """Measures one kind of pass, from its first call on."""
        results: list[Tensor] = []
        first = self.clock.once(lambda: results.append(call()))
        second = self.clock.once(call)
        tier.reset_stats()
        repeats = self.options.repeats
        times = [self.clock.once(call) for _ in range(repeats)]
        stats = tier.stats()
        equal = torch.equal(results[0], expected) and torch.equal(call(), expected)
        took, within = statistics.median(times), statistics.median(resident)
        passes = size if what == "generate" else 1
        moved = sum(link.nbytes for link in stats.links.values()) / repeats
        uses = (stats.hits + stats.misses) / repeats
        bound = max(within, raw * passes)
        return {
            "in HBM s": within,
            "raw s": raw * passes,
            "tiermem s": took,
            "of bound": bound / took,
            "first": took / first,
            "second": took / second,
            "equal": equal,
            "min s": min(times),
            "max s": max(times),
            "GB moved": moved / 1e9,
            "GB kept": stats.kept_in_hbm / 1e9,
            "uses": uses,
            "copies": sum(link.moves for link in stats.links.values()) / repeats,
            "host us a use": (self.host(call) - host) / max(1.0, uses) * 1e6,
            "stalls ms": stats.stall_seconds / repeats * 1e3,
        }

    def chosen(self, kind: Kind, model: nn.Module, row: Row, raw: float) -> Row:
        """Returns the share of the bound where only the experts that are chosen move."""
        if kind.experts is None or "tiermem s" not in row:
            return {}
        used, there, names = kind.experts
        there = getattr(model.config, "num_local_experts", None) or there
        inside = nbytes_of(p for n, p in model.named_parameters() if names in n)
        least = 1 - inside / (row["GB"] * 1e9) * (1 - used / there)
        return {"of bound, chosen": max(row["in HBM s"], raw * least) / row["tiermem s"]}

    # -- training --------------------------------------------------------

    def training(self, name: str, kind: Kind) -> None:
        """Measures training steps of one model."""
        options = self.options
        if "train" not in options.rows:
            return
        for size in dict.fromkeys(min(n, kind.most_trained) for n in options.train_tokens):
            self.trained_on(name, kind, size)

    def trained_on(self, name: str, kind: Kind, size: int) -> None:
        """Measures training steps of so many tokens."""
        row: Row = {"model": name, "what": "train", "size": size}
        if self.late():
            self.keep({**row, "note": "no time left"})
            return
        model = self.trained(kind)
        nbytes = nbytes_of([*model.parameters(), *model.buffers()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, **self.settings)
        step = self.step(kind, model, optimizer, size)
        _, losses, why = _exactly(step, optimizer, self.clock)
        bits = _bits(model, None)
        resident = self.in_a_row(step, 1)
        within = statistics.median(resident)
        row |= {"GB": nbytes / 1e9, "in HBM s": within}
        del model, optimizer, step
        give_back(self.device)
        try:
            row |= self.tiered_training(kind, size, nbytes, within, losses, bits)
        finally:
            give_back(self.device)
        if why:
            row["equal"] = f"not compared: {why}"
        self.keep(row)

    def tiered_training(
        self,
        kind: Kind,
        size: int,
        nbytes: int,
        within: float,
        losses: list[float],
        bits: list[Tensor],
    ) -> Row:
        """Measures the same steps by tiermem."""
        model = self.trained(kind)
        hbm = parse_size(self.options.hbm, "hbm") if self.options.hbm else nbytes // 2
        hbm = hbm // 4096 * 4096
        with tiermem.TierManager(device=self.device, hbm=hbm) as tier:
            began = time.perf_counter()
            model = tier.wrap(model)
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=_LR, **self.settings)
            give_back(self.device)
            wrapped = time.perf_counter() - began
            step = self.step(kind, model, optimizer, size)
            first, mine, _ = _exactly(step, optimizer, self.clock)
            equal = mine == losses and all(
                torch.equal(a, b) for a, b in zip(_bits(model, tier), bits, strict=True)
            )
            self.in_a_row(step, self.options.train_warm)
            tier.reset_stats()
            times = self.in_a_row(step, 0)
            stats = tier.stats()
            made = len(times) * self.options.steps
            took = statistics.median(times)
            raw, moved = self.both_ways(tier, stats, made, nbytes, hbm)
            packed = len(tier._manager.parts.homes.packed)
            turns = self.packing_in_turns(optimizer, step) if self.options.packing_turns else {}
            tier.close(discard=True)
        return {
            "raw s": raw,
            "tiermem s": took,
            "of bound": max(within, raw) / took,
            "of bound, moved": max(within, moved) / took,
            "first": took / first,
            "equal": equal,
            "min s": min(times),
            "max s": max(times),
            "GB moved": sum(link.nbytes for link in stats.links.values()) / made / 1e9,
            "GB kept": stats.kept_in_hbm / 1e9,
            "uses": (stats.hits + stats.misses) / made,
            "copies": sum(link.moves for link in stats.links.values()) / made,
            "stalls ms": stats.stall_seconds / made * 1e3,
            "wrap s": wrapped,
            "packed homes": packed,
            **turns,
        }

    def packing_in_turns(self, optimizer: Any, step: Call) -> Row:
        """Measures steps with homes packed and as they are in turns; what is tried stops."""
        chosen = optimizer._timing.ahead._left
        packing, found = chosen._packing, dict[bool, list[float]]({True: [], False: []})
        chosen._to_pack = not packing.has_room
        for turn in range(2 * self.options.packing_turns):
            on = turn % 2 == 0
            chosen._trial.for_step = lambda _ticket, on=on: on
            for _ in range(4):
                step()
            found[on] += self.in_a_row(step, 0)
        return {
            "room to pack": packing.has_room,
            "packed s": statistics.median(found[True]),
            "as they are s": statistics.median(found[False]),
            "packed, each ms": " ".join(f"{1e3 * seconds:.0f}" for seconds in found[True]),
            "as they are, each ms": " ".join(f"{1e3 * seconds:.0f}" for seconds in found[False]),
        }

    def trained(self, kind: Kind) -> nn.Module:
        """Returns a model to be trained."""
        model = kind.build(self.options.set, self.device).train()
        if self.options.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    @property
    def settings(self) -> dict[str, Any]:
        """What the optimizer is made with beside its rate."""
        return {"fused": True} if self.options.fused else {}

    def step(self, kind: Kind, model: Any, optimizer: Any, tokens: int) -> Call:
        """Returns a call that makes a training step and returns its loss."""
        clip = self.options.clip
        given = kind.given(model, tokens, Draw(self.device, tokens), True)
        torch.manual_seed(0)  # dropout

        def step() -> Tensor:
            loss = loss_of(model(**given))
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def in_a_row(self, step: Call, warm: int) -> list[float]:
        """Returns the seconds of a step, of some in a row, a few times."""

        def row() -> None:
            for _ in range(self.options.steps):
                step()

        for _ in range(warm):
            step()
        return [self.clock.once(row) / self.options.steps for _ in range(2)]

    def both_ways(
        self, tier: Any, stats: Any, made: int, nbytes: int, hbm: int
    ) -> tuple[float, float]:
        """Returns the seconds of the least bytes copied both ways at once, and of those moved."""
        state = 2 * nbytes
        least = (2 * nbytes - hbm + state, nbytes + state)
        count = {link: found.nbytes / made for link, found in stats.links.items()}
        moved = (count.get("dram->hbm", 0.0), count.get("hbm->dram", 0.0))
        found = []
        with BothWays(tier) as raw:
            for up, down in (least, moved):
                part = min(1.0, self.options.raw_nbytes / max(up, down, 1))
                work = partial(raw.copy, int(up * part), int(down * part))
                found.append(statistics.median(self.clock.time(work, 2, warm=1)) / part)
        return found[0], found[1]


def _exactly(step: Call, optimizer: Any, clock: Clock) -> tuple[float, list[float], str]:
    """Makes steps by deterministic kernels.

    Returns:
        Seconds of the first, the losses, and why bits cannot be compared.
    """
    why, losses = "", []
    for number in range(_EXACT_STEPS):
        context: Any = nullcontext() if why else deterministic()
        try:
            with context:
                took = clock.once(lambda: losses.append(float(step())))
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            why = failure(error)
            optimizer.zero_grad()
            took = clock.once(lambda: losses.append(float(step())))
        if number == 0:
            first = took
    return first, losses, why


def _bits(model: nn.Module, tier: Any) -> list[Tensor]:
    """Returns the weights of some modules, in host memory."""
    modules = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    some = modules[:: max(1, len(modules) // _LOOKED_AT)]
    found = []
    for module in some:
        with nullcontext() if tier is None else tier.materialize(module):
            found += [p.detach().to("cpu", copy=True) for p in module.parameters(recurse=False)]
    return found


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing is printed inside."""
    kept, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout = kept


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", default="full", choices=SETS)
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer lengths")
    parser.add_argument("--only", nargs="*", choices=sorted(KINDS), help="all by default")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--tokens", type=int, nargs="*", help="by default 1, 2048, 16384")
    parser.add_argument("--train-tokens", type=int, nargs="*", default=[8192])
    parser.add_argument("--train-warm", type=int, default=4, help="steps that do not count")
    parser.add_argument("--hbm", help="in training; by default half of the weights' bytes")
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    parser.add_argument("--fused", action="store_true", help="AdamW")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="of the bytes in HBM, forwards")
    parser.add_argument(
        "--packing-turns", type=int, default=0, help="of training with homes packed and not"
    )
    parser.add_argument("--recompute", action="store_true", help="layers in backward")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of training, timed together")
    parser.add_argument("--raw-nbytes", type=int, default=2 << 30, help="copied at most to time it")
    parser.add_argument("--model-seconds", type=float, help="by default 60, with --quick 25")
    parser.add_argument("--seconds", type=float, help="by default 560, with --quick 220")
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        help="each model in a process of its own; by default on CUDA",
    )
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    quick = options.quick
    if quick:
        options.set = "quick"
    options.tokens = options.tokens or ([1, 2048] if quick else [1, 2048, 16384])
    options.model_seconds = options.model_seconds or (25 if quick else 60)
    options.seconds = options.seconds or (220 if quick else 560)
    if options.apart is None:
        options.apart = options.device != "cpu"
    return options


def main() -> None:
    """Measures and reports."""
    sheet = Sheet(arguments())
    sheet.run()
    sheet.write()


if __name__ == "__main__":
    main()
