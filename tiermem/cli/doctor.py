"""Say what works on this machine: devices, memory, file I/O, disks."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from tiermem.cli.options import parse_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``tiermem doctor``."""
    parser.add_argument(
        "--nvme",
        action="append",
        type=parse_path,
        default=[],
        metavar="FOLDER",
        help="a folder meant for a swap file; repeatable (default: a folder on a disk)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem doctor``; status 1 if a folder that was named cannot be used."""
    from tiermem.cli.machine import default_swap_folder

    facts = examine(arguments.nvme or [default_swap_folder()])
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0 if all(path["usable"] for path in facts["paths"]) else 1


def examine(paths: list[str]) -> dict[str, Any]:
    """Finds out what works.

    Args:
        paths: Folders to look at.

    Returns:
        Plain data, ready for JSON.
    """
    import psutil
    import torch

    from tiermem import __version__
    from tiermem.cli.machine import hardware, inspect_path, locked_memory_limit
    from tiermem.io.probe import choose_engine
    from tiermem.optim.host.loop import library
    from tiermem.runtime.memory.hostmemory import available_memory

    _, engine, reason = choose_engine()
    memory = psutil.virtual_memory()
    loop = library()
    return {
        "tiermem": __version__,
        "hardware": hardware(),
        "cuda": torch.cuda.is_available(),
        "memory": {"total": memory.total, "available": available_memory()},
        "page_lock_limit": locked_memory_limit(),
        "io_engine": engine,
        "io_reason": reason,
        "host_steps": loop if isinstance(loop, str) else "can have the device's bits",
        "paths": [asdict(inspect_path(path)) for path in paths],
    }


def _space(path: dict[str, Any]) -> str:
    """Describes how space is reserved on a path, as part of a sentence."""
    if path["file_system"] in ("tmpfs", "ramfs"):
        return "in host memory, on top of dram="
    if path["promises"]:
        return "reserved space is kept (unless the disk is thin-provisioned)"
    return "reserved space may be gone when it is written"


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tiermem.config import format_size

    table = Table.grid(padding=(0, 2))
    table.add_row("tiermem", facts["tiermem"])
    for name, value in facts["hardware"].items():
        table.add_row(name, value)
    cuda = "works" if facts["cuda"] else "not here: device='cpu' stands in for it"
    table.add_row("CUDA", cuda)
    table.add_row("memory free", format_size(facts["memory"]["available"]))
    table.add_row("page-lock limit", facts["page_lock_limit"])
    table.add_row("file I/O", f"{facts['io_engine']}: {facts['io_reason']}")
    table.add_row("steps on the host", facts["host_steps"])
    for path in facts["paths"]:
        if path["usable"]:
            how = "O_DIRECT works" if path["direct"] else f"through the page cache: {path['note']}"
            text = f"{path['file_system']}, {format_size(path['free'])} free, {how}, {_space(path)}"
        else:
            text = f"cannot be used: {path['note']}"
        table.add_row(f"nvme {path['path']}", text)
    Console(highlight=False).print(table)
