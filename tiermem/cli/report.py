"""What ``tiermem train`` says and writes at the end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tiermem.cli.machine import hardware
from tiermem.cli.training import Outcome, Progress, Settings, largest_loss_difference
from tiermem.config import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiermem import Stats
    from tiermem.runtime.metrics.counters import ResidencyRow
    from tiermem.runtime.metrics.timeline import Timeline

_SHOWN_STEPS = 2


def print_plan(
    console: Console, settings: Settings, source: str, budgets: dict[str, int], folders: list[str]
) -> None:
    """Prints what is about to be trained and where its tensors may be."""
    weights = settings.weight_bytes
    shape = settings.shape
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "model",
        f"byte-level GPT, {shape.layers} layers × {shape.width}, "
        f"{shape.parameters / 1e6:.1f} M parameters, {settings.dtype}".replace("torch.", ""),
    )
    table.add_row("data", source)
    table.add_row(
        "needs",
        f"{format_size(weights)} of weights, {format_size(settings.state_bytes)} with gradients, "
        "masters and optimizer state",
    )
    for tier, budget in budgets.items():
        where = f" in {', '.join(folders)}" if tier == "nvme" else ""
        table.add_row(tier, f"{format_size(budget)}{where}")
    console.print(table)


def print_raised(console: Console, tier: str, nbytes: int) -> None:
    """Prints that a default budget was too small."""
    console.print(f"{tier}: this model needs {format_size(nbytes)}, which it gets", highlight=False)


def print_stats(console: Console, stats: Stats, steps: int) -> None:
    """Prints what moved over each link, hits and stalls."""
    table = Table(title="What moved")
    for column in ("link", "bytes", "per step", "moves", "busy", "speed"):
        table.add_column(column, justify="left" if column == "link" else "right")
    for link, moved in stats.links.items():
        if not moved.nbytes:
            continue
        speed = moved.nbytes / moved.seconds if moved.seconds else 0.0
        table.add_row(
            link,
            format_size(moved.nbytes),
            format_size(moved.nbytes / max(steps, 1)),
            f"{moved.moves:,}",
            f"{moved.seconds:.2f} s",
            f"{speed / 1e9:.2f} GB/s" if speed else "-",
        )
    console.print(table)
    peaks = ", ".join(
        f"{tier} {format_size(peak)} of {format_size(stats.budget[tier])}"
        for tier, peak in stats.peak.items()
    )
    console.print(
        f"hit rate {stats.hit_rate:.1%} ({stats.hits:,} hits, {stats.misses:,} misses), "
        f"{stats.prefetches:,} prefetches, {stats.evictions:,} evictions, "
        f"{stats.stalls:,} stalls of {stats.stall_seconds:.2f} s in all",
        highlight=False,
    )
    print_efficiency(console, stats)
    console.print(f"peak use: {peaks}", highlight=False)
    saved = stats.activations
    if saved.offloaded or saved.kept:
        console.print(
            f"activations: {saved.offloaded:,} offloaded ({format_size(saved.offloaded_bytes)}, "
            f"at most {format_size(saved.peak)} at once), {saved.shared:,} shared, "
            f"{saved.kept:,} kept; back: {saved.fetched_ahead:,} ahead, "
            f"{saved.fetched_late:,} late, {saved.reused:,} still there",
            highlight=False,
        )
    console.print(f"file I/O: {stats.io_engine} ({stats.io_reason})", highlight=False)


def print_efficiency(console: Console, stats: Stats) -> None:
    """Prints how the measured passes compare with their bound, and where the rest went."""
    if stats.efficiency is None:
        return
    losses = sorted(stats.losses.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in losses if seconds > 0)
    console.print(
        f"efficiency {stats.efficiency:.1%}: {stats.measured_seconds:.3g} s measured where "
        f"{stats.limit} alone takes {stats.bound_seconds:.3g} s; not compute: {rest or 'nothing'}",
        highlight=False,
    )


def roles_at_home(rows: Sequence[ResidencyRow]) -> dict[str, dict[str, int]]:
    """Returns how many bytes of each role are at home in which tier."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        homes = found.setdefault(row.role, {})
        homes[row.home] = homes.get(row.home, 0) + row.nbytes
    return found


