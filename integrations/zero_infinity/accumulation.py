"""Gradient accumulation: which calls of an engine's ``step()`` perform a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tiermem import StepError


class Accumulation:
    """Counts micro-batches, and refuses backwards of losses not divided by their number.

    Attributes:
        managed: Whether the engine decides which calls of ``step()`` perform one; else all do.
        scaled: Whether the user was given a loss to call ``backward()`` on.
    """

    def __init__(self, *, managed: bool) -> None:
        """Starts at the first micro-batch."""
        self.managed = managed
        self.scaled = False
        self._boundary: bool | None = None
        self._inside_no_sync = self._inside_backward = False

    def is_boundary(self, micro_steps: int, each: int) -> bool:
        """Whether the next ``step()`` performs a step.

        Args:
            micro_steps: Calls of ``step()`` so far.
            each: How many calls there are per step.
        """
        if self._boundary is not None:
            return self._boundary
        return self.managed and (micro_steps + 1) % each == 0

    def set_boundary(self, is_boundary: bool) -> None:
        """Sets whether ``step()`` performs a step, until it is set again.

        Raises:
            StepError: If every ``step()`` performs one.
        """
        if not self.managed:
            raise StepError("with managed_gradient_accumulation=false every step() is a step")
        self._boundary = bool(is_boundary)

    def begin_step(self) -> None:
        """Begins a ``step()``.

        Raises:
            StepError: Inside ``no_sync()``.
        """
        if self._inside_no_sync:
            raise StepError("step() inside no_sync(): leave no_sync first")
        self.scaled = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context for backwards without gradient exchange; steps in it are refused."""
        if self._inside_no_sync:
            raise StepError("no_sync() inside no_sync()")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Returns a context for the engine's own backward."""
        self._inside_backward = True
        try:
            yield
        finally:
            self._inside_backward = False

    def watch(self, found: Any) -> None:
        """Refuses a backward that does not go through the engine but through a model's output."""
        for tensor in _tensors(found):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse_past_engine)

    def _refuse_past_engine(self, gradient: torch.Tensor) -> None:
        if not self._inside_backward and not self.scaled:
            raise StepError(
                "loss.backward() would miss the loss scale and the division by "
                "gradient_accumulation_steps; call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _tensors(value)
