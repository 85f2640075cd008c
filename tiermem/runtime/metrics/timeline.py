"""The timeline: spans of time per lane, as a Chrome trace and as a picture."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from tiermem.config import format_size
from tiermem.runtime.metrics.counters import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

LANES = (
    "compute",
    "optimizer",
    "stall",
    "dram->hbm",
    "hbm->dram",
    "nvme->hbm",
    "hbm->nvme",
    "nvme->dram",
    "dram->nvme",
)
"""The lanes in the order in which they are drawn; others follow by name."""

_COLORS = {
    "compute": "#4c78a8",
    "optimizer": "#72b7b2",
    "stall": "#e45756",
    "dram->hbm": "#54a24b",
    "hbm->dram": "#88d27a",
    "nvme->hbm": "#f58518",
    "hbm->nvme": "#ffbf79",
    "nvme->dram": "#b279a2",
    "dram->nvme": "#d6a5c9",
}
_OTHER_COLOR = "#9d9da1"
_BINS = 2400


@dataclass(frozen=True, slots=True)
class Event:
    """One span of time in one lane.

    Attributes:
        lane: What was busy: ``"compute"``, ``"stall"``, a link such as ``"dram->hbm"``.
        name: What it worked on, normally a block.
        start_ns: Begin, on a monotonic clock.
        end_ns: End, on the same clock.
        nbytes: Bytes moved, for links.
    """

    lane: str
    name: str
    start_ns: int
    end_ns: int
    nbytes: int = 0


class Timeline:
    """The last ``limit`` events; adding one costs one append.

    Args:
        limit: How many events are kept; older ones are dropped first.

    Attributes:
        enter: Like :meth:`add`, with the arguments in a tuple.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self._rows: deque[Row] = deque(maxlen=limit)
        self.enter: Callable[[Row], None] = self._rows.append

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether older events may have been dropped."""
        return len(self._rows) == self._rows.maxlen

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, nbytes: int = 0) -> None:
        """Records a span; cheap enough for the hot path."""
        self._rows.append((lane, name, start_ns, end_ns, nbytes))

    def clear(self) -> None:
        """Forgets everything."""
        self._rows.clear()

    def events(self) -> list[Event]:
        """Returns the events kept, in the order in which they were added."""
        # Another thread may add events; copying the deque is atomic under the GIL.
        return [Event(*row) for row in self._rows.copy()]

    def last(self, lane: str, among: int = 20_000) -> dict[str, int]:
        """Returns when the last event of each name in a lane began, in nanoseconds.

        Args:
            lane: The lane.
            among: How many of the last events of all lanes are searched.
        """
        rows = self._rows.copy()
        recent = islice(rows, max(0, len(rows) - among), None)
        return {row[1]: row[2] for row in recent if row[0] == lane}

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the events as Chrome trace JSON (for Perfetto or about:tracing).

        Args:
            path: The file to write.
        """
        events = self.events()
        lanes = _lanes(events)
        begin = min((event.start_ns for event in events), default=0)
        rows: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "tiermem"}}
        ]
        for tid, lane in enumerate(lanes):
            rows.append(_meta("thread_name", tid, {"name": lane}))
            rows.append(_meta("thread_sort_index", tid, {"sort_index": tid}))
        tids = {lane: tid for tid, lane in enumerate(lanes)}
        for event in events:
            row: dict[str, object] = {
                "ph": "X",
                "name": event.name,
                "cat": event.lane,
                "pid": 1,
                "tid": tids[event.lane],
                "ts": (event.start_ns - begin) / 1e3,
                "dur": max(0, event.end_ns - event.start_ns) / 1e3,
            }
            if event.nbytes:
                row["args"] = {"nbytes": event.nbytes}
            rows.append(row)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)

    def picture(
        self, path: str | os.PathLike[str], *, title: str = "", last_seconds: float | None = None
    ) -> None:
        """Draws lanes over time: how busy each was in every slice of it.

        Each lane is drawn as one strip of slices, as dark as the share of the slice
        in which the lane was busy, whatever the number of events.

        Args:
            path: The picture to write; its suffix determines the format.
            title: A line above the picture.
            last_seconds: Adds a second panel that shows only the last so many seconds.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        events = self.events()
        lanes = _lanes(events)
        begin = min((event.start_ns for event in events), default=0)
        end = max(begin + 1000, max((event.end_ns for event in events), default=0))
        windows = [(begin, end)]
        if last_seconds is not None and 0 < last_seconds * 1e9 < end - begin:
            windows.append((end - int(last_seconds * 1e9), end))

        height = 1.6 + len(windows) * (0.7 + 0.34 * max(1, len(lanes)))
        figure = Figure(figsize=(16, height), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(windows), 1, squeeze=False)[:, 0]
        for axis, window in zip(axes, windows, strict=True):
            _draw(axis, events, lanes, window, begin)
        axes[-1].set_xlabel("seconds")
        if title:
            figure.suptitle(title)
        _legend(figure, events, lanes)
        figure.savefig(path)


def coverage(
    spans: Iterable[tuple[int, int]], window: tuple[int, int], bins: int
) -> NDArray[np.float64]:
    """Returns the share of each slice of a window that spans cover.

    Args:
        spans: Begin and end of each span; they may overlap.
        window: Begin and end of the window.
        bins: Number of equal slices.

    Returns:
        ``bins`` numbers from 0 to 1.
    """
    begin, end = window
    merged = _merge(spans, begin, end)
    edges = np.linspace(0, end - begin, bins + 1)
    if not merged:
        return np.zeros(bins)
    # Busy time up to a moment is piecewise linear: interpolate it at the edges.
    points = (np.array(merged, dtype=np.int64).ravel() - begin).astype(np.float64)
    lengths = np.array([stop - start for start, stop in merged], dtype=np.float64)
    busy = np.repeat(np.concatenate(([0.0], np.cumsum(lengths))), 2)[1:-1]
    share: NDArray[np.float64] = np.diff(np.interp(edges, points, busy)) * (bins / (end - begin))
    return share.clip(0.0, 1.0)


def _merge(spans: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        start, stop = max(start, begin), min(stop, end)
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _lanes(events: Sequence[Event]) -> list[str]:
    seen = {event.lane for event in events}
    return [lane for lane in LANES if lane in seen] + sorted(seen.difference(LANES))


def _meta(name: str, tid: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": 1, "tid": tid, "args": args}


def _draw(
    axis: Axes, events: Sequence[Event], lanes: Sequence[str], window: tuple[int, int], zero: int
) -> None:
    from matplotlib.colors import to_rgb

    left, right = (window[0] - zero) / 1e9, (window[1] - zero) / 1e9
    spans = defaultdict(list)
    for event in events:
        spans[event.lane].append((event.start_ns, event.end_ns))
    for row, lane in enumerate(lanes):
        share = coverage(spans[lane], window, _BINS)
        strip = np.empty((1, _BINS, 4))
        strip[..., :3] = to_rgb(_COLORS.get(lane, _OTHER_COLOR))
        # A short event in a wide slice must still be visible.
        strip[..., 3] = np.where(share > 0, 0.15 + 0.85 * share, 0.0)
        axis.imshow(
            strip,
            extent=(left, right, row + 0.42, row - 0.42),
            aspect="auto",
            interpolation="nearest",
        )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_xlim(left, right)
    axis.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, events: Sequence[Event], lanes: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=_COLORS.get(lane, _OTHER_COLOR), label=_total(lane, events)) for lane in lanes
    ]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)


def _total(lane: str, events: Sequence[Event]) -> str:
    mine = [event for event in events if event.lane == lane]
    seconds = sum(event.end_ns - event.start_ns for event in mine) / 1e9
    nbytes = sum(event.nbytes for event in mine)
    text = f"{lane}: {len(mine)}×, {seconds:.2f} s"
    return f"{text}, {format_size(nbytes)}" if nbytes else text
