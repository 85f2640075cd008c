"""Threads of a program that use one model: which are counted, and which wait for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support_threads import in_the_middle, lets_go_first
from torch import nn

import tiermem
from tiermem.runtime.base import threads as module
from tiermem.runtime.base.threads import UserThreads


def any_number() -> int:
    return 100


def other_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_one_thread_that_uses_blocks_again_and_again_is_one() -> None:
    threads = UserThreads(threading.RLock())
    for _ in range(3):
        threads.note()
    assert not threads.several


def test_a_second_thread_is_noted_for_good() -> None:
    threads = UserThreads(threading.RLock())
    threads.note()
    other_thread(threads.note)
    assert threads.several
    threads.note()
    assert threads.several


def test_a_thread_in_backward_is_not_counted() -> None:
    threads = UserThreads(threading.RLock())
    threads.note()

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.note()
            return gradient

    # what runs backward is a thread that was not seen before
    other_thread(lambda: Noted.apply(torch.ones(2, requires_grad=True)).sum().backward())
    assert not threads.several


@pytest.mark.parametrize("inside", [True, False])
def test_a_thread_without_others_does_not_wait(inside: bool) -> None:
    threads = UserThreads(threading.RLock())
    if inside:
        threads.enter(any_number)
    else:
        other_thread(lambda: threads.enter(any_number))
    assert not threads.wait()


def test_who_would_wait_for_threads_that_all_wait_is_refused() -> None:
    lock = threading.RLock()
    threads, first, second = UserThreads(lock), threading.Event(), threading.Event()
    threads.note()
    woken = list[bool]()

    def waits() -> None:
        with lock:
            threads.enter(any_number)
            first.set()
            assert second.wait(60)
            woken.append(threads.wait())  # the other one is in its model, and does not wait yet

    thread = threading.Thread(target=waits)
    thread.start()
    assert first.wait(60)
    threads._inside.add(threading.get_ident())  # enter(), for which the lock is not free
    second.set()
    with lock:
        assert threads.waiting and not threads.wait()
        threads.leave()
    thread.join()
    assert woken == [True] and not threads.waiting


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST", 0.001)
    threads = UserThreads(threading.RLock())
    threads.enter(any_number)
    other_thread(lambda: threads.enter(any_number))
    assert not threads.wait() and not threads.waiting


def test_threads_share_a_model_in_hbm_for_two_of_its_layers() -> None:
    """Ten of them: each waits until there is room for the layer that it has come to."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    xs = [torch.randn(3, 32) for _ in range(10)]
    wanted = [model(x).detach() for x in xs]
    found: dict[int, torch.Tensor] = {}
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier, torch.inference_mode():
        tier.wrap(model, blocks=[str(number) for number in range(6)])

        def run(number: int) -> None:
            with torch.no_grad():
                for _ in range(5):
                    found[number] = model(xs[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[number], wanted[number]) for number in range(10))


def test_a_thread_goes_on_as_soon_as_a_block_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only when the other one's pass is over."""
    monkeypatch.setattr(module, "_TURN", 0.001)
    done = threading.Event()
    seen = list[bool]()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            seen.append(done.wait(20))
            return x

    model, x = Model(), torch.randn(3, 32)
    with tiermem.TierManager("cpu", hbm=3 * 4096, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=["first", "second"])  # of which HBM holds one
        with in_the_middle(model.first, partial(model, x)) as go_on:
            monkeypatch.setattr(UserThreads, "wait", lets_go_first(UserThreads.wait, go_on))
            model.second(x)
            done.set()
    assert seen == [True]


def test_ctrl_c_while_a_thread_waits_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TURN", 0.001)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(3, 32)
    wanted = model(x).detach()
    found = list[torch.Tensor]()

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    with tiermem.TierManager("cpu", hbm=3 * 4096, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=["0", "1"])  # of which HBM holds one
        condition = tier._manager.threads._condition
        with in_the_middle(model[0], lambda: found.append(model(x))):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(condition, "wait", interrupted)
                model[1](x)
            assert not tier._manager.threads.waiting
        assert torch.equal(found[0], wanted) and torch.equal(model(x), wanted)
        assert not any(record.leases for record in tier._manager.parts.table)


def test_calls_for_which_hbm_has_no_room_at_one_time_come_one_after_the_other() -> None:
    threads, order = UserThreads(threading.RLock()), list[str]()
    lock = threads._condition  # which is the lock's
    first_is_in, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with lock:
            threads.enter(lambda: 1)
        first_is_in.set()
        assert go_on.wait(60)
        with lock:
            order.append("first")
            threads.leave()

    def second() -> None:
        with lock:
            go_on.set()  # nobody else gets the lock before this one waits
            threads.enter(lambda: 1)
            order.append("second")
            threads.leave()

    one, other = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert first_is_in.wait(60)
    other.start()
    one.join()
    other.join()
    assert order == ["first", "second"]


def test_a_call_that_waits_for_its_own_threads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it to end, and it waits for them."""
    monkeypatch.setattr(module, "_TURN", 0.01)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = dict[int, torch.Tensor]()

            def run(number: int) -> None:
                with torch.no_grad():
                    found[number] = self.branches[number](x)

            for number in range(2):
                other_thread(partial(run, number))
            return found[0] + found[1]

    model, x = Branches(), torch.randn(3, 32)
    wanted = model(x)
    with tiermem.TierManager("cpu", hbm=3 * 4096, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=["branches.0", "branches.1"])
        assert torch.equal(model(x), wanted)


def test_a_thread_waits_on_its_own_stream_for_what_another_thread_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy may be under way still: the other one's stream waits for it, and no other."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(3, 32)
    looked = list[int]()
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=["0", "1"])
        model[1](x)
        copy = tier._manager.parts.copy
        with in_the_middle(model[0], partial(model[0], x)):
            monkeypatch.setattr(copy, "use", lambda _event: looked.append(threading.get_ident()))
            model[0](x)  # whose block is held
        assert threading.get_ident() in looked


def test_a_thread_whose_call_was_cut_short_between_two_lines_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Linear(32, 32), torch.randn(3, 32)
    with tiermem.TierManager("cpu", hbm=3 * 4096, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model)
        wanted = model(x)
        threads = tier._manager.threads

        def cut_short() -> None:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(UserThreads, "leave", raises)
                model(x)

        def raises(_threads: UserThreads) -> None:
            raise KeyboardInterrupt

        other_thread(cut_short)
        assert threads._inside
        assert torch.equal(model(x), wanted)
        assert not threads._inside


def test_a_call_that_waits_for_its_own_threads_waits_in_vain_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of its calls took ten seconds longer; but a turn that comes is waited for as ever."""
    monkeypatch.setattr(module, "_TURN", 1.0)
    waits, comes = list[float](), [False, False, True, False]
    threads = UserThreads(threading.RLock())

    def wait_for(predicate: Callable[[], bool], timeout: float) -> bool:
        waits.append(timeout)
        return comes[len(waits) - 1]

    monkeypatch.setattr(threads._condition, "wait_for", wait_for)
    threads.note()
    other_thread(threads.note)
    for _ in comes:
        threads.enter(lambda: 1)
        other_thread(partial(threads.enter, lambda: 1))
        threads.repair()
    assert waits == pytest.approx([1.0, 0.1, 0.01, 1.0])
