"""Copies down wait for the compute of every stream that has used blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from tiermem.core.block import Extent
from tiermem.transfer.driver import StreamCalls
from tiermem.transfer.streams import StreamCopyEngine

UP, DOWN, FILES = 1, 2, 3


class Calls:
    """A device that does nothing, and knows what each stream waits for.

    Attributes:
        stream: The compute stream of the calling thread.
        waited: Which stream has waited for which others.
    """

    def __init__(self) -> None:
        self.stream = 7
        self.waited: list[tuple[int, int]] = []

    def current(self) -> int:
        return self.stream

    def capturing(self) -> bool:
        return False

    def follow(self, stream: int, other: int) -> None:
        self.waited.append((stream, other))

    def wait(self, stream: int, event: object) -> None:
        raise AssertionError("there is no event to wait for")

    def copy_behind(self, stream: int, others: Iterable[int], *_: Any) -> object:
        self.waited += [(stream, other) for other in others]
        return object()


def used_on_three_streams() -> tuple[Calls, StreamCopyEngine]:
    calls = Calls()
    engine = StreamCopyEngine(cast(StreamCalls, calls), UP, DOWN, FILES)
    for calls.stream in (7, 8, 9):
        engine.use(None)
    return calls, engine


def test_a_copy_down_waits_for_all_of_them() -> None:
    calls, engine = used_on_three_streams()
    some = torch.zeros(16, dtype=torch.uint8)
    engine.down(some, some, Extent(0, 16), None)
    assert sorted(calls.waited) == [(DOWN, 7), (DOWN, 8), (DOWN, 9)]


def test_so_do_those_that_another_thread_submits() -> None:
    calls, engine = used_on_three_streams()
    engine.prepare_down()
    assert sorted(calls.waited) == [(DOWN, 7), (DOWN, 8), (DOWN, 9)]
