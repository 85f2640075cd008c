"""Events as stamps: what is marked when, and how many are made."""

from __future__ import annotations

from tiermem.core.block import Extent
from tiermem.transfer.stamps import CudaClock

EXTENT = Extent(0, 4096)


class FakeStream:
    cuda_stream = 7


class FakeEngine:
    """A copy engine and the calls of its device; logs what is asked of both."""

    def __init__(self) -> None:
        self.up_stream, self.calls = FakeStream(), self
        self.log: list[str] = []
        self.captures = False
        self.made = 0

    def prepare_up(self, extent: Extent) -> None:
        self.log.append("prepare")

    def wait(self, stream: int, event: object) -> None:
        self.log.append(f"wait {stream}")

    def capturing(self) -> bool:
        return self.captures

    def current(self) -> int:
        return 3

    def new_event(self, *, timing: bool) -> int:
        assert timing
        self.made += 1
        return self.made

    def mark(self, event: int, stream: int) -> None:
        self.log.append(f"mark {stream}")

    def passed(self, event: int) -> bool:
        return event <= self.made

    def seconds(self, first: int, second: int) -> float:
        return 1.5 * (second - first)


def test_events_are_marked_after_what_a_copy_waits_for() -> None:
    engine = FakeEngine()
    clock = CudaClock(engine)  # type: ignore[arg-type]
    begin = clock.stamp_copies(EXTENT, object())  # type: ignore[arg-type]
    end = clock.stamp_copies(None, None)
    compute = clock.stamp()
    assert engine.log == ["prepare", "wait 7", "mark 7", "mark 7", "mark 3"]
    assert clock.passed(begin) and clock.seconds(begin, end) == 1.5
    for stamp in (begin, end, compute, begin):  # one of them once more, after an exception
        clock.free(stamp)
    assert {clock.stamp() for _ in range(3)} == {begin, end, compute}
    assert engine.made == 3
    engine.captures = True
    assert clock.stamp() is None and not clock.usable()
    assert len(engine.log) == 8


def test_there_is_an_end_to_the_events() -> None:
    clock = CudaClock(FakeEngine())  # type: ignore[arg-type]
    stamps = [clock.stamp() for _ in range((1 << 14) + 2)]
    assert stamps.count(None) == 2


def test_events_are_made_ahead() -> None:
    """As many as are asked for, together with those there are, and none while a graph is made."""
    engine = FakeEngine()
    clock = CudaClock(engine)  # type: ignore[arg-type]
    first = clock.stamp()
    clock.prepare(5)
    assert engine.made == 5
    clock.free(first)
    assert len({clock.stamp() for _ in range(5)}) == 5
    assert engine.made == 5
    clock.prepare(3)
    engine.captures = True
    clock.prepare(9)
    assert engine.made == 5


def test_there_is_an_end_to_events_made_ahead() -> None:
    engine = FakeEngine()
    CudaClock(engine).prepare(1 << 20)  # type: ignore[arg-type]
    assert engine.made == 1 << 14
