"""Work that is owed: once, in order, kept where it fails, and never waited for without need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiermem.runtime.transfers.deferred import Debt, Debts


class Thread:
    """Work elsewhere, over when the test says so."""

    def __init__(self) -> None:
        self.over = False
        self.waited = 0

    def succeeded(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited += 1


def note(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_each_is_paid_once_and_in_order() -> None:
    log: list[str] = []
    debts = Debts()
    debts.add(Debt("a", [1, 2], note(log, "a")))
    debts.add(Debt("b", [2, 3], note(log, "b")))
    debts.add(Debt("c", [4], note(log, "c")))
    assert 2 in debts and 5 not in debts
    assert debts.order([5, 3, 1]) == [5, 2, 3, 1]
    debts.pay(5)
    assert log == []
    debts.pay(2)
    assert log == ["a", "b"]
    for block in (1, 2, 3):
        assert block not in debts
        debts.pay(block)
    assert log == ["a", "b"] and debts
    debts.pay(4)
    assert log == ["a", "b", "c"] and not debts


def test_what_fails_is_owed_still_with_all_after_it() -> None:
    log: list[str] = []
    debts = Debts()
    broken = [True]

    def fails() -> None:
        if broken:
            raise OSError("no disk")
        log.append("b")

    for name, work in (("a", note(log, "a")), ("b", fails), ("c", note(log, "c"))):
        debts.add(Debt(name, [1, ord(name)], work))
    with pytest.raises(OSError, match="no disk"):
        debts.pay(1)
    assert log == ["a"]
    assert ord("a") not in debts and ord("b") in debts and ord("c") in debts
    broken.clear()
    debts.pay(ord("c"))
    debts.pay(1)
    assert log == ["a", "c", "b"] and not debts


def test_the_work_may_use_its_blocks() -> None:
    log: list[str] = []
    debts = Debts()
    for name in "ab":
        debts.add(Debt(name, [1], lambda name=name: (debts.pay(1), log.append(name))[1]))
    debts.pay(1)
    assert log == ["a", "b"]


def test_what_is_over_elsewhere_is_taken_up_without_waiting_for_the_rest() -> None:
    log: list[str] = []
    debts = Debts()
    threads = [Thread(), Thread()]
    for name, thread in zip("ab", threads, strict=True):
        debts.add(Debt(name, [ord(name), 1], note(log, name), thread))
    debts.collect()
    assert log == []
    threads[0].over = True
    debts.collect()
    assert log == ["a"] and 1 in debts
    debts.pay(1)
    assert log == ["a", "b"]
    threads[1].over = True
    debts.collect()
    assert log == ["a", "b"]


def test_waiting_takes_nothing_up() -> None:
    log: list[str] = []
    debts = Debts()
    thread = Thread()
    debts.add(Debt("a", [1], note(log, "a"), thread))
    debts.wait()
    assert thread.waited == 1 and log == [] and debts
