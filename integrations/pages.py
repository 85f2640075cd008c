"""Writes the tables of options in ``docs/integrations`` from the options themselves.

    python -m tiermem.integrations.pages docs/integrations

Each page has its own text, and a table between two marker lines that this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import extreme_offloading, megatron_bridge, surogate
from .options import Option, option_table

_BEGIN = "<!-- options: written by tiermem.integrations.pages -->"
_END = "<!-- end of options -->"

PAGES: dict[str, Sequence[Option]] = {
    "extreme_offloading.md": extreme_offloading.OPTIONS,
    "megatron_bridge.md": megatron_bridge.FIELDS,
    "surogate.md": surogate.OPTIONS,
}


def with_table(text: str, options: Sequence[Option]) -> str:
    """Returns a page with its table of options replaced.

    Raises:
        ValueError: If it has no pair of marker lines.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {_BEGIN!r} and {_END!r}")
    return f"{before}{_BEGIN}\n\n{option_table(options)}\n\n{_END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Rewrites every page in a folder."""
    folder = Path(arguments[0])
    for name, options in PAGES.items():
        page = folder / name
        page.write_text(with_table(page.read_text(encoding="utf-8"), options), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
