"""Threads that wait for each other, in an order that a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_the_middle(module: nn.Module, call: Callable[[], object]) -> Iterator[threading.Event]:
    """Has another thread make a call, without gradients, that stops as it comes to a module.

    Yields:
        What lets it go on; at the end it does, and is waited for.
    """
    inside, go_on = threading.Event(), threading.Event()

    def stop_there(*_: Any) -> None:
        hook.remove()
        inside.set()
        assert go_on.wait(60)

    hook = module.register_forward_pre_hook(stop_there)
    thread = threading.Thread(target=torch.no_grad()(call))
    thread.start()
    try:
        assert inside.wait(60)
        yield go_on
    finally:
        go_on.set()
        thread.join()


def lets_go_first(wait: Callable[[Any], bool], go_on: threading.Event) -> Callable[[Any], bool]:
    """Returns what stands for :meth:`UserThreads.wait`: another thread goes on once it is called.

    The calling thread is woken by what that one does, for which it needs the manager's lock.
    """

    def waits(threads: Any) -> bool:
        with threads._condition:
            go_on.set()
            return wait(threads)

    return waits
