"""What steps ahead cost the host beside the copies and kernels: no more than they have to."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from support_ahead import ahead, units, warm

from tiermem.runtime.base import undisturbed as threads


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leaves what circles of references keep alive, as a step in a real loop finds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _uses(pair: Any) -> int:
    stats = pair.tier.stats()
    return int(stats.hits + stats.misses)


@pytest.mark.usefixtures("no_collector")
def test_gradients_of_a_step_are_cleared_without_a_look_at_them() -> None:
    """Something that kept their stand-ins alive had each of them copied before it was dropped."""
    with warm() as pair:
        for number in range(3):
            pair.backward(number)
            assert ahead(pair) == units(pair)
            kept = [weakref.ref(param.grad) for param in pair.model.parameters()]
            pair.by_hand.step()
            pair.optimizer.step()
            before = _uses(pair)
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            assert _uses(pair) == before
            assert not any(ref() is not None for ref in kept)
        pair.check()


def test_no_thread_is_started_for_a_step_that_is_confirmed(monkeypatch: Any) -> None:
    with warm() as pair:
        started: list[object] = []
        start = threads._thread.start_new_thread

        def counted(*args: Any) -> int:
            if threading.current_thread() is threading.main_thread():
                started.append(args)
            return start(*args)

        monkeypatch.setattr(threads._thread, "start_new_thread", counted)
        pair.backward(1)
        assert ahead(pair) == units(pair)
        pair.step()
        assert not started
        pair.check()


def test_what_backward_does_with_a_block_is_one_use_of_it() -> None:
    """However many gradients arrive in a block, and however many weights of one are looked at."""
    with warm() as pair:
        for number in range(2):
            pair.backward(number)
            pair.step()
        before = _uses(pair)
        pair.backward(2)
        assert ahead(pair) == units(pair)
        pair.step()
        weights = len(pair.tier._runtime.groups)
        assert _uses(pair) - before <= 2 * weights + 5 * units(pair)
        pair.check()
