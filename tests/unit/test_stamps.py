"""Events as stamps: what is marked when, and how many are made."""

from __future__ import annotations

import pytest
import torch

from tiermem.core.block import Extent
from tiermem.transfer.stamps import CudaClock

EXTENT = Extent(0, 4096)


class FakeEvent:
    """A timing event on streams that run at once."""

    made = 0
    log: list[str]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1

    def record(self, stream: object) -> None:
        self.log.append(f"record {stream}")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 1500.0


class FakeStream:
    cuda_stream = 7

    def __str__(self) -> str:
        return "up"


class FakeEngine:
    """Logs what is asked of the copy engine."""

    def __init__(self, log: list[str]) -> None:
        self.device, self.up_stream, self.calls = torch.device("cpu"), FakeStream(), self
        self.log = log
        self.captures = False

    def prepare_up(self, extent: Extent) -> None:
        self.log.append("prepare")

    def wait(self, stream: int, event: object) -> None:
        self.log.append(f"wait {stream}")

    def capturing(self) -> bool:
        return self.captures


def test_events_are_marked_after_what_a_copy_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    FakeEvent.log, FakeEvent.made = log, 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    engine = FakeEngine(log)
    clock = CudaClock(engine)  # type: ignore[arg-type]
    begin = clock.stamp_copies(EXTENT, object())  # type: ignore[arg-type]
    end = clock.stamp_copies(None, None)
    compute = clock.stamp()
    assert log == ["prepare", "wait 7", "record up", "record up", "record compute"]
    assert clock.passed(begin) and clock.seconds(begin, end) == 1.5
    for stamp in (begin, end, compute):
        clock.free(stamp)
    for _ in range(3):
        assert clock.stamp() in (begin, end, compute)
    assert FakeEvent.made == 3
    engine.captures = True
    assert clock.stamp() is None and not clock.usable()
    assert len(log) == 8


def test_there_is_an_end_to_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.log = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    clock = CudaClock(FakeEngine([]))  # type: ignore[arg-type]
    stamps = [clock.stamp() for _ in range((1 << 14) + 2)]
    assert stamps.count(None) == 2
