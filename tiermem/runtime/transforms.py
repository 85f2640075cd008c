"""Tensors of our own while one of ``torch.func``'s transforms is under way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def transforming() -> bool:
    """Whether a transform (``grad``, ``vmap``, ``jvp``, ...) is under way in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed() -> AbstractContextManager[Any]:
    """Returns a context that operations inside do as if no transform was under way.

    What an operation returns belongs to the innermost transform otherwise, and is dead once that
    is over: torch reads freed memory if it is used then. So nothing that is kept may be made there.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    found: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return found
