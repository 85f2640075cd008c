"""Measure what this machine's links give, and keep it as the machine's profile.

Short, for choosing budgets and for ``tiermem plan``; benchmarks/ has the careful ones. With
--codec it measures instead what packing a checkpoint's bytes would give beside those links.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tiermem.cli.options import parse_bytes, parse_path, pick_device
from tiermem.cli.plan import add_speed_arguments, read_speeds
from tiermem.config import format_size
from tiermem.core.block import ALIGNMENT, align_up
from tiermem.errors import ConfigError

if TYPE_CHECKING:
    from tiermem.cli.codec import BreakEven, Packing
    from tiermem.cli.measured import Measurement
    from tiermem.runtime.metrics.machine_profile import MachineProfile

_SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
_CHUNKS = (4 << 20, 8 << 20, 1 << 20)  # the usual ones first: time may run out
_DEPTHS = (8, 16, 4, 1)
_MEMORY_SECONDS = 5.0
_SWEEP_SECONDS = 6.0
_BEST_SECONDS = 3.0
_CODEC_WORDS = (
    "needed: speed that the codec would have to have; below: speed of a link below which it pays",
    "speed: packed and then moved, by moved as it is; beside: the codec works while the link does",
    "simulated: float32 moments of Adam after a few steps of a small network; no "
    "optimizer*.safetensors lies beside the weights",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``tiermem bench``."""
    parser.add_argument(
        "--nvme",
        action="append",
        type=parse_path,
        metavar="FOLDER",
        help="repeatable; 'none' to leave disks out (default: a folder on a disk)",
    )
    parser.add_argument("--size", default="256MiB", help="of each copy (default: 256MiB)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="the median counts")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-save", action="store_true", help="leave the saved profile as it is")
    parser.add_argument(
        "--picture", type=parse_path, metavar="FILE", help="draw bandwidth by size and by depth"
    )
    codec = parser.add_argument_group("packing, instead of links")
    codec.add_argument(
        "--codec",
        type=parse_path,
        metavar="DIR",
        help="a checkpoint: ratio and speed of byte planes and lz4 for at most --size of its "
        "weights and moments, and the speed of a link below which that pays",
    )
    add_speed_arguments(codec)


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem bench``."""
    from tiermem.cli.machine import default_swap_folder, hardware
    from tiermem.cli.measured import picture

    nbytes = align_up(parse_bytes(arguments.size, "--size"))
    if nbytes < ALIGNMENT:
        raise ConfigError(f"--size must be at least {ALIGNMENT} bytes")
    if arguments.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, not {arguments.repeat}")
    _refuse_unused(arguments)
    if arguments.codec is not None:
        return run_codec(arguments, nbytes)
    device = pick_device(arguments.device)
    folders = [default_swap_folder()] if arguments.nvme is None else arguments.nvme
    folders = [] if folders == ["none"] else folders

    memory = bench_memory(nbytes, arguments.repeat, device)
    tried, disks = bench_disks(folders, nbytes, arguments.repeat, device) if folders else ([], [])
    profile = make_profile(memory, disks, device, folders)
    saved = "" if arguments.no_save else _save(profile)
    if arguments.picture:
        try:
            picture([*memory, *tried], arguments.picture, f"Links of {profile.device}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--picture {arguments.picture}: {error}") from error
    if arguments.json:
        results = [_row(measured) for measured in [*memory, *disks]]
        facts = {"hardware": hardware(), "results": results, "sweep": [_row(m) for m in tried]}
        print(json.dumps({**facts, "profile": asdict(profile), "saved": saved}, indent=2))
    else:
        _print([*memory, *disks], saved)
    return 0


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuses options of links beside --codec, and those of packing without it."""
    if arguments.codec is not None:
        names: tuple[str, ...] = ("nvme", "picture")
        what = "measures links, which --codec leaves out; leave out one"
    else:
        names = ("link_gbps", "read_gbps", "write_gbps", "profile")
        what = "says how fast links are, for --codec; without it they are measured: leave it out"
        if arguments.profile is not None:
            from tiermem.runtime.metrics.machine_profile import VARIABLE

            what += f" (the profile is saved where {VARIABLE} says)"
    for name in names:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {what}")


def run_codec(arguments: argparse.Namespace, nbytes: int) -> int:
    """Runs ``tiermem bench --codec``."""
    from tiermem.cli.codec import break_evens, measure, samples, usual_threads
    from tiermem.cli.machine import hardware

    links, sources = read_speeds(arguments)
    found = samples(arguments.codec, nbytes)
    packings = [measure(sample, usual_threads(), arguments.repeat) for sample in found]
    evens = [even for packing in packings for even in break_evens(packing, links)]
    if arguments.json:
        facts = {"hardware": hardware(), "results": [packing_row(p) for p in packings]}
        rows = [asdict(even) for even in evens]
        print(json.dumps({**facts, "break_even": rows, "speeds": sources}, indent=2))
    else:
        _print_codec(packings, evens, sources)
    return 0


def packing_row(packing: Packing) -> dict[str, object]:
    """Returns a result of the codec as plain data; speeds are in GB/s of numbers."""
    speeds = {
        f"{direction}, {threads} thread{'s' if threads > 1 else ''}": speed.bytes_per_s / 1e9
        for (direction, threads), speed in packing.speeds.items()
    }
    return {
        "what": packing.what,
        "sampled": format_size(packing.nbytes),
        "of": format_size(packing.total),
        "ratio": packing.ratio,
        **speeds,
    }


