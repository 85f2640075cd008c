"""A model straight from a safetensors folder on a disk, beside the raw reads and copies of it.

* ``first``: from the call of ``load_checkpoint`` to the first logits, beside an O_DIRECT read of
  the whole folder, and beside ``from_pretrained`` onto the device and a forward.
* ``disk``: forwards with little DRAM, beside a raw read of the bytes that moved.
* ``dram``: forwards with ``Policy(params="dram")``, beside a raw copy of what moved.
* ``lora``: steps that train adapters, beside the resident step and the raw traffic; with DRAM for
  all weights, and with less of it (``lora_disk``).
* ``loaders``: the time to the first logits, in turns with other loaders of safetensors.
* ``peers``: forwards by transformers' ``device_map`` and accelerate's ``disk_offload``.

The folder is made first, of random weights, and its pages are dropped from the page cache before
every row. ``host MiB`` is what the process holds beyond its budgets, once everything that Python,
torch and CUDA load at a first use is there. ``all s`` are the rows or steps one by one, those
before the ones that count first. What is done is printed as it goes, with the seconds since the
start; the table is printed, and written, after each row.

Steps that train adapters have two halves. All that does not stay in HBM comes up in each of them,
so ``bound s`` is the sum of the longer of compute and copies in each half. It is more than the
longer of both over the whole step where forward waits for copies and backward does not.

    python benchmarks/bench_checkpoint.py --folder DIR --out benchmarks/results/checkpoint_H200.json
    python benchmarks/bench_checkpoint.py --folder DIR --device cpu --shape tiny --hbm 256KiB \\
        --dram 16MiB --roomy 64MiB --tokens 8
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from common import failure, listed, report
from llama import SHAPES, Clock, build, give_back, inputs
from loaders import OTHERS, Loaders
from raw import RawRead, raw_copy

import tiermem
from tiermem.config import parse_size

Row = dict[str, Any]
_ROW = 4
"""Forwards from DRAM are timed so many at a time, as in a loop."""
_KNOWN = 3
"""So many rows of them come before those that count: by then the loop is known."""
_SAMPLE = 6e9
"""Bytes of a raw read that is taken for all that a step reads."""
_PART = 64 << 20
"""Bytes of each copy of the raw traffic."""
_LORA = tiermem.Lora(r=8, alpha=16, target_modules=["q_proj", "v_proj"])
KINDS = ("first", "loaders", "disk", "dram", "lora", "lora_disk", "peers")


def make_folder(folder: Path, shape: str, device: torch.device) -> None:
    """Saves random weights, unless they are there."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    build(shape, device, head=True).save_pretrained(folder, max_shard_size="2GB")
    give_back(device)
    os.sync()


def forget(folder: Path) -> None:
    """Drops the folder's pages from the page cache."""
    os.sync()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.dat")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def held() -> int:
    """Returns the bytes of host memory that the process alone has."""
    return int(psutil.Process().memory_full_info().uss)


def budgeted(tier: tiermem.TierManager) -> int:
    """Returns the bytes of host memory that the DRAM budget has taken; it is never passed.

    Pages stay locked when what was in them is gone.
    """
    return max(tier.stats().peak["dram"], tier._manager.parts.homes.arena.locked)


def _repeat(call: Callable[[], Any], times: int, end: Callable[[], None]) -> None:
    """Calls it so often, and waits for what the last one has fetched for the next."""
    for _ in range(times):
        call()
    end()


def _moved(tier: tiermem.TierManager, before: dict[str, int] | None = None) -> dict[str, int]:
    """Returns the bytes over each link, since ``before`` or since the tiers were opened.

    ``reset_stats()`` would make the next passes be measured, which takes time of its own.
    """
    links = tier.stats().links.items()
    return {name: link.nbytes - (before or {}).get(name, 0) for name, link in links}


def _traffic(moved: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in moved.items() if nbytes)


def _read_of(moved: dict[str, int]) -> int:
    """Returns the bytes that came from files."""
    return sum(nbytes for name, nbytes in moved.items() if name.startswith("nvme"))


