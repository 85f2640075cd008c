"""Where one training step's time goes, by torch.profiler: streams, gaps and host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LINES = 30
_GAPS = 15
_PARTS = 40
_NOTES = ("Optimizer.", "ProfilerStep", "Context Sync", "Event Sync", "Stream Sync", "Stream Wait")
"""What the profiler adds to the device's spans that is no work of it."""

Span = tuple[int, int, str]


def profile_step(call: Callable[[], Any], path: str, device: torch.device) -> None:
    """Runs a call that has run before, and writes a summary.

    Busy times are of the union of a stream's spans; a gap of the compute stream (the one with
    the most kernel time) is given with what stood before and after it.

    Args:
        call: Makes a step.
        path: Text file to write.
        device: Where it runs.
    """
    with step_profile(path, device):
        call()


@contextmanager
def step_profile(path: str, device: torch.device) -> Iterator[None]:
    """Writes the same of what is run inside."""
    kinds = [ProfilerActivity.CPU]
    cuda = device.type == "cuda"
    if cuda:
        kinds.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=kinds) as found:
        yield
        if cuda:
            torch.cuda.synchronize(device)
    lines = [f"One step, {'device and host' if cuda else 'host only'}", ""]
    if cuda:
        lines += _device_lines(_streams(found))
    lines += ["", "Host, by its own time", ""]
    table = found.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=_LINES, max_name_column_width=60
    )
    if cuda:
        table += "\n" + found.key_averages().table(
            sort_by="self_device_time_total", row_limit=_LINES, max_name_column_width=60
        )
    Path(path).write_text("\n".join(lines) + "\n" + table + "\n", encoding="utf-8")


def _streams(found: Any) -> dict[int, list[Span]]:
    """Returns the device's spans by stream, in nanoseconds."""
    streams: dict[int, list[Span]] = defaultdict(list)
    for event in found.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA or event.duration_ns() <= 0:
            continue
        if not event.name().startswith(_NOTES):
            begin = event.start_ns()
            span = (begin, begin + event.duration_ns(), event.name())
            streams[event.device_resource_id()].append(span)
    return {stream: sorted(spans) for stream, spans in streams.items()}


def busy(spans: Sequence[Span]) -> int:
    """Returns the length of the union of spans, which are in order."""
    total, until = 0, 0
    for begin, end, _ in spans:
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def gaps(spans: Sequence[Span]) -> list[tuple[int, int, str, str]]:
    """Returns what lies between spans, which are in order: length, begin, before, after."""
    found = []
    until, last = (spans[0][1], spans[0][2]) if spans else (0, "")
    for begin, end, name in spans[1:]:
        if begin > until:
            found.append((begin - until, until, last, name))
        if end > until:
            until, last = end, name
    return found


def _device_lines(streams: dict[int, list[Span]]) -> list[str]:
    everything = sorted(span for spans in streams.values() for span in spans)
    if not everything:
        return ["the profiler saw nothing on the device"]
    first = everything[0][0]
    whole = max(end for _, end, _ in everything) - first
    lines = [f"whole {whole / 1e6:.2f} ms; something runs {busy(everything) / 1e6:.2f} ms", ""]
    kernels = {s: [x for x in spans if not _is_copy(x)] for s, spans in streams.items()}
    for stream, spans in sorted(streams.items()):
        copies = [x for x in spans if _is_copy(x)]
        lines.append(
            f"stream {stream}: busy {busy(spans) / 1e6:.2f} ms ({busy(spans) / whole:.1%}), "
            f"kernels {len(kernels[stream])} in {busy(kernels[stream]) / 1e6:.2f} ms, copies "
            f"{len(copies)} in {busy(copies) / 1e6:.2f} ms, from {(spans[0][0] - first) / 1e6:.2f} "
            f"to {(max(e for _, e, _ in spans) - first) / 1e6:.2f} ms"
        )
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in everything:
        if _is_copy(span):
            by_kind[span[2]].append(span)
    lines.append("")
    for kind, spans in sorted(by_kind.items()):
        lines.append(f"{kind}: {len(spans)}, busy {busy(spans) / 1e6:.2f} ms")
    compute = max(kernels, key=lambda s: busy(kernels[s]))
    between = gaps(streams[compute])
    lines += [
        "",
        f"stream {compute}: {len(between)} gaps, {sum(g[0] for g in between) / 1e6:.2f} ms",
    ]
    for length, begin, before, after in sorted(between, reverse=True)[:_GAPS]:
        at = (begin - first) / 1e6
        lines.append(f"  {length / 1e6:8.3f} ms at {at:9.2f}: {before[:50]} | {after[:50]}")
    lines += ["", "percent busy by part of the step: kernels, copies up, copies down"]
    rows = {
        "kernels": [x for spans in kernels.values() for x in spans],
        "up": [x for x in everything if "HtoD" in x[2]],
        "down": [x for x in everything if "DtoH" in x[2]],
    }
    for name, spans in rows.items():
        shares = shares_of(sorted(spans), first, whole)
        lines.append(f"{name:>8} " + " ".join(f"{share:3.0%}"[:-1].rjust(3) for share in shares))
    return lines


def shares_of(spans: Sequence[Span], first: int, whole: int) -> list[float]:
    """Returns how much of each part of a step spans fill, which are in order."""
    width = whole / _PARTS
    found = [0.0] * _PARTS
    until = first
    for begin, end, _ in spans:
        begin, until = max(begin, until), max(until, end)
        while begin < end:
            part = min(_PARTS - 1, int((begin - first) / width))
            edge = end
            if part < _PARTS - 1:  # by a nanosecond at least: the part was found by rounding
                edge = min(end, max(begin + 1, math.ceil(first + (part + 1) * width)))
            found[part] += (edge - begin) / width
            begin = edge
    return found


def _is_copy(span: Span) -> bool:
    return span[2].startswith(("Memcpy", "Memset"))
