"""Rows of the benchmark of training: what was counted and timed, and what bounds it."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from functools import partial
from typing import Any

from llama import Clock
from raw_train import BothWays, HostAdam, RawMix
from training import Loop, Split, parameters_of

from tiermem.config import parse_size

Row = dict[str, Any]


def link_bound(
    options: argparse.Namespace,
    clock: Clock,
    loop: Loop,
    stats: Any,
    made: int,
    compute: float,
    took: float,
) -> Row:
    """Measures the copies of the bytes that moved, and the host's steps beside them."""
    trainer = loop.trainer
    repeats = options.raw_repeats
    up, down = bytes_of(stats, "dram->hbm", made), bytes_of(stats, "hbm->dram", made)
    share = trainer.on_host()
    count = parameters_of(trainer.model)
    need_up, need_down = needed(options, count, share, loop.micro)
    # a part of a step's bytes is enough to know the speed
    part = min(1.0, parse_size(options.raw_nbytes) / max(up, down, 1))
    some = int(up * part), int(down * part)
    with BothWays(trainer.tier) as raw:
        found = {}
        ways = {"up": (some[0], 0), "down": (0, some[1]), "both ways": some}
        for name, way in ways.items():
            seconds = clock.time(partial(raw.copy, *way), repeats, warm=1)
            found[f"raw {name} s"] = statistics.median(seconds) / part
        together = found["raw both ways s"]
        if share:
            adam = HostAdam(max(1, int(share * part)), options.adam_elements)
            seconds = clock.time(adam.step, repeats, warm=1)
            found["host AdamW s"] = statistics.median(seconds) / part
            work = partial(raw.copy, *some)
            seconds = clock.time(partial(adam.beside, work), repeats, warm=0)
            together = found["both at once s"] = statistics.median(seconds) / part
    bound = max(compute, together)
    per_byte = max(found["raw both ways s"], 1e-12) / max(up, down, 1)
    least = max(compute, max(need_up, need_down) * per_byte, found.get("host AdamW s", 0.0))
    return {
        **found,
        "bound s": bound,
        "of bound": bound / took,
        "of bound, least bytes": least / took,
    }


def disk_bound(
    options: argparse.Namespace,
    clock: Clock,
    loop: Loop,
    stats: Any,
    made: int,
    compute: float,
    took: float,
) -> Row:
    """Measures the bytes that moved, read and written at once, with steps in turn."""
    trainer = loop.trainer
    read = bytes_of(stats, "nvme->hbm", made) + bytes_of(stats, "nvme->dram", made)
    written = bytes_of(stats, "hbm->nvme", made) + bytes_of(stats, "dram->nvme", made)
    share = options.raw_share
    ratios, raws = [], []
    with RawMix(trainer.tier, options.nvme, parse_size(options.scratch)) as raw:
        work = partial(raw.move, int(read * share), int(written * share))
        before = clock.once(work) / share
        for _ in range(options.raw_repeats):
            step = loop.seconds(options.steps)
            after = clock.once(work) / share
            raws.append((before + after) / 2)
            ratios.append(max(raws[-1], compute) / step)
            before = after
    count = parameters_of(trainer.model)
    least = count * (2 + 2 + 12) + count * (2 + 12)
    bound = max(statistics.median(raws), compute)
    needs = max(statistics.median(raws) * min(1.0, least / (read + written)), compute)
    return {
        "GB from disk": read / 1e9,
        "GB to disk": written / 1e9,
        "GB of the least that moves": least / 1e9,
        "raw mix s": statistics.median(raws),
        "raw mix GB/s": (read + written) / statistics.median(raws) / 1e9,
        "bound s": bound,
        "of bound": statistics.median(ratios),
        "of bound, turns apart": bound / took,
        "of bound, least bytes": needs / took,
        "O_DIRECT": stats.direct_io,
        "engine": stats.io_engine,
    }


def needed(
    options: argparse.Namespace, count: int, on_host: int, micro: int
) -> tuple[float, float]:
    """Returns the least bytes up and down that a step needs, nothing left in HBM between passes.

    Weights come up for forward and for backward; gradients go down, and up again to be added to
    by the next micro-batch and to be stepped on the device; masters, states and weights stepped
    there go both ways.
    """
    gradient = 4 if options.grad_dtype == "fp32" else 2
    stepped = count - on_host
    up = count * (2 * 2 * micro + gradient * (micro - 1)) + stepped * (gradient + 12)
    down = count * gradient * micro + stepped * (2 + 12)
    return up, down


def bytes_of(stats: Any, link: str, made: int) -> int:
    """Returns the bytes over a link in a step."""
    return int(stats.links[link].nbytes / made) if link in stats.links else 0


def moved_of(stats: Any, made: int) -> Row:
    """Returns the bytes of a step by link, and what became of uses."""
    row: Row = {f"GB {link}": bytes_of(stats, link, made) / 1e9 for link in stats.links}
    row |= {"hit rate": stats.hit_rate, "stalls ms": stats.stall_seconds / made * 1e3}
    row["GB kept in HBM"] = stats.kept_in_hbm / 1e9
    return row


def reasons(stats: Any) -> Row:
    """Returns what the manager itself says of its passes."""
    whole = stats.measured_seconds or 1.0
    lost = ", ".join(f"{k} {v / whole:.1%}" for k, v in sorted(stats.losses.items()))
    efficiency = "" if stats.efficiency is None else stats.efficiency
    return {"efficiency": efficiency, "limit": stats.limit or "", "lost": lost}


def speeds_of(optimizer: Any) -> Row:
    """Returns what was measured to share steps out: billions of elements a second, by what."""
    if optimizer.speeds is None:
        return {}
    rates = dataclasses.asdict(optimizer.speeds)
    return {f"Gparams/s {k}": 1e-9 / v for k, v in rates.items() if v}


def split_of(name: str, split: Split) -> Row:
    """Returns the median time of a step's parts."""
    parts = {"forward": split.forward, "backward": split.backward, "step": split.step}
    return {f"{name} {part} s": statistics.median(v) for part, v in parts.items()}


def spread_of(times: list[list[float]], loops: list[Loop]) -> Row:
    """Returns the columns of two loops that took turns, the resident one first."""
    row: Row = {}
    for name, seconds in zip(("resident", "tiermem"), times, strict=True):
        row[f"{name} s"] = statistics.median(seconds)
        row |= {f"{name} min": min(seconds), f"{name} max": max(seconds)}
    row["of resident"] = row["resident s"] / row["tiermem s"]
    for name, loop in zip(("resident", "tiermem"), loops, strict=True):
        row |= split_of(name, loop.split)
    return row
