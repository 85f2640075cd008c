"""Tells a forked child from the process that opened the tiers."""

from __future__ import annotations

import os

_generation = 0


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


def generation() -> int:
    """Returns how many forks lie between this process and the one that was started."""
    return _generation
