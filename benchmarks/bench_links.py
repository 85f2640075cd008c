"""What every link gives: start-up of host memory, copies by size, disks by chunk and depth.

The device's link is measured from the page-locked arena on the streams of tiermem's
copy engine, with pageable memory beside it; disks with the bare I/O engines beside fio
(in turn, on the same file), and through the file mover between the swap file and HBM.

    python benchmarks/bench_links.py --folder /mnt/nvme --out benchmarks/results/links_h200.json

With ``--device cpu`` host memory stands in for HBM, and what needs CUDA is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_swapfile import Bench
from common import report, speed_row

from tiermem.cli.disks import CHUNKS, DEPTHS, measure_best, sweep
from tiermem.cli.links import SIZES, MemoryLinks
from tiermem.cli.measured import Measurement, picture, rounds
from tiermem.config import format_size, parse_size
from tiermem.core.block import Extent, Tier, align_up
from tiermem.io import IoOp, choose_engine
from tiermem.storage.arena import HostArena

ENGINES = ("uring", "threads")
Found = tuple[Measurement, dict[str, Any]]
"""A measurement, with columns of its own for the table."""


def arena(nbytes: int, device: torch.device) -> float:
    """Returns the seconds that a host arena takes, ready for copies."""
    began = time.perf_counter()
    made = HostArena(Tier.DRAM, nbytes, device=device)
    if device.type != "cuda":
        made.bytes_of(Extent(0, nbytes)).fill_(1)
    seconds = time.perf_counter() - began
    made.close()
    return seconds


def torch_memory(nbytes: int, *, page_lock: bool) -> float:
    """Returns the seconds that torch's memory takes (cudaHostAlloc where page-locked)."""
    began = time.perf_counter()
    made = torch.empty(nbytes, dtype=torch.uint8, pin_memory=page_lock)
    if not page_lock:
        made.fill_(1)
    seconds = time.perf_counter() - began
    del made
    if page_lock:  # or the next one would get this memory again
        names = ("_host_emptyCache", "_accelerator_emptyHostCache")
        next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))()
    return seconds


def startup(nbytes: int, repeats: int, device: torch.device) -> list[Found]:
    """Measures how long it takes until host memory is there to copy from."""
    cuda = device.type == "cuda"
    state = "page-locked" if cuda else "touched"
    ways: dict[str, Callable[[], float]] = {
        f"HostArena, {state}": partial(arena, nbytes, device),
        f"{'cudaHostAlloc' if cuda else 'torch.empty'}, {state}": partial(
            torch_memory, nbytes, page_lock=cuda
        ),
    }
    found = []
    for how, seconds in rounds(ways, repeats).items():
        made = Measurement.of("start-up", how, nbytes, seconds)
        found.append((made, {"s per GiB": 2**30 / made.bytes_per_s}))
    return found


def memory(device: str, nbytes: int, repeats: int) -> list[Found]:
    """Measures copies by size, page-locked and, on CUDA, pageable."""
    sizes = sorted({size for size in SIZES if size < nbytes} | {nbytes})
    with MemoryLinks(device, nbytes) as links:
        found = links.measure(sizes, repeats)
    if device != "cpu":
        with MemoryLinks(device, nbytes, pageable=True) as links:
            found += links.measure(sizes, repeats)
    return [(measured, {}) for measured in found]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that the engines read into and write from."""

    address: int
    nbytes: int


class Engines:
    """The bare I/O engines and fio, in turn, on one file.

    Their memory is an arena, as in tiermem itself: in huge pages the disk's requests stay
    whole (on one virtual disk: 3.9 GB/s read, 1.8 in ordinary pages).

    Args:
        options: What the command line says.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.bench = Bench(
            argparse.Namespace(
                folder=options.folder,
                size=options.disk_size,
                block=min(max(options.chunks), options.disk_size),
                depth=1,
                no_fio=options.no_fio,
            )
        )
        self.factories = {}
        for asked in ENGINES:
            factory, name, _ = choose_engine(asked)
            self.factories[name] = factory  # once, where the one falls back to the other

    def measure(self, chunk: int, depth: int, repeats: int) -> list[Found]:
        """Measures reading and writing.

        In each round fio and the engines go there and back, so that drift cancels out, and
        the better of the two runs counts, as in bench_swapfile.py and for its reason.
        """
        bench = self.bench
        memory = HostArena(Tier.DRAM, chunk * depth)
        memory.bytes_of(Extent(0, memory.capacity)).random_(0, 256)
        bench.block, bench.depth = chunk, depth
        bench.buffer = Buffer(memory.address, memory.capacity)
        who = (["fio"] if bench.fio else []) + list(self.factories)
        results = []
        for op in (IoOp.READ, IoOp.WRITE):
            found: dict[str, list[float]] = {name: [] for name in who}
            for _ in range(repeats):
                there = {name: self._once(name, op) for name in who}
                for name in reversed(who):
                    found[name].append(max(there[name], self._once(name, op)))
            results += self._results(op, found)
        memory.close()
        return results

    def _once(self, name: str, op: IoOp) -> float:
        if name == "fio":
            return self.bench.run_fio(op.value)["bytes_per_s"]
        self.bench.factory = self.factories[name]
        return self.bench.engine(op)["bytes_per_s"]

    def _results(self, op: IoOp, found: dict[str, list[float]]) -> list[Found]:
        size, chunk, depth = self.bench.size, self.bench.block, self.bench.depth
        link = "nvme->dram" if op is IoOp.READ else "dram->nvme"
        results = []
        for name, rates in found.items():
            seconds = [size / rate for rate in rates]
            made = Measurement.of(link, name, size, seconds, chunk=chunk, depth=depth)
            more = {}
            if "fio" in found and name != "fio":
                pairs = zip(rates, found["fio"], strict=True)
                more["of fio"] = statistics.median(mine / fios for mine, fios in pairs)
            results.append((made, more))
        return results


