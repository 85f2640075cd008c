"""What a run of all figures is made of: steps, the results they leave, and what is required."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: For ``--only`` and the table.
        line: Script and arguments; ``{folder}`` and ``{out}`` are replaced.
        small: Further arguments of ``--small``, which count over those before them.
        seconds: Its time limit.
        group: What it belongs to, for ``--group``.
    """

    name: str
    line: str
    small: str
    seconds: int
    group: str = "stream"


@dataclass(frozen=True)
class Check:
    """One line of the table of what is required.

    Attributes:
        work: What it is about.
        found: Reads the figure out of the results, given by file; None where it is not there.
        least: What it must be at least, or None.
        most: What it must be at most, or None.
        group: What it belongs to, for ``--group``.
    """

    work: str
    found: Callable[[Results], float | None]
    least: float | None = None
    most: float | None = None
    group: str = "stream"

    def row(self, results: Results) -> dict[str, Any]:
        """Returns the line."""
        required = (
            f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        )
        value = self.found(results)
        if value is None:
            return {"work": self.work, "required": required, "reached": "not measured", "": ""}
        good = (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )
        said = "yes" if good else "NO"
        return {"work": self.work, "required": required, "reached": float(value), "": said}


class Results:
    """The JSON files that the steps left.

    Args:
        folder: Where they are.
        name: What ends their names.
        since: Files older than this (seconds since the epoch) are of another run.
    """

    def __init__(self, folder: Path, name: str, since: float = 0.0) -> None:
        self.folder = folder
        self.name = name
        self.since = since

    def rows(self, kind: str) -> Rows:
        """Returns the rows of one table; none where it is missing."""
        path = self.folder / f"{kind}_{self.name}.json"
        if not path.exists() or path.stat().st_mtime < self.since:
            return []
        return list(json.loads(path.read_text(encoding="utf-8"))["rows"])

    def pick(self, kind: str, column: str, **where: Any) -> list[Any]:
        """Returns a column's values in the rows that agree with ``where``."""
        return [
            row[column]
            for row in self.rows(kind)
            if column in row and all(row.get(key) == value for key, value in where.items())
        ]


def cell(kind: str, column: str, **where: Any) -> Callable[[Results], float | None]:
    """Returns what reads one cell."""
    return lambda results: next(iter(results.pick(kind, column, **where)), None)


def most_of(column: str, *kinds: str) -> Callable[[Results], float | None]:
    """Returns what reads the largest value of a column."""
    return lambda results: max(
        (v for kind in kinds for v in results.pick(kind, column)), default=None
    )
