"""Measured speeds as plain data, and the picture of them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tiermem.config import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Key = TypeVar("_Key")
_STYLES = ("-", "--", ":", "-.")
_MARKERS = "os^Dv"


@dataclass(frozen=True)
class Measurement:
    """The speed of one link, moved in one way.

    Attributes:
        link: From which tier to which, such as ``"dram->hbm"``; ``"<->"`` is both at once.
        how: What moved the bytes, such as ``"page-locked"`` or ``"mover, uring"``.
        nbytes: Bytes of one copy, or of all the requests together where there is a chunk.
        bytes_per_s: Median.
        least: Slowest.
        most: Fastest.
        chunk: Bytes of a request; 0 where there are none.
        depth: Requests in flight; 0 where there are none.
        note: What else the figure depends on.
    """

    link: str
    how: str
    nbytes: int
    bytes_per_s: float
    least: float
    most: float
    chunk: int = 0
    depth: int = 0
    note: str = ""

    @classmethod
    def of(
        cls,
        link: str,
        how: str,
        nbytes: int,
        seconds: Sequence[float],
        *,
        chunk: int = 0,
        depth: int = 0,
        note: str = "",
    ) -> Measurement:
        """Returns the measurement of ``nbytes`` that took so many seconds each time."""
        rates = [nbytes / max(value, 1e-9) for value in seconds]
        return cls(
            link, how, nbytes, statistics.median(rates), min(rates), max(rates), chunk, depth, note
        )


def rounds(
    timed: Mapping[_Key, Callable[[], float]], repeats: int, until: float | None = None
) -> dict[_Key, list[float]]:
    """Times several things in turn, so that drift meets them all alike.

    The first round warms up and does not count.

    Args:
        timed: Calls that return the seconds they took.
        repeats: Rounds that count.
        until: ``time.perf_counter()`` after which no further call begins, once each
            has been counted.

    Returns:
        Seconds by key; the later keys may have one fewer.
    """
    found: dict[_Key, list[float]] = {key: [] for key in timed}
    for call in timed.values():
        call()
    for index in range(repeats):
        for key, call in timed.items():
            if index and until is not None and time.perf_counter() > until:
                return found
            found[key].append(call())
    return found


def picture(measured: Iterable[Measurement], path: str | os.PathLike[str], title: str) -> None:
    """Draws bandwidth by size of the memory links, and by depth of the disks.

    Args:
        measured: What to draw.
        path: File to write; its ending says the format.
        title: Line above it all.
    """
    from matplotlib.figure import Figure  # a figure of its own needs no display

    every = list(measured)
    disk = [m for m in every if m.chunk and "<->" not in m.link]
    panels = [
        ("copies in memory", "size of one copy", [m for m in every if not m.chunk]),
        ("disks, reading", "requests in flight", [m for m in disk if m.link.startswith("nvme")]),
        ("disks, writing", "requests in flight", [m for m in disk if m.link.endswith("nvme")]),
    ]
    panels = [panel for panel in panels if panel[2]]
    width = max(1, len(panels))
    figure = Figure(figsize=(1 + 5 * width, 6), layout="constrained")
    axes = figure.subplots(1, width, squeeze=False)[0]
    for axis, (name, label, rows) in zip(axes, panels, strict=False):
        if rows[0].chunk:
            _draw_disks(axis, rows)
        else:
            _draw_memory(axis, rows)
        axis.set(title=name, xlabel=label, ylabel="GB/s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        # Below the axes, so that it hides nothing however many lines there are.
        axis.legend(
            frameon=False,
            fontsize="x-small",
            loc="upper center",
            bbox_to_anchor=(0.5, -0.25),
            ncols=3,
        )
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_memory(axis: Axes, rows: Sequence[Measurement]) -> None:
    lines: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        lines.setdefault((row.link, row.how), []).append(row)
    # Copies within a device are ten times as fast as its bus and would flatten the rest.
    bus = [m.bytes_per_s for m in rows if m.link != "hbm->hbm"]
    top = 1.5 * max(bus, default=max(m.bytes_per_s for m in rows))
    for number, ((link, how), found) in enumerate(lines.items()):
        if max(m.bytes_per_s for m in found) > top:
            continue
        found = sorted(found, key=lambda m: m.nbytes)
        speeds = [m.bytes_per_s / 1e9 for m in found]
        axis.plot(
            [m.nbytes for m in found],
            speeds,
            linestyle=_STYLES[number % len(_STYLES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            label=f"{link} {how}",
        )
    axis.set_xscale("log", base=2)
    sizes = sorted({m.nbytes for m in rows})
    names = [format_size(size).replace(".00", "") for size in sizes]
    axis.set_xticks(sizes, names, rotation=45)
    axis.minorticks_off()


def _draw_disks(axis: Axes, rows: Sequence[Measurement]) -> None:
    hows = list(dict.fromkeys(m.how for m in rows))
    chunks = sorted({m.chunk for m in rows})
    for style, how in enumerate(hows):
        for color, chunk in enumerate(chunks):
            found = sorted(
                (m for m in rows if (m.how, m.chunk) == (how, chunk)), key=lambda m: m.depth
            )
            if found:
                axis.plot(
                    [m.depth for m in found],
                    [m.bytes_per_s / 1e9 for m in found],
                    color=f"C{color}",
                    linestyle=_STYLES[style % len(_STYLES)],
                    marker=_MARKERS[color % len(_MARKERS)],
                    markersize=5,
                    label=f"{how}, {format_size(chunk).replace('.00', '')}",
                )
    depths = sorted({m.depth for m in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(depths, [str(depth) for depth in depths])
    axis.minorticks_off()