def engines(options: argparse.Namespace) -> list[Found]:
    """Measures the bare engines for every chunk and depth."""
    work = Engines(options)
    with work.bench.store:
        work.measure(work.bench.block, 4, 1)  # the first writes go to fresh blocks
        return [
            found
            for chunk in options.chunks
            if chunk <= options.disk_size
            for depth in options.depths
            for found in work.measure(chunk, depth, options.disk_rounds)
        ]


def movers(options: argparse.Namespace) -> list[Found]:
    """Measures the way through the file mover, and both directions at once."""
    folders, size = [str(options.folder)], options.disk_size
    found: list[Measurement] = []
    for engine in dict.fromkeys(choose_engine(asked)[1] for asked in ENGINES):
        found += sweep(
            folders,
            options.device,
            size,
            options.disk_rounds,
            chunks=options.chunks,
            depths=options.depths,
            engine=engine,
        )
    first = [m for m in found if m.how == found[0].how]
    at_best = measure_best(first, folders, options.device, size, options.repeats)
    found += [m for m in at_best if "<->" in m.link]
    if options.device != "cpu":  # the same without the bus, for comparison
        for m in measure_best(first, folders, "cpu", size, options.repeats):
            found.append(dataclasses.replace(m, link=m.link.replace("hbm", "dram")))
    return [(measured, {}) for measured in found]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=default)
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder on the disk")
    parser.add_argument("--size", type=parse_size, default="1GiB", help="of the largest copy")
    parser.add_argument("--startup-size", type=parse_size, help="of start-up (default: --size)")
    parser.add_argument("--disk-size", type=parse_size, help="of the file (default: half --size)")
    parser.add_argument("--repeats", type=int, default=7, help="medians of so many rounds")
    parser.add_argument("--disk-rounds", type=int, help="of disks (default: a third)")
    parser.add_argument("--chunks", type=parse_size, nargs="*", default=list(CHUNKS))
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--no-fio", action="store_true", help="leave fio out")
    parser.add_argument("--no-disk", action="store_true", help="leave the disk out")
    parser.add_argument("--out", default=None, help="JSON file; .md and .png are written beside it")
    options = parser.parse_args(argv)
    options.size = align_up(options.size)
    options.startup_size = align_up(options.startup_size or options.size)
    options.disk_size = align_up(options.disk_size or options.size // 2)
    options.disk_rounds = options.disk_rounds or max(1, options.repeats // 3)
    return options


def main() -> None:
    """Measures every link and prints a table."""
    options = arguments()
    device = torch.device(options.device)
    began = time.perf_counter()
    found = startup(options.startup_size, max(1, options.repeats // 3), device)
    found += memory(options.device, options.size, options.repeats)
    if not options.no_disk:
        found += engines(options) + movers(options)
    title = f"Links, {options.device}, copies up to {format_size(options.size)}"
    measured = [made for made, _ in found]
    notes: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "measured": [dataclasses.asdict(made) for made in measured],
        "engine": choose_engine()[2],
    }
    if not options.no_disk and shutil.which("fio") is None:
        notes["fio"] = "not installed"
    if options.out:
        target = Path(options.out).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        picture([made for made in measured if made.link != "start-up"], target, title)
        notes["picture"] = target.name
    rows = [speed_row(made, **more) for made, more in found]
    report(title, rows, options.out, **notes)


if __name__ == "__main__":
    main()
