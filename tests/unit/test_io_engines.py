"""Every engine keeps the contract, in memory and on a disk."""

from __future__ import annotations

import random
import tempfile

import pytest

from tiermem.io import IoEngine, ThreadEngine, UringEngine
from tiermem.io.probe import probe_uring
from tiermem.testing.io import EngineConformance, ScriptedEngine

needs_uring = pytest.mark.skipif(probe_uring() is not None, reason="no io_uring here")


@needs_uring
class TestUring(EngineConformance):
    folder = tempfile.gettempdir()

    def make_engine(self) -> IoEngine:
        return UringEngine()


@needs_uring
class TestShallowUring(EngineConformance):
    def make_engine(self) -> IoEngine:
        return UringEngine(depth=1)


class TestThreads(EngineConformance):
    folder = tempfile.gettempdir()

    def make_engine(self) -> IoEngine:
        return ThreadEngine()


class TestOneThread(EngineConformance):
    def make_engine(self) -> IoEngine:
        return ThreadEngine(n_threads=1)


class TestScripted(EngineConformance):
    def make_engine(self) -> IoEngine:
        return ScriptedEngine(order=random.Random(1).randrange)
