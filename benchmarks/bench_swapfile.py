"""Swap file throughput beside fio: the bare engine, and the whole way through the file mover.

Everything works on the same blocks of the same file: fio opens the nameless swap
file through /proc. Each round measures fio and tiermem one after the other; what
counts is the median of the rounds' ratios, since a shared disk drifts.

    python benchmarks/bench_swapfile.py --folder /mnt/nvme --size 2GiB --rounds 7 --json out.json

The table goes to the terminal and, with ``--json``, beside that file as ``.md``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tiermem.config import format_size, parse_size
from tiermem.core.block import Extent, Tier, align_up
from tiermem.io import IoEngine, IoOp, IoRequest, choose_engine
from tiermem.storage.arena import HostArena
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Memory
from tiermem.transfer.file.mover import FileMover

ROWS = (
    "fio read",
    "engine read",
    "mover read",
    "mover read, busy Python thread",
    "fio write",
    "engine write",
    "mover write",
)
Row = dict[str, float]


def host(nbytes: int) -> torch.Tensor:
    """Returns host memory as a manager's arenas have it: huge pages where there are any."""
    memory = HostArena(Tier.DRAM, nbytes).bytes_of(Extent(0, nbytes))
    memory.random_(0, 256)
    return memory


def measure(nbytes: int, work: Callable[[], object]) -> Row:
    """Runs ``work`` and returns bytes per second and cores (CPU seconds per second)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    wall = time.perf_counter() - wall
    return {"bytes_per_s": nbytes / wall, "cores": (time.process_time() - cpu) / wall}


def fio(fd: int, op: str, size: int, block: int, depth: int) -> Row:
    """Runs fio on the same file, with io_uring, registered files and buffers."""
    command = [
        "fio",
        "--name=tiermem",
        f"--filename=/proc/{os.getpid()}/fd/{fd}",
        f"--rw={op}",
        f"--size={size}",
        f"--bs={block}",
        f"--iodepth={depth}",
        "--ioengine=io_uring",
        "--direct=1",
        "--registerfiles=1",
        "--fixedbufs=1",
        "--allow_file_create=0",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cores = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return {"bytes_per_s": float(job[op]["bw_bytes"]), "cores": cores}


def drive(engine: IoEngine, op: IoOp, size: int, block: int, memory: Memory) -> None:
    """Moves ``size`` bytes in order, with as many requests in flight as memory has blocks."""
    offsets = iter(range(0, size, block))

    def request(slot: int, offset: int) -> IoRequest:
        nbytes = min(block, size - offset)
        return IoRequest(op, 0, offset, memory.address + slot * block, nbytes, slot)

    slots = range(memory.nbytes // block)
    engine.submit([request(*pair) for pair in zip(slots, offsets, strict=False)])
    while engine.in_flight:
        completions = engine.wait(None)
        if failed := [c for c in completions if c.errno]:
            raise OSError(failed[0].errno, os.strerror(failed[0].errno))
        free = (c.token for c in completions)
        engine.submit([request(*pair) for pair in zip(free, offsets, strict=False)])


class Bench:
    """One folder's measurements.

    Args:
        options: What the command line says.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.size, self.block, self.depth = options.size, options.block, options.depth
        self.factory, self.engine_name, self.engine_reason = choose_engine()
        self.store = SwapFile([options.folder], None, self.block)
        self.store.grow(self.size)
        self.run_nbytes = min(self.size, align_up(16 * self.block))
        self.extents = [
            self.store.allocate(min(self.run_nbytes, self.size - offset))
            for offset in range(0, self.size, self.run_nbytes)
        ]
        self.memory = host(min(self.size, 512 << 20))
        self.staging = host(self.depth * self.block)
        self.buffer = Memory(self.depth * self.block)
        self.fio = shutil.which("fio") is not None and not options.no_fio
        self.detail = ""

    def engine(self, op: IoOp) -> Row:
        """Measures the bare engine."""
        engine = self.factory()
        try:
            engine.open(self.store.fds, [(self.buffer.address, self.buffer.nbytes)])
            self.detail = engine.describe()
            return measure(self.size, lambda: drive(engine, op, self.size, self.block, self.buffer))
        finally:
            engine.close()

    def mover(self, mover: FileMover, op: IoOp) -> Row:
        """Measures the way through staging, checksums on, between file and memory."""
        starts = itertools.cycle(
            range(0, self.memory.numel() - self.run_nbytes + 1, self.run_nbytes)
        )
        places = [
            self.memory[start:][: e.nbytes] for start, e in zip(starts, self.extents, strict=False)
        ]
        before = mover.stats()

        def work() -> None:
            start = mover.read if op is IoOp.READ else mover.write
            pairs = zip(self.extents, places, strict=True)
            for transfer in [start(e, place, label="bench") for e, place in pairs]:
                mover.wait(transfer)
                if transfer.error is not None:
                    raise transfer.error

        row = measure(self.size, work)
        after = mover.stats()
        seconds = self.size / row["bytes_per_s"]
        row["checksum_share"] = (after.checksum_seconds - before.checksum_seconds) / seconds
        row["copy_share"] = (after.copy_seconds - before.copy_seconds) / seconds
        mover.poll()
        return row

    def round(self, fio_first: bool) -> dict[str, Row]:
        """Measures every row once; who goes first changes with the rounds."""
        rows: dict[str, Row] = {}
        with FileMover(self.store, self.factory, self.staging, self.block) as mover:
            rows["mover write"] = self.mover(mover, IoOp.WRITE)
            self.beside_fio(rows, IoOp.READ, fio_first)
            rows["mover read"] = self.mover(mover, IoOp.READ)
            with busy_thread():
                rows["mover read, busy Python thread"] = self.mover(mover, IoOp.READ)
        rows["mover read, busy Python thread"].pop("cores")  # the busy thread's, mostly
        self.beside_fio(rows, IoOp.WRITE, fio_first)
        return rows

    def beside_fio(self, rows: dict[str, Row], op: IoOp, fio_first: bool) -> None:
        """Measures the bare engine and fio in the order A B B A, the better of two each.

        Drift cancels out that way, and a fio that alternates between two speeds from run
        to run (seen on a virtual disk) counts with the faster one.
        """
        a, b = ("fio", "engine") if fio_first else ("engine", "fio")
        found: dict[str, list[Row]] = {"fio": [], "engine": []}
        for who in (a, b, b, a):
            if who == "engine":
                found[who].append(self.engine(op))
            elif self.fio:
                found[who].append(self.run_fio(op.value))
        for who, pair in found.items():
            if pair:
                rows[f"{who} {op.value}"] = max(pair, key=lambda row: row["bytes_per_s"])

    def run_fio(self, op: str) -> Row:
        return fio(self.store.fds[0], op, self.size, self.block, self.depth)


