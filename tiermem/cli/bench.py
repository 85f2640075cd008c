"""Measure what this machine's links give: host memory, the bus, the disks.

Short and rough, for choosing budgets; benchmarks/ has the careful ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiermem.cli.options import parse_bytes, pick_device
from tiermem.config import format_size
from tiermem.core.block import ALIGNMENT, Extent, Tier, align_up
from tiermem.errors import ConfigError

if TYPE_CHECKING:
    from tiermem.storage.arena import Arena

_CHUNK = 4 << 20
_CHUNKS = 8

Rows = list[dict[str, object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``tiermem bench``."""
    parser.add_argument(
        "--nvme",
        action="append",
        metavar="FOLDER",
        help="repeatable; 'none' to leave disks out (default: a folder on a disk)",
    )
    parser.add_argument("--size", default="256MiB", help="of each copy (default: 256MiB)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="the best counts")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem bench``."""
    from tiermem.cli.machine import default_swap_folder, hardware

    nbytes = align_up(parse_bytes(arguments.size, "--size"))
    if nbytes < ALIGNMENT:
        raise ConfigError(f"--size must be at least {ALIGNMENT} bytes")
    if arguments.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, not {arguments.repeat}")
    device = pick_device(arguments.device)
    folders = [default_swap_folder()] if arguments.nvme is None else arguments.nvme

    rows = bench_memory(nbytes, arguments.repeat, device)
    if folders != ["none"]:
        rows += bench_disks(folders, nbytes, arguments.repeat)
    if arguments.json:
        print(json.dumps({"hardware": hardware(), "results": rows}, indent=2))
    else:
        _print(rows)
    return 0


def bench_memory(nbytes: int, repeat: int, device: str) -> Rows:
    """Measures copies within host memory and between the arenas of HBM and DRAM."""
    import torch

    from tiermem.storage.arena import DeviceArena, HostArena

    cuda = device.startswith("cuda")
    whole = Extent(0, nbytes)
    host: Arena = HostArena(Tier.DRAM, nbytes, page_lock=cuda)
    high: Arena
    if cuda:
        high = DeviceArena(nbytes, torch.device(device))
    else:
        high = HostArena(Tier.HBM, nbytes)
    source = torch.ones(nbytes, dtype=torch.uint8)
    low, up = host.bytes_of(whole), high.bytes_of(whole)
    wait = torch.cuda.synchronize if cuda else _nothing
    rows: Rows = []
    for name, target, origin in (
        ("host -> host", low, source),
        ("dram -> hbm", up, low),
        ("hbm -> dram", low, up),
    ):
        copy = partial(target.copy_, origin, non_blocking=cuda)
        rows.append(_row(name, nbytes, _best(copy, wait, repeat)))
    # The maps go with the last tensor over them.
    del source, low, up, copy, target, origin
    host.close()
    high.close()
    return rows


def bench_disks(folders: list[str], nbytes: int, repeat: int) -> Rows:
    """Measures writing to and reading from swap files in ``folders``, striped."""
    import torch

    from tiermem.io.probe import choose_engine
    from tiermem.storage.arena import HostArena
    from tiermem.storage.swapfile import SwapFile
    from tiermem.transfer.filemover import FileMover, FileTransfer

    factory, engine, _ = choose_engine()
    chunk = min(_CHUNK, nbytes)
    arena = HostArena(Tier.DRAM, _CHUNKS * chunk)
    staging = arena.bytes_of(Extent(0, _CHUNKS * chunk))
    memory = torch.randint(256, (nbytes,), dtype=torch.uint8)
    with SwapFile([Path(folder) for folder in folders], None, chunk) as store:
        store.grow(nbytes)
        extent = store.allocate(nbytes)
        with FileMover(store, factory, staging, chunk) as mover:

            def over(transfer: FileTransfer) -> None:
                mover.wait(transfer)
                if transfer.error is not None:
                    raise transfer.error

            def write() -> None:
                over(mover.write(extent, memory, label="bench"))

            def read() -> None:
                over(mover.read(extent, memory, label="bench"))

            note = f"{engine}, {'O_DIRECT' if store.direct else 'page cache'}, checksums"
            rows = [
                _row("dram -> nvme", nbytes, _best(write, _nothing, repeat), note),
                _row("nvme -> dram", nbytes, _best(read, _nothing, repeat), note),
            ]
    del staging
    arena.close()
    return rows


def _nothing() -> None:
    """Copies within host memory are over when they return."""


def _best(action: Callable[[], object], wait: Callable[[], object], repeat: int) -> float:
    action()  # pages are touched and clocks wake up outside the measurement
    wait()
    best = float("inf")
    for _ in range(repeat):
        begin = time.perf_counter()
        action()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def _row(name: str, nbytes: int, seconds: float, note: str = "") -> dict[str, object]:
    return {
        "link": name,
        "nbytes": nbytes,
        "seconds": seconds,
        "gb_per_s": nbytes / seconds / 1e9,
        "note": note,
    }


def _print(rows: Rows) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("link", "bytes", "GB/s", ""):
        table.add_column(column, justify="right" if column in ("bytes", "GB/s") else "left")
    for row in rows:
        nbytes = row["nbytes"]
        assert isinstance(nbytes, int)
        table.add_row(
            str(row["link"]), format_size(nbytes), f"{row['gb_per_s']:.2f}", str(row["note"])
        )
    Console(highlight=False).print(table)