class Bench:
    """What all rows share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.perf_counter()
        self.device = torch.device(options.device)
        self.clock = Clock(self.device)
        self.folder = Path(options.folder)
        self.rows: list[Row] = []

    def say(self, what: str) -> None:
        """Prints what has just been done, at once: a time limit may end the process."""
        print(f"{time.perf_counter() - self.began:7.1f} s  {what}", flush=True)

    def add(self, row: Row) -> None:
        """Keeps a row, and reports all there are."""
        self.rows.append(row)
        self.report()

    def report(self) -> None:
        """Prints and keeps what there is so far."""
        options = self.options
        about = {"hbm": options.hbm, "dram": options.dram, "roomy": options.roomy}
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        report("A model from a checkpoint", self.rows, options.out, size=size, **about)
        print(end="", flush=True)

    @contextmanager
    def loaded(
        self, dram: str, policy: str = "auto", lora: Any = None, hbm: str = ""
    ) -> Iterator[tuple[tiermem.TierManager, Any]]:
        """Opens tiers with the model in them."""
        import transformers

        forget(self.folder)
        params = tiermem.Policy(params=policy)  # type: ignore[arg-type]
        with tiermem.TierManager(
            self.device, hbm=hbm or self.options.hbm, dram=dram, policy=params
        ) as tier:
            yield (
                tier,
                tiermem.load_checkpoint(
                    transformers.AutoModelForCausalLM, self.folder, tier=tier, lora=lora
                ),
            )
            tier.close(discard=True)
        give_back(self.device)

    @contextmanager
    def small_folder(self) -> Iterator[Path]:
        """Gives a folder of a small model's weights, beside the large one's."""
        import transformers

        small = transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=256,
        )
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as folder:
            transformers.LlamaForCausalLM(small).bfloat16().save_pretrained(folder)
            yield Path(folder)

    def load_libraries(self) -> None:
        """Uses once what takes host memory at its first use, on a small model."""
        import transformers

        with self.small_folder() as folder:
            with tiermem.TierManager(self.device, hbm="64MiB", dram="64MiB") as tier:
                model = tiermem.load_checkpoint(
                    transformers.AutoModelForCausalLM, folder, tier=tier, lora=_LORA
                )
                step, _ = self._step(model, tier, 64)
                for _ in range(3):
                    step()
                tier.close(discard=True)
        give_back(self.device)

    def call(self, model: Any, tokens: int) -> Callable[[], Any]:
        """Returns a forward to the last token's logits."""
        ids = inputs(model, tokens, self.device)

        def forward() -> Any:
            with torch.no_grad():
                return model(input_ids=ids, logits_to_keep=1).logits

        return forward

    # -- rows ------------------------------------------------------------

    def first(self) -> None:
        """From nothing to the first logits."""
        rows = [self._first_once() for _ in range(self.options.repeats)]
        ours, read = (statistics.median(r[i] for r in rows) for i in range(2))
        row: Row = {
            "what": "first logits",
            "tokens": self.options.tokens[-1],
            "s": ours,
            "raw s": read,
            "of raw": statistics.median(r[1] / r[0] for r in rows),
            "GB moved": rows[0][3] / 1e9,
            "host MiB": max(r[2] for r in rows) / 2**20,
        }
        self.add(row)
        row |= {"peer": "from_pretrained", "peer s": self._plain_first()}
        self.report()

    def _first_once(self) -> tuple[float, float, int, int]:
        """Returns seconds to the first logits and of a raw read, bytes beyond and bytes read."""
        before, started = held(), time.perf_counter()
        with self.loaded(self.options.dram) as (tier, model):
            made = time.perf_counter() - started
            self.call(model, self.options.tokens[-1])()
            self.clock.wait()
            ours = time.perf_counter() - started
            beyond = held() - before - budgeted(tier)
            reads = [e for e in tier.timeline.events() if e.lane.startswith("nvme->")]
            began = min((e.start_ns for e in reads), default=0) / 1e9 - started
            ended = max((e.end_ns for e in reads), default=0) / 1e9 - started
            self.say(
                f"first: {ours:.2f} s, load_checkpoint {made:.2f}, reads from {began:.2f} to "
                f"{ended:.2f}; GB {_traffic(_moved(tier))}"
            )
            with RawRead(tier, "") as raw:
                started = time.perf_counter()
                nbytes = raw.read()
                read = time.perf_counter() - started
        self.say(f"first: raw read {read:.2f} s, {nbytes / read / 1e9:.2f} GB/s")
        return ours, read, beyond, nbytes

    def _plain_first(self) -> float:
        """Returns the seconds of ``from_pretrained`` onto the device and a forward."""
        import transformers

        forget(self.folder)
        started = time.perf_counter()
        plain = transformers.AutoModelForCausalLM.from_pretrained(self.folder).to(self.device)
        self.call(plain, self.options.tokens[-1])()
        self.clock.wait()
        seconds = time.perf_counter() - started
        del plain
        give_back(self.device)
        self.say(f"first: from_pretrained and a forward {seconds:.2f} s")
        return seconds

    def loaders(self) -> None:
        """From nothing to the first logits, beside other loaders."""
        Loaders(self).run()

    def disk(self) -> None:
        """Forwards from the disk, DRAM being small."""
        for tokens in self.options.tokens:
            before = held()
            with self.loaded(self.options.dram) as (tier, model):
                call = self.call(model, tokens)
                every = [self._timed(tier, f"disk, {tokens} tokens", call)[0]]
                ours, reads, moved = [], [], 0
                with RawRead(tier, "") as raw:
                    for turn in range(self.options.warm + self.options.repeats):
                        seconds, by_link = self._timed(tier, f"disk, {tokens} tokens", call)
                        every.append(seconds)
                        moved = _read_of(by_link)
                        if turn >= self.options.warm:
                            ours.append(seconds)
                            reads.append(self._read(raw, moved))
                beyond = held() - before - budgeted(tier)
                self._losses(tier, f"disk, {tokens} tokens", call)
            self._row("from disk", tokens, ours, reads, moved, beyond, {"all s": listed(every)})

    def dram(self) -> None:
        """Forwards with all weights in DRAM."""
        for tokens in self.options.tokens:
            before = held()
            with self.loaded(self.options.roomy, "dram") as (tier, model):
                self.say("dram: loaded")
                end = tier._manager.flush
                row = partial(_repeat, self.call(model, tokens), _ROW, end)
                every = [self.clock.once(row) / _ROW for _ in range(_KNOWN)]
                self.say(f"dram, {tokens} tokens: each forward {listed(every)} s")
                ours, copies = [], []
                for _ in range(max(3, self.options.repeats)):
                    start = _moved(tier)
                    ours.append(self.clock.once(row) / _ROW)
                    moved = _moved(tier, start).get("dram->hbm", 0) // _ROW
                    copies.append(self.clock.once(raw_copy(tier, moved, "")))
                every += ours
                beyond = held() - before - budgeted(tier)
            more = {"all s": listed(every)}
            self._row("from DRAM", tokens, ours, copies, moved, beyond, more)

    def lora(self) -> None:
        """Steps of adapters, with all weights in DRAM after the first."""
        self._lora(self.options.roomy, 6)

    def lora_disk(self) -> None:
        """Steps of adapters, with little DRAM."""
        self._lora(self.options.lora_dram, 4)

    def _lora(self, dram: str, warm: int) -> None:
        """Measures steps after ``warm`` others, by which the loop is known."""
        forward, resident = self._resident_lora()
        self.say(f"lora: resident forward {forward:.4f} s, step {resident:.4f} s")
        tokens, before, what = self.options.tokens[-1], held(), f"lora, {dram} of DRAM"
        with self.loaded(dram, lora=_LORA, hbm=self.options.lora_hbm) as (tier, model):
            self.say(f"{what}: load_checkpoint")
            step, _ = self._step(model, tier, tokens)
            every, ups, halves = [], [], []
            ours, raws, moved = [], [], 0
            with RawRead(tier, "") as raw:
                for turn in range(warm + self.options.repeats):
                    seconds, by_link = self._timed(tier, what, step)
                    every.append(seconds)
                    moved, up = _read_of(by_link), by_link.get("dram->hbm", 0)
                    ups.append(up / 1e9)
                    if turn >= warm:
                        traffic = max(self._copied(up), self._read(raw, moved))
                        half = traffic / 2
                        halves.append(max(half, forward) + max(half, resident - forward))
                        raws.append(max(traffic, resident))
                        ours.append(seconds)
            beyond = held() - before - budgeted(tier)
            used = self.used()
            self._losses(tier, what, step)
        more = {
            "bound s": statistics.median(halves),
            "peer": "resident",
            "peer s": resident,
            "HBM GiB": used / 2**30,
            "all s": listed(every),
            "GB up": listed(ups),
        }
        self._row(f"LoRA step, {dram} of DRAM", tokens, ours, raws, moved, beyond, more)

    def _timed(
        self, tier: tiermem.TierManager, what: str, call: Callable[[], Any]
    ) -> tuple[float, dict[str, int]]:
        """Returns the seconds of a call and the bytes it moved over each link; prints both."""
        before = _moved(tier)
        seconds = self.clock.once(call)
        moved, kept = _moved(tier, before), tier.stats().kept_in_hbm
        self.say(f"{what}: {seconds:.3f} s; GB {_traffic(moved) or 'none'}, kept {kept / 1e9:.2f}")
        return seconds, moved

    def _losses(self, tier: tiermem.TierManager, what: str, call: Callable[[], Any]) -> None:
        """Prints where a call's time goes, as tiermem measures it, in calls that do not count."""
        tier.reset_stats()
        for _ in range(2):  # the second ends the last pass of the first
            call()
        self.clock.wait()
        losses = tier.stats().losses.items()
        lost = ", ".join(f"{cause} {seconds:.3f}" for cause, seconds in losses if seconds)
        self.say(f"{what}: lost s: {lost or 'none'}")

    def _read(self, raw: RawRead, nbytes: int) -> float:
        """Returns the seconds of a raw read of so many bytes, by those of a part of them."""
        if not nbytes:
            return 0.0
        started = time.perf_counter()
        read = raw.read(int(min(nbytes, _SAMPLE)))
        seconds = time.perf_counter() - started
        self.say(f"raw read {read / seconds / 1e9:.2f} GB/s")
        return seconds * nbytes / read

    def _copied(self, nbytes: int) -> float:
        """Returns the seconds of copies of so many bytes up, from page-locked memory."""
        if nbytes < _PART:
            return 0.0
        target = torch.empty(_PART, dtype=torch.uint8, device=self.device)
        source = torch.empty(_PART, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

        def copy() -> None:
            for _ in range(nbytes // _PART):
                target.copy_(source, non_blocking=True)

        seconds = self.clock.once(copy) * nbytes / (nbytes // _PART * _PART)
        self.say(f"raw copies {nbytes / seconds / 1e9:.2f} GB/s")
        return seconds

    def used(self) -> int:
        """Returns the bytes of the device that are in use; no other process uses it."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _resident_lora(self) -> tuple[float, float]:
        """Returns the seconds of a forward and of a step where all is in HBM."""
        plain = build(self.options.shape, self.device, head=True)  # other weights, the same work
        tiermem.add_adapters(plain, _LORA)
        step, forward = self._step(plain, None, self.options.tokens[-1])
        seconds = self.clock.time(step, max(3, self.options.repeats), warm=2)
        half = self.clock.time(forward, 3, warm=0)
        del plain, step, forward
        give_back(self.device)
        return statistics.median(half), statistics.median(seconds)

    def _step(
        self, model: Any, tier: tiermem.TierManager | None, tokens: int
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Returns a step that trains the adapters, and its forward to the loss."""
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        trained = [param for param in model.parameters() if param.requires_grad]
        make: Any = torch.optim.AdamW if tier is None else None
        settings = {"lr": 1e-4, "fused": True}
        optimizer: Any = (
            make(trained, **settings)
            if tier is None
            else tier.optimizer(trained, torch.optim.AdamW, **settings)
        )
        ids = inputs(model, tokens, self.device)

        def forward() -> Any:
            hidden = model.model(input_ids=ids).last_hidden_state
            return tiermem.chunked_cross_entropy(hidden, model.lm_head.weight, ids, chunks=8)

        def step() -> None:
            forward().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, forward

    def peers(self) -> None:
        """Forwards by what is there already."""
        for name in ("device_map", "disk_offload"):
            offload = Path(f"{self.options.folder}-offload")
            try:
                forget(self.folder)
                model = getattr(self, f"_{name}")(offload)
                self.say(f"{name}: made")
                call = self.call(model, self.options.tokens[-1])
                self.say(f"{name}: a first forward in {self.clock.once(call):.2f} s")
                for folder in (self.folder, offload):
                    forget(folder)
                seconds = self.clock.once(call)
                row = {"s": seconds}
            except (ImportError, RuntimeError, ValueError, OSError) as error:
                row = {"note": failure(error)}
            model = call = None  # type: ignore[assignment]
            shutil.rmtree(offload, ignore_errors=True)
            give_back(self.device)
            self.add({"what": f"peer: {name}", "tokens": self.options.tokens[-1], **row})

    def _device_map(self, offload: Path) -> Any:
        """Weights on the device and in DRAM as far as the budgets go, the rest in the files."""
        import transformers

        most = {
            0: parse_size(self.options.hbm, "hbm"),
            "cpu": parse_size(self.options.dram, "dram"),
        }
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, device_map="auto", max_memory=most, offload_folder=offload
        )

    def _disk_offload(self, offload: Path) -> Any:
        """Every weight in a file of its own."""
        import accelerate
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        model = accelerate.disk_offload(model, str(offload), execution_device=self.device)
        gc.collect()
        return model

    def _row(
        self,
        what: str,
        tokens: int,
        ours: list[float],
        raw: list[float],
        moved: int,
        beyond: int,
        more: Row,
    ) -> None:
        shares = [bound / mine for bound, mine in zip(raw, ours, strict=True)]
        self.add(
            {
                "what": what,
                "tokens": tokens,
                "s": statistics.median(ours),
                "raw s": statistics.median(raw),
                "of raw": statistics.median(shares),
                "GB moved": moved / 1e9,
                "host MiB": beyond / 2**20,
                **more,
            }
        )


def main() -> None:
    """Makes the folder, measures and reports; what fails says so."""
    options = _options()
    bench = Bench(options)
    make_folder(bench.folder, options.shape, bench.device)
    bench.say("the folder is there")
    bench.load_libraries()
    bench.say("libraries are loaded")
    for kind in options.what:
        try:
            getattr(bench, kind)()
        except (ImportError, RuntimeError, ValueError, tiermem.TierError) as error:
            bench.add({"what": kind, "note": failure(error)})
        gc.collect()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="made there, and left")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="6.7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2048])
    parser.add_argument("--hbm", default="4GiB", help="budget of HBM")
    parser.add_argument("--dram", default="2GiB", help="where weights come from the disk")
    parser.add_argument("--roomy", default="16GiB", help="where they do not")
    parser.add_argument("--lora-dram", default="4GiB")
    parser.add_argument("--lora-hbm", default="5GiB", help="7 GiB with what torch and CUDA take")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--loaders", nargs="*", choices=sorted(OTHERS), default=list(OTHERS))
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    for name in ("hbm", "dram", "roomy", "lora_dram", "lora_hbm"):
        parse_size(getattr(options, name), name)
    return options


if __name__ == "__main__":
    main()
