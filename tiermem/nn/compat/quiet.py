"""Contexts for tiermem's own tensor operations inside a user's forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ParamSpec, TypeVar

import torch

from tiermem.runtime.base.functorch import (
    modes,
    outside_inference,
    transforming,
    untransformed,
    without_modes,
)

P = ParamSpec("P")
R = TypeVar("R")


class _Unrecorded:
    """A cheap context that combines ``torch.no_grad()`` and the contexts ``others``.

    It is entered for every gradient, and usually nothing is switched on: so that is checked
    first, and only what is on is switched off. That costs a few C++ calls of torch, while
    contexts for all of it cost tens of microseconds.
    """

    __slots__ = ("_others", "_recorded", "_stack")

    def __init__(self, others: Sequence[AbstractContextManager[Any]]) -> None:
        self._others = others
        self._recorded = False
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._others:
            with ExitStack() as stack:
                for other in self._others:
                    stack.enter_context(other)
                self._stack = stack.pop_all()
        self._recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *failure: Any) -> None:
        torch._C._set_grad_enabled(self._recorded)
        if self._stack is not None:
            self._stack.__exit__(*failure)


def unrecorded() -> AbstractContextManager[None]:
    """Returns a context that combines ``torch.inference_mode(False)`` and ``torch.no_grad()``.

    A transform of ``torch.func`` is off inside as well: results of a transform become invalid with
    it.
    """
    return _Unrecorded(_surroundings())


def _surroundings() -> list[AbstractContextManager[Any]]:
    """Returns contexts that switch off inference mode and transforms, if they are on."""
    others: list[AbstractContextManager[Any]] = []
    if torch.is_inference_mode_enabled():
        others.append(outside_inference())
    if transforming():
        others.append(untransformed())
    return others


def quiet(device: torch.device) -> AbstractContextManager[None]:
    """Excludes modes that the user has switched on from tiermem's own operations.

    Autocast, inference mode, transforms of ``torch.func`` and dispatch modes (selective
    checkpointing) are off inside, and nothing is recorded for autograd.

    Args:
        device: The device of the operations inside.

    Returns:
        A context, to be entered immediately.
    """
    others = _surroundings()
    if torch._C._is_any_autocast_enabled():
        others += [torch.autocast(kind, enabled=False) for kind in (device.type, "cpu")]
    if modes():
        others.append(without_modes())
    return _Unrecorded(others)


_uncompiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def uncompiled(call: Callable[P, R]) -> Callable[P, R]:
    """Returns the same call, into which ``torch.compile`` does not trace.

    Args:
        call: A function of a module or class, not a method of one object: its result
            is cached.
    """
    if "torch._dynamo" not in sys.modules:
        return call
    found = _uncompiled.get(call)
    if found is None:
        found = _uncompiled[call] = torch.compiler.disable(call)
    return found