@contextmanager
def busy_thread() -> Iterator[None]:
    """Keeps a thread in pure Python, as a training loop's own code does."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def summarize(rounds: list[dict[str, Row]]) -> dict[str, Row]:
    """Returns medians per row, with the median of each round's ratio to fio."""
    summary: dict[str, Row] = {}
    for name in ROWS:
        found = [r[name] for r in rounds if name in r]
        if not found:
            continue
        row = {key: statistics.median(f[key] for f in found) for key in found[0]}
        base = f"fio {'write' if 'write' in name else 'read'}"
        ratios = [r[name]["bytes_per_s"] / r[base]["bytes_per_s"] for r in rounds if base in r]
        if ratios:
            row["of_fio"] = statistics.median(ratios)
            row["of_fio_least"], row["of_fio_most"] = min(ratios), max(ratios)
        summary[name] = row
    return summary


def table(summary: dict[str, Row]) -> str:
    """Returns the summary as a Markdown table."""
    lines = [
        "| what | GB/s | of fio: median (range) | cores | checksum | copy |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in summary.items():
        ratio = "–"
        if "of_fio" in row:
            spread = f"{row['of_fio_least']:.2f}–{row['of_fio_most']:.2f}"
            ratio = f"{row['of_fio']:.3f} ({spread})"
        cores = f"{row['cores']:.2f}" if "cores" in row else "–"
        shares = [
            f"{100 * row[key]:.1f}%" if key in row else "–"
            for key in ("checksum_share", "copy_share")
        ]
        rate = f"{row['bytes_per_s'] / 1e9:.2f}"
        lines.append(f"| {' | '.join([name, rate, ratio, cores, *shares])} |")
    return "\n".join(lines)


def facts(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the figures depend on."""
    version = "not run"
    if bench.fio:
        version = subprocess.run(
            ["fio", "--version"], capture_output=True, text=True
        ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/bench_swapfile.py "
        f"--size {format_size(bench.size).replace(' ', '')} "
        f"--block {format_size(bench.block).replace(' ', '')} "
        f"--depth {bench.depth} --rounds {options.rounds}",
        "hardware": {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "memory": format_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")),
            "kernel": platform.release(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fio": version,
        },
        "engine": f"{bench.engine_name}: {bench.detail}",
        "direct": bench.store.direct_reason,
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder on the disk")
    parser.add_argument("--size", type=parse_size, default="2GiB", help="bytes of the file")
    parser.add_argument("--block", type=parse_size, default="8MiB", help="bytes of one request")
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here, and a .md beside it")
    parser.add_argument("--no-fio", action="store_true", help="measure tiermem alone")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    with bench.store:
        bench.round(True)  # the first writes go to fresh blocks and are slower
        rounds = [bench.round(index % 2 == 0) for index in range(options.rounds)]
        about = facts(bench, options)
    summary = summarize(rounds)
    print(table(summary))
    if options.json:
        result = {**about, "summary": summary, "rounds": rounds}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(report(about, summary))
    return 0


def report(about: dict[str, Any], summary: dict[str, Row]) -> str:
    """Returns the page that goes beside the figures."""
    lines = [
        "# The swap file beside fio",
        "",
        f"- Date: {about['date']}",
        f"- Command: `{about['command']}`",
        f"- Hardware: {', '.join(about['hardware'].values())}",
        f"- Versions: {', '.join(f'{k} {v}' for k, v in about['versions'].items())}",
        f"- Engine: {about['engine']}; {about['direct']}",
        "",
        table(summary),
        "",
        "`cores` are CPU seconds of the process per second of wall time. `mover` is the whole way",
        "between the file and an arena of host memory, every checksum verified: reads go through",
        "staging chunks, writes straight from the arena. `checksum` and `copy` are the seconds",
        "that helper threads spend there per second of wall time. `of fio` compares with fio in",
        "the same round (order A B B A, the better of two runs each): io_uring, O_DIRECT, the same",
        "file, block and depth, registered files and buffers.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
