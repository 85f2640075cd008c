"""Streams and events through the CUDA driver's calls, of which only a log is kept here."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tiermem.transfer import driver
from tiermem.transfer.driver import DriverCalls, _destroy, _Thread


class Logged(DriverCalls):
    """The calls of a device that is not there; every event has been passed at once."""

    def __init__(self) -> None:
        self.index = 0
        self.spare = [5]
        self.log: list[tuple[Any, ...]] = []
        self._marks = {7: 9}
        self._local = _Thread()
        self._local.bound = True
        self._record = self._logged("record")
        self._wait = self._logged("wait")
        self._copy = self._logged("copy")

    def _logged(self, name: str) -> Any:
        def call(*arguments: int) -> int:
            self.log.append((name, *arguments))
            return 0

        return call

    def _push(self) -> None:
        self.log.append(("push",))

    def _leave(self) -> None:
        self.log.append(("pop",))

    def passed(self, handle: int) -> bool:
        self.log.append(("query", handle))
        return True


def test_a_stream_waits_once_for_what_an_event_says() -> None:
    calls = Logged()
    event = calls.record(1)
    for _ in range(3):
        calls.wait(2, event)
    calls.wait(3, event)
    assert calls.log == [("record", 5, 1), ("wait", 2, 5, 0), ("wait", 3, 5, 0)]


def test_an_event_recorded_again_is_waited_for_and_asked_again() -> None:
    calls = Logged()
    event = calls.record(1)
    calls.wait(2, event)
    assert event.done() and event.done()
    assert calls.record(1, event) is event
    calls.wait(2, event)
    assert event.done()
    waits = [entry for entry in calls.log if entry[0] == "wait"]
    assert len(waits) == 2
    assert calls.log.count(("query", 5)) == 2
    assert not calls.spare
    del event
    assert calls.spare == [5]


def test_a_copy_that_records_an_event_again_is_waited_for_and_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_current_device", lambda: 0)
    calls = Logged()
    event = calls.copy_behind(1, [7], 100, 200, 16)
    calls.wait(2, event)
    assert event.done()
    first = calls.log[:]
    assert first[:3] == [("record", 9, 7), ("wait", 1, 9, 0), ("copy", 100, 200, 16, 1)]
    assert calls.copy_behind(1, [7], 100, 200, 16, event) is event
    calls.wait(2, event)
    assert event.done()
    assert calls.log == 2 * first


@pytest.mark.parametrize("device", [0, 1])
def test_a_copy_waits_once_for_each_event_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    """By itself, or call by call where another device is current: then in its own context."""
    monkeypatch.setattr(driver, "_current_device", lambda: device)
    calls = Logged()
    calls.spare = [6, 5, 4]
    events = calls.record(2), calls.record(3)
    calls.log.clear()
    copies = [calls.copy_behind(1, [7], 100, 200, 16, None, events)]
    copies.append(calls.copy_behind(1, [7], 100, 200, 16, copies[0], events))
    copy = [("push",), ("copy", 100, 200, 16, 1), ("pop",)][1 - device : 2 + device]
    own = [("record", 9, 7), ("wait", 1, 9, 0), *copy, ("record", 6, 1)]
    assert calls.log == [("wait", 1, 4, 0), ("wait", 1, 5, 0), *own, *own]


def test_a_stream_follows_another_by_one_mark() -> None:
    calls = Logged()
    calls.follow(2, 7)
    calls.follow(2, 7)
    assert calls.log == 2 * [("record", 9, 7), ("wait", 2, 9, 0)]


def test_the_time_between_two_events_is_in_seconds() -> None:
    calls = Logged()

    def elapsed(out: Any, first: int, second: int) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_float))[0] = 500.0 * (second - first)
        return 0

    calls._elapsed = elapsed
    for event in (2, 5):
        calls.mark(event, 1)
    assert calls.log == [("record", 2, 1), ("record", 5, 1)]
    assert calls.seconds(2, 5) == 1.5


def test_events_are_destroyed_where_there_is_a_driver() -> None:
    gone: list[int] = []
    library = SimpleNamespace(cuEventDestroy_v2=gone.append)
    _destroy(library, [3, 4], os.getpid() + 1)  # in a forked child there is none
    assert not gone
    _destroy(library, [3, 4], os.getpid())
    assert gone == [3, 4]
