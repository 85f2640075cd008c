"""Forecast where a model's tensors live, what moves, and a bound on the step time.

It moves nothing and needs no GPU: sizes and speeds are arithmetic from the options.
The speeds default to what ``tiermem bench`` saved of this machine, and where it has not
been measured to those of one H200 on PCIe Gen5 x16 with a 3 GB/s disk.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tiermem.cli.forecast import STATES, Forecast, Machine, Workload, forecast
from tiermem.cli.options import check_whole, parse_bytes, parse_count, parse_path
from tiermem.config import format_size
from tiermem.errors import ConfigError

_USUAL_GBPS = {"link": 55.0, "read": 3.0, "write": 3.0}
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``tiermem plan``."""
    model = parser.add_argument_group("model")
    model.add_argument("--params", metavar="N", help="parameters, such as 7e9 or 7B")
    model.add_argument("--layers", type=int, default=32, metavar="N")
    model.add_argument("--width", type=int, metavar="N", help="instead of --params: 12·width² each")
    model.add_argument("--dtype", choices=sorted(_ITEMSIZES), default="bfloat16")
    model.add_argument("--optimizer", choices=sorted(STATES), default="adamw")
    model.add_argument("--tokens", default="8192", metavar="N", help="in a step (default: 8192)")
    model.add_argument("--recompute", action="store_true", help="activation checkpointing")
    model.add_argument("--inference", action="store_true", help="forward only")
    tiers = parser.add_argument_group("budgets")
    tiers.add_argument("--hbm", required=True, metavar="SIZE")
    tiers.add_argument("--dram", required=True, metavar="SIZE")
    tiers.add_argument("--nvme-bytes", default="0", metavar="SIZE")
    speeds = parser.add_argument_group("speeds")
    add_speed_arguments(speeds)
    speeds.add_argument("--tflops", default="700", metavar="N", help="of the device, in --dtype")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_speed_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options for how fast links and disks are."""
    group.add_argument("--link-gbps", metavar="GB/S", help="host link, each way")
    group.add_argument("--read-gbps", metavar="GB/S", help="disks, reading")
    group.add_argument("--write-gbps", metavar="GB/S", help="disks, writing")
    group.add_argument(
        "--profile",
        type=parse_path,
        metavar="FILE",
        help="what `tiermem bench` saved, of any machine; 'none' to use no profile",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem plan``."""
    work = read_workload(arguments)
    machine, sources = read_machine(arguments)
    result = forecast(work, machine)
    if arguments.json:
        more = {"step_seconds": result.step_seconds, "speeds": sources}
        print(json.dumps({**asdict(result), **more}, indent=2))
    else:
        _print(result, work, machine, sources)
    return 0


def read_workload(arguments: argparse.Namespace) -> Workload:
    """Checks the options about the model.

    Raises:
        ConfigError: If one cannot be used.
    """
    check_whole("layers", arguments.layers)
    if (arguments.params is None) == (arguments.width is None):
        raise ConfigError("give either --params or --width (with --layers)")
    if arguments.params is not None:
        parameters = parse_count(arguments.params, "--params", least=1)
    else:
        check_whole("width", arguments.width)
        parameters = float(arguments.layers * 12 * arguments.width**2)
    return Workload(
        parameters=parameters,
        layers=arguments.layers,
        itemsize=_ITEMSIZES[arguments.dtype],
        states=STATES[arguments.optimizer],
        tokens=parse_count(arguments.tokens, "--tokens", least=1),
        recompute=arguments.recompute,
        inference=arguments.inference,
    )


def read_machine(arguments: argparse.Namespace) -> tuple[Machine, dict[str, str]]:
    """Checks the options about budgets and speeds.

    Returns:
        The machine, and where each speed of a link is from.

    Raises:
        ConfigError: If one cannot be used.
    """
    speeds, sources = read_speeds(arguments)
    machine = Machine(
        hbm=parse_bytes(arguments.hbm, "--hbm"),
        dram=parse_bytes(arguments.dram, "--dram"),
        nvme=parse_bytes(arguments.nvme_bytes, "--nvme-bytes"),
        flops=1e12 * parse_count(arguments.tflops, "--tflops"),
        **speeds,
    )
    return machine, sources


def read_speeds(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the speeds of links and disks, in bytes per second, and where each is from.

    Raises:
        ConfigError: If an option or the profile it names cannot be used.
    """
    measured, source = _measured(arguments.profile)
    speeds: dict[str, float] = {}
    sources: dict[str, str] = {}
    for link, usual in _USUAL_GBPS.items():
        option = f"--{link}-gbps"
        given = getattr(arguments, f"{link}_gbps")
        if given is not None:
            speeds[link], sources[link] = 1e9 * parse_count(given, option), option
        elif link in measured:
            speeds[link], sources[link] = measured[link], source
        else:
            speeds[link], sources[link] = 1e9 * usual, "not measured: of the reference machine"
    return speeds, sources


def _measured(path: str | None) -> tuple[dict[str, float], str]:
    """Returns the speeds of the profile that counts, and where it is from."""
    from tiermem.runtime.metrics.machine_profile import load

    if path == "none":
        return {}, ""
    loaded = load(path)
    profile = loaded.profile
    if profile is None:
        if path is not None:
            raise ConfigError(f"--profile: {loaded.reason}")
        return {}, loaded.reason
    # Without a GPU the link is a copy within host memory, which says nothing of a bus.
    both_ways = [] if profile.device == "cpu" else [profile.h2d, profile.d2h]
    rates = {
        "link": min((rate for rate in both_ways if rate is not None), default=None),
        "read": profile.nvme_read,
        "write": profile.nvme_write,
    }
    return {link: rate for link, rate in rates.items() if rate is not None}, loaded.reason


def _print(result: Forecast, work: Workload, machine: Machine, sources: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    homes = Table(title="Where tensors live")
    for column in ("", "hbm", "dram", "nvme"):
        homes.add_column(column, justify="right" if column else "left")
    for role, tiers in result.homes.items():
        homes.add_row(role, "", format_size(tiers["dram"]), format_size(tiers["nvme"]))
    homes.add_row("blocks in work", format_size(result.in_work), "", "")
    homes.add_row("params that stay", format_size(result.stays), "", "")
    console.print(homes)

    moved = Table(title="What moves in a step")
    moved.add_column("link")
    moved.add_column("bytes", justify="right")
    for link, nbytes in result.traffic.items():
        moved.add_row(link, format_size(nbytes))
    console.print(moved)

    times = Table(title="Bounds on a step")
    times.add_column("set by")
    times.add_column("seconds", justify="right")
    for name, seconds in result.seconds.items():
        times.add_row(name, f"{seconds:.4g}", style="bold" if name == result.bound else "")
    console.print(times)
    for link, source in sources.items():
        rate = getattr(machine, link) / 1e9
        console.print(f"{link}: {rate:.3g} GB/s ({source})", soft_wrap=True, markup=False)
    console.print(
        f"A step of {work.tokens:,.0f} tokens takes at least {result.step_seconds:.4g} s "
        f"({work.tokens / result.step_seconds:,.0f} tokens/s), set by {result.bound}."
    )
    if result.hiding_tokens > 0:
        console.print(
            f"From {result.hiding_tokens:,.0f} tokens in a step on, compute hides every transfer."
        )
