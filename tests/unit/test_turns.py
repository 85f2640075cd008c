"""A thread that saves, looks or evaluates while another trains: right, or told to take turns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import same_bits
from torch import nn

import tiermem
from tiermem.nn.groups import grads as module
from tiermem.nn.passes import turns
from tiermem.saving import save

LOOKS = ["save", "load", "state_dict", "state", "load_state_dict", "eval", "step"]


class Meeting(torch.optim.SGD):
    """Calls something in each step, once it has that."""

    meet: Callable[[], object] | None = None

    def step(self, closure: Any = None) -> Any:
        if Meeting.meet is not None:
            Meeting.meet()
        return super().step(closure)


class Run:
    """A model in the tiers and its plain twin, which train with clipping and two micro-batches."""

    def __init__(self, tier: tiermem.TierManager) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        self.model = tier.wrap(copy.deepcopy(self.plain))
        self.tier = tier
        self.optimizer = tier.optimizer(self.model, Meeting, lr=0.1, momentum=0.9)
        self.twin = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return model(torch.randn(4, 16, generator=draw)).square().sum()

    def step_plain(self) -> None:
        self.loss(self.plain, 0).backward()
        nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5)
        self.loss(self.plain, 1).backward()
        self.twin.step()
        self.twin.zero_grad()

    def call(self, what: str, path: Path) -> None:
        if what == "save":
            self.tier.save(path / "other")
        elif what == "load":
            self.tier.load(path / "before")
        elif what == "state_dict":
            self.optimizer.state_dict()
        elif what == "state":
            _ = self.optimizer.state
        elif what == "load_state_dict":
            self.optimizer.load_state_dict(self.twin.state_dict())
        elif what == "step":
            self.optimizer.step()
        else:
            with torch.no_grad():
                self.loss(self.model, 2)


@contextmanager
def running(path: Path) -> Iterator[Run]:
    """Yields a run after one step, and what it saved then."""
    with tiermem.TierManager("cpu", hbm="48KiB", dram="1MiB") as tier:
        run = Run(tier)
        run.step_plain()
        run.loss(run.model, 0).backward()
        run.optimizer.clip_grad_norm_(0.5)
        run.loss(run.model, 1).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        tier.save(path / "before")
        yield run
        assert not run.tier._runtime.turns._looking and not run.tier._runtime.turns._stepping
        assert not run.tier._runtime.turns._forwards


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """Makes a call in another thread; returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize(
    ("what", "where"),
    [
        *((what, where) for what in LOOKS for where in ("a backward", "an optimizer's call")),
        *((what, "a forward") for what in LOOKS if what != "step"),
    ],
)
def test_a_look_beside_training_is_refused_or_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, where: str
) -> None:
    """With clipping pending, made when a gradient is next in HBM."""
    with running(tmp_path) as run:
        found: list[BaseException | None] = []
        begun = threading.Lock()

        def meet(*_: object) -> None:
            monkeypatch.setattr(Meeting, "meet", None)
            if begun.acquire(blocking=False):  # not where what is called comes by here, too
                found.append(elsewhere(partial(run.call, what, tmp_path)))

        run.loss(run.model, 0).backward()
        run.optimizer.clip_grad_norm_(0.5)
        if where == "a forward":
            run.model[3].register_forward_hook(meet)
        loss = run.loss(run.model, 1)
        if where == "a backward":
            run.model[3].weight.register_hook(meet)
        loss.backward()
        if where == "an optimizer's call":
            monkeypatch.setattr(Meeting, "meet", staticmethod(meet))
        run.optimizer.step()
        (error,) = found
        if where == "a forward" and what == "eval":
            assert error is None
        else:
            assert isinstance(error, tiermem.StepError)
            assert f"another thread is at it, in {where}" in str(error)
            assert "one lock around" in str(error)
        run.optimizer.zero_grad()
        run.step_plain()
        assert all(map(same_bits, *(m.state_dict().values() for m in (run.model, run.plain))))
        assert not (tmp_path / "other").exists()
        run.call(what, tmp_path)


@pytest.mark.parametrize("what", ["step", "backward", "forward"])
def test_what_changes_a_run_waits_for_a_save_in_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The checkpoint has the run as it was when the save began."""
    with running(tmp_path) as run:
        waits = threading.Event()
        wait, save_now = threading.Condition.wait, save.save_now
        if what != "forward":
            loss = run.loss(run.model, 0)
            if what == "step":
                loss.backward()

        def telling(self: threading.Condition, timeout: float | None = None) -> bool:
            if self is run.tier._runtime.turns._changed:
                waits.set()
            return wait(self, timeout)

        def train() -> None:
            if what == "forward":
                run.loss(run.model, 0)
            elif what == "backward":
                loss.backward()
            else:
                run.optimizer.step()

        def slowly(runtime: Any, plan: Any) -> None:
            thread.start()
            assert waits.wait(60)
            save_now(runtime, plan)

        thread = threading.Thread(target=train)
        monkeypatch.setattr(threading.Condition, "wait", telling)
        monkeypatch.setattr("tiermem.tier.save_now", slowly)
        before = run.model.state_dict()
        run.tier.save(tmp_path / "other")
        thread.join()
        if what == "step":
            assert not torch.equal(run.model.state_dict()["0.weight"], before["0.weight"])
        run.tier.load(tmp_path / "other")
        assert all(map(same_bits, run.model.state_dict().values(), before.values()))


def test_a_change_that_is_pending_is_made_once_where_two_threads_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads a gradient comes as another one makes the change."""
    with running(tmp_path) as run:
        run.loss(run.model, 0).backward()
        wanted = [p.grad.clone() * 2 for p in run.model.parameters() if p.grad is not None]
        grads = run.tier._runtime.grads
        (unit,) = {id(e.unit): e.unit for g in run.tier._runtime.groups for e in g.entries[:1]
                   if g.block.name.endswith("0")}.values()  # fmt: skip
        assert unit is not None
        grads.await_change(unit, unit.entries, lambda found: [g.mul_(2) for g in found])
        lock, make_first = run.tier._manager.lock, module.make_first
        came = threading.Event()

        class Telling:
            def __enter__(self) -> None:
                if not lock.acquire(blocking=False):
                    came.set()
                    lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()

        def read() -> None:
            grads.settle(unit, slot)
            came.set()

        def make(*args: Any) -> None:
            if not thread.is_alive():
                thread.start()
                assert came.wait(60)
            make_first(*args)

        thread = threading.Thread(target=read)
        monkeypatch.setattr(run.tier._manager, "lock", Telling())
        monkeypatch.setattr(module, "make_first", make)
        slot = run.tier._manager.acquire(unit.block)
        grads.settle(unit, slot)
        thread.join()
        run.tier._manager.release(unit.block)
        monkeypatch.undo()
        found = [p.grad for p in run.model[0].parameters()]
        assert all(map(torch.equal, found, wanted))


def test_a_call_that_was_cut_short_keeps_no_thread_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between two lines may leave a thread among those that look."""
    monkeypatch.setattr(turns, "_PATIENCE", 0.001)
    with running(tmp_path) as run:
        loss = run.loss(run.model, 0)
        run.tier._runtime.turns._looking.append(-1)
        run.tier._manager.gate.torn = run.tier._manager.gate.unsure = True
        loss.backward()
        run.optimizer.step()