def print_roles(console: Console, roles: dict[str, dict[str, int]]) -> None:
    """Prints where each role lives."""
    for role, homes in roles.items():
        where = ", ".join(f"{format_size(nbytes)} in {tier}" for tier, nbytes in homes.items())
        console.print(f"{role} at home: {where}", highlight=False)


def print_rounding(console: Console, tiered: Outcome, resident: Outcome) -> None:
    """Prints how far two runs are apart of which one is not all on the device."""
    apart = largest_loss_difference(tiered, resident)
    console.print(
        f"tiered {tiered.seconds:.1f} s, resident {resident.seconds:.1f} s; steps on the host "
        f"round differently: losses are at most {apart:.2e} apart",
        highlight=False,
    )


def print_verdict(
    console: Console, tiered: Outcome, resident: Outcome, difference: str | None, tokens: int
) -> None:
    """Prints whether the two runs are equal bit for bit."""
    made = tokens * tiered.steps / len(tiered.losses)
    console.print(
        f"tiered {made / max(tiered.seconds, 1e-9):,.0f} tokens/s in {tiered.seconds:.1f} s, "
        f"resident {tokens / resident.seconds:,.0f} tokens/s in {resident.seconds:.1f} s",
        highlight=False,
    )
    if difference is None:
        elements = sum(weight.numel() for weight in resident.weights.values())
        console.print(
            f"[bold green]equal bit for bit[/]: {len(resident.losses)} losses and "
            f"{elements:,} weights",
            highlight=False,
        )
    else:
        console.print("[bold red]NOT equal[/]: ", end="")
        console.print(difference, highlight=False, markup=False)


def write_pictures(out: Path, timeline: Timeline, layers: int, progress: Progress) -> None:
    """Writes the timeline as a picture and as a Chrome trace."""
    events = timeline.events()
    begins = progress.begins[: len(progress.losses)]
    first = min((event.start_ns for event in events), default=0)
    end = max((event.end_ns for event in events), default=0)
    whole = sum(begin >= first or not timeline.full for begin in begins)
    last = max(0, min(_SHOWN_STEPS, whole - 1))
    timeline.picture(
        out / "timeline.png",
        title=f"{layers} layers, {caption(len(begins), whole, last)}",
        last_seconds=(end - begins[-last]) / 1e9 if last else None,
    )
    timeline.chrome_trace(out / "trace.json")


def caption(steps: int, whole: int, last: int) -> str:
    """Says which steps a picture shows.

    Args:
        steps: How many there were.
        whole: How many of them the timeline has kept from their beginning.
        last: How many the second panel shows; 0 if there is none.
    """
    plural = "" if whole == 1 else "s"
    text = f"{whole} step{plural}" if whole == steps else f"the last {whole} of {steps} steps"
    if last == 1:
        return f"{text}; below, the last one"
    return f"{text}; below, the last {last}" if last else text


def make_report(
    settings: Settings,
    stats: Stats,
    tiered: Outcome,
    resident: Outcome | None,
    difference: str | None,
    roles: dict[str, dict[str, int]],
    **more: Any,
) -> str:
    """Returns everything that was measured as JSON.

    Args:
        settings: What was trained.
        stats: Of the tiered run.
        tiered: What it gave.
        resident: What the resident run gave.
        difference: The first between the two.
        roles: What was at home where.
        **more: Further entries.
    """
    compared = resident is not None and settings.rounds_alike
    report: dict[str, Any] = {
        "hardware": hardware(),
        "settings": {
            **dataclasses.asdict(settings),
            "dtype": str(settings.dtype),
            "master": None if settings.master is None else str(settings.master),
        },
        **more,
        "parameters": settings.shape.parameters,
        "weight_bytes": settings.weight_bytes,
        "tiered": _run(tiered, settings),
        "resident": None if resident is None else _run(resident, settings),
        "equal": None if not compared else difference is None,
        "difference": difference,
        "roles": roles,
        "stats": {**dataclasses.asdict(stats), "hit_rate": stats.hit_rate},
    }
    return json.dumps(report, indent=2, default=str)


def _run(outcome: Outcome, settings: Settings) -> dict[str, Any]:
    tokens = outcome.steps * settings.tokens_per_step
    return {
        "seconds": outcome.seconds,
        "tokens_per_second": tokens / max(outcome.seconds, 1e-9),
        "losses": outcome.losses,
    }
