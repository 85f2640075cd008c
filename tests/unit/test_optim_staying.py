"""Training where weights and state stay in HBM, written and not at home, beside the circle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_nn import Tiers
from support_optim import Layer, Net, Twins, loss_of

from tiermem.core.block import Role
from tiermem.core.residency import State
from tiermem.runtime.lookahead.plan_maker import Staying

ROOMY = Tiers("dram", extra_hbm=5 << 16)


class Even(Net):
    """Layers of one size, so that none of them needs most of HBM."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.layers = torch.nn.ModuleList(Layer(24, 48) for _ in range(16)).to(torch.bfloat16)


@contextmanager
def staying(tiers: Tiers = ROOMY, **options: Any) -> Iterator[Twins]:
    """Opens twins whose loops go in circles as on a GPU."""
    with Twins(Even, tiers, **options) as pair:
        manager = pair.tier._manager
        manager.prefetcher.fetcher.beside = True
        # a link that is slow beside such small blocks: they set the size of the circle
        link_of(pair, 1.0)
        yield pair


def train(pair: Twins, steps: range) -> None:
    for step in steps:
        pair.backward(step)
        pair.step()


def link_of(pair: Twins, rate: float) -> None:
    """Makes the link as fast as that, in bytes a second."""
    estimates = pair.tier._manager.parts.pass_timer.estimates
    estimates.rate = estimates.best_rate = lambda *_: rate  # type: ignore[method-assign]
    estimates.version += 1  # as when another speed is measured


def dirty(pair: Twins) -> set[int]:
    """Returns the blocks that stay and whose home is behind."""
    manager = pair.tier._manager
    records = (manager.parts.table[block] for block in manager.parts.evictor.residents)
    return {r.block.id for r in records if r.in_hbm is State.DIRTY}


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_weights_and_state_that_stay_are_those_of_the_resident_run(overlap: str) -> None:
    with staying(overlap=overlap) as pair:
        train(pair, range(6))
        manager = pair.tier._manager
        roles = {manager.parts.table[block].block.role for block in manager.parts.evictor.residents}
        assert Role.PARAM in roles and roles & {Role.OPTIMIZER, Role.MASTER}
        assert pair.tier.stats().kept_in_hbm > 0
        assert dirty(pair)
        pair.check()  # reads what is at home nowhere else
        train(pair, range(6, 9))
        pair.check()


def test_weights_that_stay_and_that_the_host_steps() -> None:
    """What the host writes at home is newer than the copy that was to stay."""
    settings = {"lr": 0.01, "fused": True}  # as the host steps
    with staying(overlap="backward", where="host", settings=settings) as pair:
        manager = pair.tier._manager
        train(pair, range(3))
        weights = {r.block.id for r in manager.parts.table if r.block.role is Role.PARAM}
        manager.prefetcher._maker._staying = Staying(kept=frozenset(weights), rate=1e30)
        train(pair, range(3, 8))
        assert weights <= manager.parts.evictor.residents
        pair.check()


def test_a_link_that_turns_out_to_be_fast_gets_the_room() -> None:
    """Six of the blocks, or a tenth of a second of the link, is what the circle needs."""
    with staying(overlap="forward") as pair:
        train(pair, range(4))
        assert pair.tier.stats().kept_in_hbm > 0
        link_of(pair, 1e12)
        train(pair, range(4, 8))
        assert pair.tier.stats().kept_in_hbm == 0
        pair.check()


def test_micro_batches_and_passes_without_gradients_in_between() -> None:
    with staying(overlap="backward") as pair:
        pair.optimizer.accumulate(2)
        for step in range(5):
            for micro in range(2):
                pair.backward(2 * step + micro, scale=0.5)
            pair.step()
            with torch.no_grad():
                assert torch.equal(loss_of(pair.plain, step), loss_of(pair.model, step))
        assert pair.tier.stats().kept_in_hbm > 0
        pair.check()


def test_weights_that_stay_go_home_in_forward_where_steps_are_made_ahead() -> None:
    """Backward finds what they were at home, and compute waits for no copy of them."""
    with staying(overlap="auto") as pair:
        train(pair, range(10))
        manager = pair.tier._manager
        assert manager.prefetcher._maker.copies_bind  # the link is slow beyond measure
        stay = manager.parts.evictor.residents
        weights = {b for b in stay if manager.parts.table[b].block.role is Role.PARAM}
        assert weights and weights & dirty(pair)
        assert weights == stay  # no step is left to step() for its state
        made = pair.optimizer.stepped_in_backward
        transfers, copied = manager.parts.transfers, list[int]()
        copy_home = transfers.copy_home
        transfers.copy_home = lambda r: (copied.append(r.block.id), copy_home(r))[1]  # type: ignore[assignment, misc]
        for step in range(10, 14):
            loss = loss_of(pair.model, step)
            behind = weights & dirty(pair)  # what forward had begun with, and autograd keeps
            assert len(behind) <= 1 < len(weights)
            loss.backward()
            loss_of(pair.plain, step).backward()
            assert pair.optimizer._timing.ahead.provisional.units
            pair.step()
        assert pair.optimizer.stepped_in_backward == made + 4 * len(pair.optimizer._units)
        assert len(weights.intersection(copied)) <= 1
        assert pair.tier.stats().kept_in_hbm > 0
        pair.check()


def test_weights_that_stay_go_home_though_forward_does_not_get_far() -> None:
    with staying(overlap="auto") as pair:
        train(pair, range(8))
        unwritten = pair.tier._runtime.unwritten
        assert unwritten and unwritten.staying
        unwritten.forget()  # as a backward does that begins before forward has written them
        train(pair, range(8, 11))
        pair.check()
        assert not pair.optimizer._timing.ahead.provisional.drops


def test_where_copies_bind_no_state_stays_so_that_all_steps_are_made_ahead() -> None:
    with staying(Tiers("dram", extra_hbm=7 << 16, dram=8 << 20), overlap="auto") as pair:
        train(pair, range(10))
        manager = pair.tier._manager
        roles = {manager.parts.table[b].block.role for b in manager.parts.evictor.residents}
        assert manager.prefetcher._maker.copies_bind and roles == {Role.PARAM}
        made = pair.optimizer.stepped_in_backward
        pair.backward(10)
        pair.step()
        assert pair.optimizer.stepped_in_backward == made + len(pair.optimizer._units)
        pair.check()
