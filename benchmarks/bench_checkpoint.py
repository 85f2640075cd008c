"""A model straight from a safetensors folder on a disk, beside the raw reads and copies of it.

* ``first``: from the call of ``load_checkpoint`` to the first logits, beside an O_DIRECT read of
  the whole folder, and beside ``from_pretrained`` onto the device and a forward.
* ``disk``: forwards with little DRAM, beside a raw read of the bytes that moved.
* ``dram``: forwards with ``Policy(params="dram")``, beside a raw copy of what moved.
* ``lora``: steps that train adapters, beside the resident step and the raw traffic.
* ``peers``: forwards by transformers' ``device_map`` and accelerate's ``disk_offload``.

The folder is made first, of random weights, and its pages are dropped from the page cache before
every row. ``host MiB`` is what the process holds beyond its budgets, once everything that Python,
torch and CUDA load at a first use is there. ``all s`` are the rows or steps one by one, those
before the ones that count first.

On a disk of 1.3 GB/s with 64 GB, all of it takes about 4 minutes:

    python benchmarks/bench_checkpoint.py --folder DIR --tokens 2048 --repeats 2 \\
        --out benchmarks/results/checkpoint_H200.json

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
from common import failure, report
from llama import SHAPES, Clock, build, give_back, inputs
from raw import RawRead, raw_copy

import tiermem
from tiermem.config import parse_size

Row = dict[str, Any]
_ROW = 4
"""Forwards from DRAM are timed so many at a time, as in a loop."""
_KNOWN = 3
"""So many rows of them come before those that count: by then the loop is known."""
_STEPS = 8
"""The same of steps that train adapters, where all weights are in DRAM."""
KINDS = ("first", "disk", "dram", "lora", "peers")


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


def _listed(numbers: list[float]) -> str:
    return " ".join(f"{number:.3g}" for number in numbers)


class Bench:
    """What all rows share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.clock = Clock(self.device)
        self.folder = Path(options.folder)
        self.rows: list[Row] = []

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

    def load_libraries(self) -> None:
        """Uses once what takes host memory at its first use, on a small model."""
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
            lora = tiermem.Lora(r=8, alpha=16, target_modules=["q_proj", "v_proj"])
            with tiermem.TierManager(self.device, hbm="64MiB", dram="64MiB") as tier:
                model = tiermem.load_checkpoint(
                    transformers.AutoModelForCausalLM, folder, tier=tier, lora=lora
                )
                step = self._step(model, tier, 64)
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
        import transformers

        before, rows = held(), []
        for _ in range(self.options.repeats):
            started = time.perf_counter()
            with self.loaded(self.options.dram) as (tier, model):
                self.call(model, self.options.tokens[-1])()
                self.clock.wait()
                ours = time.perf_counter() - started
                beyond = held() - before - budgeted(tier)
                with RawRead(tier, "") as raw:
                    started = time.perf_counter()
                    nbytes = raw.read()
                    read = time.perf_counter() - started
            forget(self.folder)
            started = time.perf_counter()
            plain = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
            plain = plain.to(self.device)
            self.call(plain, self.options.tokens[-1])()
            self.clock.wait()
            resident = time.perf_counter() - started
            del plain
            give_back(self.device)
            rows.append((ours, read, resident, beyond, nbytes))
        ours, read, resident = (statistics.median(r[i] for r in rows) for i in range(3))
        self.rows.append(
            {
                "what": "first logits",
                "tokens": self.options.tokens[-1],
                "s": ours,
                "raw s": read,
                "of raw": read / ours,
                "GB moved": rows[0][4] / 1e9,
                "peer": "from_pretrained",
                "peer s": resident,
                "host MiB": max(r[3] for r in rows) / 2**20,
            }
        )

    def disk(self) -> None:
        """Forwards from the disk, DRAM being small."""
        for tokens in self.options.tokens:
            before = held()
            with self.loaded(self.options.dram) as (tier, model):
                call = self.call(model, tokens)
                for _ in range(self.options.warm):
                    call()
                ours, reads = [], []
                with RawRead(tier, "") as raw:
                    for _ in range(self.options.repeats):
                        tier.reset_stats()
                        ours.append(self.clock.once(call))
                        links = tier.stats().links
                        moved = sum(v.nbytes for k, v in links.items() if k.startswith("nvme"))
                        started = time.perf_counter()
                        read = raw.read(moved)
                        reads.append((time.perf_counter() - started) * moved / max(1, read))
                beyond = held() - before - budgeted(tier)
            self._row("from disk", tokens, ours, reads, moved, beyond)

    def dram(self) -> None:
        """Forwards with all weights in DRAM."""
        for tokens in self.options.tokens:
            before = held()
            with self.loaded(self.options.roomy, "dram") as (tier, model):
                end = tier._manager.flush
                row = partial(_repeat, self.call(model, tokens), _ROW, end)
                every = [self.clock.once(row) / _ROW for _ in range(_KNOWN)]
                ours, copies = [], []
                for _ in range(max(3, self.options.repeats)):
                    tier.reset_stats()
                    ours.append(self.clock.once(row) / _ROW)
                    moved = tier.stats().links.get("dram->hbm", tiermem.LinkStats()).nbytes // _ROW
                    copies.append(self.clock.once(raw_copy(tier, moved, "")))
                every += ours
                beyond = held() - before - budgeted(tier)
            self._row("from DRAM", tokens, ours, copies, moved, beyond)
            self.rows[-1]["all s"] = _listed(every)

    def lora(self) -> None:
        """Steps of adapters."""
        resident = self._resident_lora()
        for dram in (self.options.roomy, self.options.lora_dram):
            before = held()
            lora = tiermem.Lora(r=8, alpha=16, target_modules=["q_proj", "v_proj"])
            roomy = dram == self.options.roomy
            with self.loaded(dram, lora=lora, hbm=self.options.lora_hbm) as (tier, model):
                step = self._step(model, tier, self.options.tokens[-1])
                every, ups = [], []
                for _ in range(_STEPS if roomy else self.options.warm):
                    every.append(self._measured(tier, step, ups))
                ours, raws, moved = [], [], 0
                with RawRead(tier, "") as raw:
                    for _ in range(_STEPS // 2 if roomy else self.options.repeats):
                        ours.append(self._measured(tier, step, ups))
                        links = tier.stats().links
                        moved = sum(v.nbytes for k, v in links.items() if k.startswith("nvme"))
                        raws.append(max(self._raw_traffic(tier, raw, moved), resident))
                beyond = held() - before - budgeted(tier)
                used = self._used()
            self._row(
                f"LoRA step, {dram} of DRAM", self.options.tokens[-1], ours, raws, moved, beyond
            )
            self.rows[-1] |= {
                "peer": "resident",
                "peer s": resident,
                "HBM GiB": used / 2**30,
                "all s": _listed(every + ours),
                "GB up": _listed([nbytes / 1e9 for nbytes in ups]),
            }

    def _measured(
        self, tier: tiermem.TierManager, step: Callable[[], None], ups: list[int]
    ) -> float:
        """Returns the seconds of a step; adds the bytes that it copied up."""
        tier.reset_stats()
        seconds = self.clock.once(step)
        ups.append(tier.stats().links.get("dram->hbm", tiermem.LinkStats()).nbytes)
        return seconds

    def _raw_traffic(self, tier: tiermem.TierManager, raw: RawRead, moved: int) -> float:
        """Returns the seconds of a step's reads by themselves, or of its copies if longer."""
        up = tier.stats().links.get("dram->hbm", tiermem.LinkStats()).nbytes
        target = torch.empty(64 << 20, dtype=torch.uint8, device=self.device)
        source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

        def copy() -> None:
            for _ in range(up // target.numel()):
                target.copy_(source, non_blocking=True)

        copied = self.clock.once(copy)
        started = time.perf_counter()
        read = raw.read(moved) if moved else 0
        return max(copied, (time.perf_counter() - started) * moved / max(1, read))

    def _used(self) -> int:
        """Returns the bytes of the device that are in use; no other process uses it."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _resident_lora(self) -> float:
        import transformers

        plain = transformers.AutoModelForCausalLM.from_pretrained(self.folder).to(self.device)
        tiermem.add_adapters(
            plain, tiermem.Lora(r=8, alpha=16, target_modules=["q_proj", "v_proj"])
        )
        step = self._step(plain, None, self.options.tokens[-1])
        seconds = self.clock.time(step, max(3, self.options.repeats), warm=3)
        del plain, step
        give_back(self.device)
        return statistics.median(seconds)

    def _step(
        self, model: Any, tier: tiermem.TierManager | None, tokens: int
    ) -> Callable[[], None]:
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

        def step() -> None:
            hidden = model.model(input_ids=ids).last_hidden_state
            loss = tiermem.chunked_cross_entropy(hidden, model.lm_head.weight, ids, chunks=8)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def peers(self) -> None:
        """Forwards by what is there already."""
        for name in ("device_map", "disk_offload"):
            offload = Path(f"{self.options.folder}-offload")
            try:
                forget(self.folder)
                model = getattr(self, f"_{name}")(offload)
                call = self.call(model, self.options.tokens[-1])
                call()
                for folder in (self.folder, offload):
                    forget(folder)
                seconds = self.clock.once(call)
                row = {"s": seconds}
            except (ImportError, RuntimeError, ValueError, OSError) as error:
                row = {"note": failure(error)}
            model = call = None  # type: ignore[assignment]
            shutil.rmtree(offload, ignore_errors=True)
            give_back(self.device)
            self.rows.append({"what": f"peer: {name}", "tokens": self.options.tokens[-1], **row})

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
        self, what: str, tokens: int, ours: list[float], raw: list[float], moved: int, beyond: int
    ) -> None:
        mine, bound = statistics.median(ours), statistics.median(raw)
        self.rows.append(
            {
                "what": what,
                "tokens": tokens,
                "s": mine,
                "raw s": bound,
                "of raw": bound / mine,
                "GB moved": moved / 1e9,
                "host MiB": beyond / 2**20,
            }
        )


def main() -> None:
    """Makes the folder, measures and reports; what fails says so."""
    options = _options()
    bench = Bench(options)
    make_folder(bench.folder, options.shape, bench.device)
    bench.load_libraries()
    about = {"hbm": options.hbm, "dram": options.dram, "roomy": options.roomy}
    size = sum(path.stat().st_size for path in bench.folder.glob("*.safetensors"))
    for kind in options.what:
        try:
            getattr(bench, kind)()
        except (ImportError, RuntimeError, ValueError, tiermem.TierError) as error:
            bench.rows.append({"what": kind, "note": failure(error)})
        gc.collect()
        report("A model from a checkpoint", bench.rows, options.out, size=size, **about)


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
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    for name in ("hbm", "dram", "roomy", "lora_dram", "lora_hbm"):
        parse_size(getattr(options, name), name)
    return options


if __name__ == "__main__":
    main()
