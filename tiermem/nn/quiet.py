"""Work of our own in the middle of a user's forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """Keeps what the user has switched on for their own operations out of ours.

    Autocast, inference mode and dispatch modes (selective checkpointing) are off inside, and
    nothing is recorded for autograd.

    Args:
        device: Where the operations inside run.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),
    ):
        yield


def uncompiled(call: Callable[P, R]) -> Callable[P, R]:
    """Returns the same call, which the compiler does not look into if one is around it."""
    if "torch._dynamo" not in sys.modules:
        return call
    return torch.compiler.disable(call)  # type: ignore[no-any-return]
