"""Work that is owed: once, in order, kept where it fails, and never waited for without need."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiermem.runtime.lookahead.walks import Fetcher
from tiermem.runtime.transfers.deferred import Deferred, DeferredWork


class Thread:
    """Work elsewhere, over when the test says so."""

    def __init__(self) -> None:
        self.over = False
        self.waited = 0

    def succeeded(self) -> bool:
        return self.over

    def finish(self) -> None:
        self.over = True

    def wait(self) -> None:
        self.waited += 1


class Passed:
    """An event, passed or not."""

    def __init__(self, passed: bool) -> None:
        self._passed = passed

    def done(self) -> bool:
        return self._passed


def note(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_each_is_paid_once_and_in_order() -> None:
    log: list[str] = []
    deferred = DeferredWork()
    deferred.add(Deferred("a", [1, 2], note(log, "a")))
    deferred.add(Deferred("b", [2, 3], note(log, "b")))
    deferred.add(Deferred("c", [4], note(log, "c")))
    assert 2 in deferred and 5 not in deferred
    assert deferred.order([5, 3, 1]) == [5, 2, 3, 1]
    deferred.pay(5)
    assert log == []
    deferred.pay(2)
    assert log == ["a", "b"]
    for block in (1, 2, 3):
        assert block not in deferred
        deferred.pay(block)
    assert log == ["a", "b"] and deferred
    deferred.pay(4)
    assert log == ["a", "b", "c"] and not deferred


def test_what_fails_is_owed_still_with_all_after_it() -> None:
    log: list[str] = []
    deferred = DeferredWork()
    broken = [True]

    def fails() -> None:
        if broken:
            raise OSError("no disk")
        log.append("b")

    for name, work in (("a", note(log, "a")), ("b", fails), ("c", note(log, "c"))):
        deferred.add(Deferred(name, [1, ord(name)], work))
    with pytest.raises(OSError, match="no disk"):
        deferred.pay(1)
    assert log == ["a"]
    assert ord("a") not in deferred and ord("b") in deferred and ord("c") in deferred
    broken.clear()
    deferred.pay(ord("c"))
    deferred.pay(1)
    assert log == ["a", "c", "b"] and not deferred


def test_the_work_may_use_its_blocks() -> None:
    log: list[str] = []
    deferred = DeferredWork()
    for name in "ab":
        deferred.add(Deferred(name, [1], lambda name=name: (deferred.pay(1), log.append(name))[1]))
    deferred.pay(1)
    assert log == ["a", "b"]


def test_what_is_over_elsewhere_is_taken_up_without_waiting_for_the_rest() -> None:
    log: list[str] = []
    deferred = DeferredWork()
    threads = [Thread(), Thread()]
    for name, thread in zip("ab", threads, strict=True):
        deferred.add(Deferred(name, [ord(name), 1], note(log, name), thread))
    deferred.collect()
    assert log == []
    threads[0].over = True
    deferred.collect()
    assert log == ["a"] and 1 in deferred
    deferred.pay(1)
    assert log == ["a", "b"]
    threads[1].over = True
    deferred.collect()
    assert log == ["a", "b"]


def test_waiting_takes_nothing_up() -> None:
    log: list[str] = []
    deferred = DeferredWork()
    thread = Thread()
    deferred.add(Deferred("a", [1], note(log, "a"), thread))
    deferred.wait()
    assert thread.waited == 1 and log == [] and deferred


def test_one_is_finished_and_what_is_over_by_then_taken_up() -> None:
    log: list[str] = []
    deferred = DeferredWork()
    threads = [Thread(), Thread(), Thread()]
    for name, thread in zip("abc", threads, strict=True):
        deferred.add(Deferred(name, [ord(name)], note(log, name), thread))
    deferred.finish(ord("b"))
    assert [thread.over for thread in threads] == [False, True, False]
    assert log == []  # each in its turn
    deferred.finish(ord("a"))
    assert log == ["a", "b"]
    deferred.finish(ord("c"))
    deferred.finish(7)
    assert log == ["a", "b", "c"] and not deferred


@pytest.mark.parametrize(("busy", "files"), [(True, False), (False, False), (True, True)])
def test_a_lent_block_is_waited_for_while_the_link_is_busy(busy: bool, files: bool) -> None:
    """Else the host submits compute that the block's copy up would wait for."""
    deferred, out = DeferredWork(), {1: 1, 2: 1}
    thread = Thread()
    deferred.add(Deferred("a", [1], lambda: out.pop(1), thread))
    transfers = SimpleNamespace(mover=object() if files else None, waste=None)
    parts: Any = SimpleNamespace(
        deferred=deferred,
        device=torch.device("cuda"),
        planner=None,
        transfers=transfers,
        copy=SimpleNamespace(risen=lambda: Passed(not busy)),
    )
    loans: Any = SimpleNamespace(out=out)
    fetcher = Fetcher(parts, loans, lambda *_: True)
    assert not fetcher.is_back(2)  # lent for something else
    assert not thread.over
    assert fetcher.is_back(1) == (busy and not files)
    assert thread.over == (busy and not files)
    thread.over = True
    deferred.collect()
    assert fetcher.is_back(1)
