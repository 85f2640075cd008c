"""Placeholders under torch's profiler, which asks operands for their addresses and shapes.

It does so at the begin of each operation, including tiermem's that point a parameter elsewhere. An
error of a placeholder there is not an error of the program: torch writes it to the standard error,
with the stack, for each operation, and the shapes of all operations are wrong. So placeholders can
be read while shapes are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler

from tiermem.nn.tensors.placeholder import let_be_read

_followed: list[str] = []


def follow_profiler() -> None:
    """Replaces torch's functions that begin and end a profile; may be called twice."""
    if _followed:
        return
    _followed.append(profiler.__name__)
    start: Any = profiler.profile._start_trace
    end: Any = profiler._disable_profiler  # type: ignore[attr-defined]

    def start_trace(self: Any) -> Any:
        let_be_read(self.record_shapes)
        return start(self)

    def disable_profiler() -> Any:
        try:
            return end()
        finally:
            let_be_read(False)

    profiler.profile._start_trace = start_trace  # type: ignore[method-assign]
    profiler._disable_profiler = disable_profiler  # type: ignore[attr-defined]
    if torch._C._autograd._profiler_enabled():  # begun before, and perhaps with shapes
        let_be_read(True)
