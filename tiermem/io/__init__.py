"""File I/O: the interface of an engine, and the engines that implement it."""

from __future__ import annotations

from tiermem.io.engine import IoCompletion, IoEngine, IoOp, IoRequest
from tiermem.io.probe import choose_engine
from tiermem.io.threads import ThreadEngine
from tiermem.io.uring import UringEngine

__all__ = [
    "IoCompletion",
    "IoEngine",
    "IoOp",
    "IoRequest",
    "ThreadEngine",
    "UringEngine",
    "choose_engine",
]
