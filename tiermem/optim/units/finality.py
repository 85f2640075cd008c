"""Whether gradients are final in the current backward, and unchanged since."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph

from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.need import accumulates
from tiermem.optim.rules.probe import settings_of

__all__ = ["accumulates", "grad_of", "is_nested", "is_own", "marks_of"]

_ENGINE = graph._engine_run_backward.__code__


def grad_of(entry: Entry) -> torch.Tensor | None:
    """Returns ``param.grad`` itself, without accessing what it stands for."""
    with torch._C.DisableTorchFunctionSubclass():
        return entry.param.grad


def is_own(entry: Entry) -> bool:
    """Whether ``param.grad`` is what backward has left there."""
    return entry.has_grad and grad_of(entry) is entry.lazy


def is_nested() -> bool:
    """Whether the current backward was begun inside another, as reentrant checkpoints do.

    The innermost is then only a part of a backward. The thread that started the outermost has
    one call of the engine on its stack, threads of the engine itself have none.
    """
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls += frame.f_code is _ENGINE
        frame = frame.f_back
    engines = isinstance(threading.current_thread(), threading._DummyThread)
    return calls > 1 or (calls == 1 and engines)


def marks_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns values that differ once settings are changed, at any depth.

    Does not wait for the device.
    """
    return [{key: _mark_of(value) for key, value in settings_of(g).items()} for g in groups]


def _mark_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.tolist() if value.device.type == "cpu" else None
    if type(value) in (list, tuple):
        return type(value), [_mark_of(inner) for inner in value]
    if type(value) is dict:
        return {key: _mark_of(inner) for key, inner in value.items()}
    return value