def bench_memory(nbytes: int, repeat: int, device: str) -> list[Measurement]:
    """Measures copies within memory and between the arenas of HBM and DRAM, by size."""
    from tiermem.cli.links import MemoryLinks

    sizes = [size for size in _SIZES if size < nbytes] + [nbytes]
    with MemoryLinks(device, nbytes) as links:
        return links.measure(sizes, repeat, time.perf_counter() + _MEMORY_SECONDS)


def bench_disks(
    folders: Sequence[str], nbytes: int, repeat: int, device: str
) -> tuple[list[Measurement], list[Measurement]]:
    """Measures swap files in ``folders``, striped.

    Returns:
        Every chunk and depth that was tried, and the best of them, measured with care.
    """
    from tiermem.cli.disks import measure_best, sweep

    until = time.perf_counter() + _SWEEP_SECONDS
    tried = sweep(folders, device, nbytes, 1, chunks=_CHUNKS, depths=_DEPTHS, until=until)
    until = time.perf_counter() + _BEST_SECONDS
    return tried, measure_best(tried, folders, device, nbytes, repeat, until)


def make_profile(
    memory: Sequence[Measurement],
    disks: Sequence[Measurement],
    device: str,
    folders: Sequence[str],
) -> MachineProfile:
    """Returns the profile: the speed of the largest copy counts for each link."""
    import torch

    from tiermem import __version__
    from tiermem.runtime.metrics.machine_profile import MachineProfile, device_name

    largest = sorted([*memory, *disks], key=lambda m: m.nbytes)
    rates = {measured.link: measured.bytes_per_s for measured in largest}
    ups = [m for m in memory if m.link == "dram->hbm"]
    return MachineProfile(
        device=device_name(device),
        date=datetime.date.today().isoformat(),
        tiermem=__version__,
        torch=torch.__version__,
        h2d=rates.get("dram->hbm"),
        d2h=rates.get("hbm->dram"),
        duplex=rates.get("dram<->hbm"),
        d2d=rates.get("hbm->hbm"),
        host_copy=rates.get("dram->dram"),
        nvme_read=rates.get("nvme->hbm"),
        nvme_write=rates.get("hbm->nvme"),
        nvme_mixed=rates.get("nvme<->hbm"),
        nvme_chunk=disks[0].chunk if disks else None,
        nvme_depth=disks[0].depth if disks else None,
        h2d_by_size=tuple((m.nbytes, m.bytes_per_s) for m in ups),
        folders=tuple(str(Path(folder).absolute()) for folder in folders),
    )


def _save(profile: MachineProfile) -> str:
    from tiermem.runtime.metrics.machine_profile import profile_path, save

    try:
        return str(save(profile))
    except OSError as error:
        path = profile_path(profile.device)
        raise ConfigError(
            f"the profile cannot be saved as {path} ({error.strerror}); set TIERMEM_PROFILE "
            "to a file that can be written, or give --no-save"
        ) from error


def _row(measured: Measurement) -> dict[str, object]:
    return {**asdict(measured), "gb_per_s": measured.bytes_per_s / 1e9}


def _print(rows: Sequence[Measurement], saved: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("link", "bytes", "GB/s", "how"):
        table.add_column(column, justify="right" if column in ("bytes", "GB/s") else "left")
    for row in rows:
        how = row.how
        if row.chunk:
            how += f", {format_size(row.chunk)} × {row.depth} in flight"
        how += f", {row.note}" if row.note else ""
        rate = f"{row.bytes_per_s / 1e9:.2f}"
        table.add_row(row.link, format_size(row.nbytes), rate, how)
    console = Console(highlight=False)
    console.print(table)
    if saved:
        console.print(f"saved as {saved}", soft_wrap=True)


def _print_codec(
    packings: Sequence[Packing], evens: Sequence[BreakEven], sources: dict[str, str]
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title="Byte planes and lz4, GB/s of numbers")
    table.add_column("what", no_wrap=True)
    for packing in packings[:1]:
        heads = [f"{direction} ×{threads}" for direction, threads in packing.speeds]
        for column in ("MiB", "ratio", *heads):
            table.add_column(column, justify="right")
    for packing in packings:
        rates = [f"{speed.bytes_per_s / 1e9:.2f}" for speed in packing.speeds.values()]
        mib = f"{packing.nbytes / 2**20:.0f}"
        table.add_row(packing.what, mib, f"{packing.ratio:.2f}", *rates)
    console.print(table)
    pays = Table(title="Where it pays, with the threads that do best")
    pays.add_column("what", no_wrap=True)
    for column in ("link", "GB/s", "needed", "below", "speed", "beside"):
        pays.add_column(column, justify="left" if column == "link" else "right")
    for even in evens:
        needed = "–" if even.needed is None else f"{even.needed / 1e9:.1f}"
        cells = (f"{even.link / 1e9:.1f}", needed, f"{even.pays_below / 1e9:.2f}")
        gains = (f"{gain:.2f}×" for gain in (even.gain, even.gain_beside))
        pays.add_row(even.what, even.way, *cells, *gains)
    console.print(pays)
    for line in _CODEC_WORDS:
        console.print(line, soft_wrap=True)
    for link, source in sources.items():
        console.print(f"{link}: {source}", soft_wrap=True)
