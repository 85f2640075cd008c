"""What every benchmark shares: machine facts, medians, and the files they leave."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.cli.measured import Measurement
from tiermem.config import format_size


def machine() -> dict[str, str]:
    """Returns hardware and versions, for the record."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
        "cpu": _cpu_name(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def integration(name: str) -> Any:
    """Returns a module of ``tiermem.integrations``, also from a copy that is not installed."""
    try:
        return importlib.import_module(f"tiermem.integrations.{name}")
    except ModuleNotFoundError as error:
        if error.name != "tiermem.integrations":
            raise
        return importlib.import_module(f"integrations.{name}")


def rows_of(
    models: Sequence[str],
    measure: Callable[[str], Iterable[dict[str, Any]]],
    after: Callable[[], object],
) -> list[dict[str, Any]]:
    """Measures one model after the other; one that fails is a row that says so.

    Args:
        models: Names.
        measure: Gives the rows of a model; those that it gave before it failed count.
        after: Called after each.
    """
    rows: list[dict[str, Any]] = []
    for name in models:
        try:
            for row in measure(name):
                rows.append(row)
        except Exception as error:
            traceback.print_exc()
            rows.append({"model": name, "note": failure(error)})
        after()
    return rows


def failure(error: BaseException) -> str:
    """Returns what a table says of an error."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    return f"{type(error).__name__}: {str(error)[:120]}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def listed(values: Sequence[float]) -> str:
    """Returns every value in three digits, for one cell of a table."""
    return " ".join(f"{value:.3g}" for value in values)


def report(
    title: str, rows: Sequence[dict[str, Any]], out: str | None, *, tall: bool = False, **extra: Any
) -> None:
    """Prints a table; writes ``out`` (.json) and the same as Markdown beside it.

    Args:
        title: Line above.
        rows: Values by column.
        out: The JSON file, or None.
        tall: Whether each row is a column of the table, for rows of many values.
        **extra: What else the file says.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    if tall:
        cells = [[name, *(row[at] for row in cells)] for at, name in enumerate(columns)]
        columns = ["", *(str(number + 1) for number in range(len(rows)))]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)) + " |"]
    lines.append("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    lines += [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells
    ]
    print(f"{title}\n" + "\n".join(lines))
    if out is None:
        return
    script = Path(sys.argv[0]).resolve()
    command = " ".join([f"python {script.parent.name}/{script.name}", *sys.argv[1:]])
    record = {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "command": command,
        "machine": machine(),
        "rows": list(rows),
        **extra,
    }
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    about = ", ".join(f"{k} {v}" for k, v in machine().items())
    notes = "".join(f"\n{k}: {v}\n" for k, v in extra.items() if isinstance(v, str))
    path.with_suffix(".md").write_text(
        f"# {title}\n\n{record['date']}; `{command}`; {about}\n\n" + "\n".join(lines) + "\n" + notes
    )


def bars(
    title: str, groups: Sequence[str], series: dict[str, Sequence[float | None]], out: str
) -> None:
    """Draws seconds, on a logarithmic scale, beside the JSON file that ``out`` names.

    Args:
        title: Line above.
        groups: What stands below each group of bars.
        series: Values by name, one for each group; None where there is none.
        out: The JSON file; the picture has its name and ends in .png.
    """
    from matplotlib.figure import Figure  # a figure of its own needs no display

    figure = Figure(figsize=(4 + 1.6 * len(groups), 4.5), layout="constrained")
    axis = figure.add_subplot()
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        there = [(at, v) for at, v in enumerate(values) if v is not None and v > 0]
        places = [at + (index - (len(series) - 1) / 2) * width for at, _ in there]
        drawn = axis.bar(places, [v for _, v in there], width, label=name)
        axis.bar_label(drawn, fmt="%.3g", fontsize=7, rotation=90, padding=2)
    axis.set_xticks(range(len(groups)), groups)
    if any(v for values in series.values() for v in values):
        axis.set_yscale("log")
    axis.margins(y=0.2)
    axis.set_ylabel("seconds")
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(Path(out).with_suffix(".png"), dpi=120)


def speed_row(measured: Measurement, **more: Any) -> dict[str, Any]:
    """Returns a measured speed as a row for :func:`report`, with further columns."""
    return {
        "link": measured.link,
        "how": measured.how,
        "size": format_size(measured.nbytes),
        "chunk": format_size(measured.chunk) if measured.chunk else "",
        "depth": measured.depth or "",
        "GB/s": measured.bytes_per_s / 1e9,
        "min": measured.least / 1e9,
        "max": measured.most / 1e9,
        **more,
        "note": measured.note,
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
