"""HBM is filled as a model is wrapped, so that its first pass is as fast as later ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_first import BUS, SHAPES, Host, Played, Shape, played
from support_virtual import PAGE
from torch import nn

import tiermem
from tiermem.core.block import Tier
from tiermem.core.residency import State
from tiermem.core.schedule import Planner
from tiermem.nn.wrap.wrapped import WrappedModel
from tiermem.runtime.lookahead import arranged, plan_maker
from tiermem.runtime.lookahead.plan_maker import PlanMaker
from tiermem.transfer.stamps import HostClock

_PAGES = Shape((6,) * 24)


@pytest.fixture
def filled() -> Iterator[Played]:
    with played(_PAGES, 48) as made:
        fill(made)
        yield made


def fill(made: Played, order: Sequence[int] | None = None, held: Sequence[int] = ()) -> None:
    """Fills HBM with what a pass in the order of the modules begins with, and waits for it."""
    indices = range(len(made.blocks)) if order is None else order
    made.manager.fill_ahead([made.blocks[n].id for n in indices], [made.blocks[n].id for n in held])
    made.world.advance(made.world.now + 1.0)


def inside(made: Played) -> set[int]:
    """Returns which blocks are in HBM, by number."""
    table = made.manager.parts.table
    return {n for n, b in enumerate(made.blocks) if table[b.id].extent is not None}


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("tokens", [1, 2048])
def test_the_first_pass_of_all_is_nearly_as_fast_as_later_ones(name: str, tokens: int) -> None:
    shape = SHAPES[name]
    with played(shape, sum(shape.pages) // 4) as made:
        fill(made)
        calls = [made.call(tokens) for _ in range(5)]
        assert calls[0].seconds <= calls[-1].seconds / 0.95
        assert calls[0].moved <= 1.05 * calls[-1].moved, "what fits is there already"


_LAYERS = (14, 21, 21, 21) * 20
_HEADS = {"tied": Shape((282, *_LAYERS), (0, *range(1, 81), 0)), "last": Shape((*_LAYERS, 282))}


@pytest.mark.parametrize("head", _HEADS)
def test_the_largest_of_what_stays_lies_farthest_from_the_slots(head: str) -> None:
    """With more slots the lowest ones give way: an embedding next to them had to come up anew."""
    shape = _HEADS[head]
    with played(shape, sum(shape.pages) // 4) as made:
        fill(made)
        records = list(made.manager.parts.table)
        largest = max(records, key=lambda record: record.block.nbytes)
        assert largest.extent is not None
        assert largest.extent.end == made.manager.parts.table.hbm.capacity


@pytest.mark.parametrize("head", _HEADS)
def test_no_plan_comes_into_force_for_what_measuring_takes_the_host(head: str) -> None:
    """In passes that are measured the host takes as long as the copies, and less in the others.

    By what is measured compute takes as long, too, and more slots seem to be worth it.
    """
    shape = _HEADS[head]
    measured, usual = (Host(use=seconds / len(shape.order)) for seconds in (58e-3, 40e-3))
    with played(shape, sum(shape.pages) // 4, measured) as made:
        fill(made)
        calls = [made.call(1) for _ in range(2)]
        made.host = usual
        calls += [made.call(1) for _ in range(8)]
        reserve = made.manager.prefetcher.outlook.plan.reserve
        assert reserve == 42 * PAGE, "two slots of the largest layer"
        assert max(call.moved for call in calls) <= 1.04 * min(call.moved for call in calls)


def test_the_first_pass_neither_plans_nor_lays_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes over what HBM was filled for, which takes the host less time."""
    with played(_PAGES, 48) as made:
        fill(made)
        for name in ("share_hbm", "play", "lay_out"):
            for module in (plan_maker, arranged):
                monkeypatch.setattr(module, name, None, raising=False)
        for _ in range(2):
            assert made.call(1).moved * BUS <= (144 - 48 + 3 * 6) * PAGE
        run = made.manager.replay.run
        assert run is not None and run.arranged


def test_the_first_pass_is_not_measured_and_the_second_is(filled: Played) -> None:
    timer, sampled = filled.manager.parts.pass_timer, []
    for _ in range(6):
        filled.begin("forward", 1)
        sampled.append(timer.sampling)
        for block in filled.blocks:
            filled.manager.acquire(block)
            filled.manager.release(block)
        filled.manager.end_pass()
        filled.world.advance(filled.world.now + 1.0)
    assert sampled == [False, True, False, False, False, False]


def test_it_is_laid_out_from_the_first_use_on(filled: Played) -> None:
    filled.call(1)
    run = filled.manager.replay.run
    assert run is not None and run.arranged
    assert filled.manager.stats().misses == 0


def test_other_tokens_begin_without_a_plan(filled: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """HBM is laid out for the same blocks; the plan for so many tokens is made as the pass ends."""
    for _ in range(4):
        filled.call(1)
    made, make = list[object](), PlanMaker.make
    monkeypatch.setattr(PlanMaker, "make", lambda *a, **k: made.append(a) or make(*a, **k))
    before = filled.manager.prefetcher.outlook
    filled.begin("forward", 8192)
    run = filled.manager.replay.run
    assert run is not None and run.arranged and not made
    assert filled.manager.prefetcher.outlook is before
    for block in filled.blocks:
        filled.manager.acquire(block)
        filled.manager.release(block)
    filled.manager.end_pass()
    assert len(made) == 1
    filled.begin("forward", 8192)
    assert len(made) == 1 and filled.manager.prefetcher.outlook is not before


def test_as_much_comes_as_has_room(filled: Played) -> None:
    table = filled.manager.parts.table
    free = table.hbm.capacity - sum(e.nbytes for e in table.hbm.extents())
    assert free < filled.blocks[0].nbytes
    assert filled.manager.stats().prefetches == len(inside(filled))


def test_all_comes_once_where_all_has_room() -> None:
    with played(_PAGES, 6 * 24) as made:
        fill(made, [*range(24), 0])
        assert inside(made) == set(range(24))
        assert made.manager.stats().prefetches == 24
        assert made.call(1).moved == 0


@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_order_can_be_filled_for(data: st.DataObject) -> None:
    pages = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=16))
    number = st.integers(0, len(pages) - 1)
    order = data.draw(st.lists(number, min_size=2, max_size=40))
    least = 2 * max(pages)
    with played(Shape(tuple(pages)), data.draw(st.integers(least, least + 40))) as made:
        fill(made, order, data.draw(st.lists(number, max_size=3)))
        table = made.manager.parts.table
        extents = sorted((e.offset, e.end) for e in table.hbm.extents())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(extents))
        assert inside(made) <= set(order)
        uses = data.draw(st.sampled_from([order, order[::-1], range(len(pages))]))
        for _ in range(3):
            made.call(1, uses=uses)
        assert all(made.manager.record(block).at_home is State.VALID for block in made.blocks)


def test_passes_begin_without_a_plan(filled: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second one has measured is planned with as the third one ends."""
    filled.call(1)
    filled.call(1)
    made, make = list[object](), PlanMaker.make
    monkeypatch.setattr(PlanMaker, "make", lambda *a, **k: made.append(a) or make(*a, **k))
    filled.begin("forward", 1)
    assert not made
    for block in filled.blocks:
        filled.manager.acquire(block)
        filled.manager.release(block)
    filled.manager.end_pass()
    assert made


def test_what_is_used_twice_comes_once() -> None:
    with played(_PAGES, 48) as made:
        fill(made, [0, *range(1, 24), 0])
        assert made.manager.stats().prefetches == len(inside(made))
        for _ in range(2):
            made.call(1, uses=[0, *range(1, 24), 0])


def test_another_order_than_was_guessed_costs_that_pass_alone(filled: Played) -> None:
    backwards = range(23, -1, -1)
    filled.call(1, uses=backwards)
    for _ in range(2):
        filled.begin("forward", 1)
        run = filled.manager.replay.run
        assert run is not None and run.arranged, "the guess is no reason to decide this one"
        for n in backwards:
            filled.manager.acquire(filled.blocks[n])
            filled.manager.release(filled.blocks[n])
        filled.manager.end_pass()


def test_what_is_held_while_others_are_used_stays() -> None:
    with played(_PAGES, 48) as made:
        fill(made, held=[5])
        residents = made.manager.parts.evictor.regions.residents
        assert made.blocks[5].id in residents


@pytest.mark.parametrize("reason", ["begun", "in use", "undefined", "disk", "depth", "host"])
def test_nothing_comes(reason: str) -> None:
    with played(_PAGES, 48, depth=2 if reason == "depth" else "auto") as made:
        manager, record = made.manager, made.manager.record(made.blocks[3])
        if reason == "begun":
            made.begin("forward", 1)
            for block in made.blocks:  # what was fetched ahead for it
                manager.discard(block)
                manager.record(block).defined, manager.record(block).at_home = True, State.VALID
        elif reason == "in use":
            for block in reversed(made.blocks[17:]):
                manager.acquire(block)
                manager.release(block)
            made.world.advance(made.world.now + 1.0)
        elif reason == "undefined":
            record.defined = False
        elif reason == "disk":
            record.home = Tier.NVME
        elif reason == "host":
            manager.prefetcher.fetcher.beside = False
        before = inside(made)
        fill(made)
        assert inside(made) == before
        record.home = Tier.DRAM


def test_memory_that_is_not_there_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is used; the pass meets with the rest as any other does."""
    with played(_PAGES, 48) as made:
        hbm = made.manager.parts.table.hbm
        take, taken = hbm.take_at, list[int]()

        def some(offset: int, nbytes: int) -> object:
            taken.append(offset)
            return take(offset, nbytes) if len(taken) < 4 else None

        with monkeypatch.context() as patch:
            patch.setattr(hbm, "take_at", some)
            fill(made)
        assert len(inside(made)) == 3 and len(taken) == 4
        made.call(1)
        assert made.call(1).moved * BUS <= 24 * made.blocks[0].nbytes


def test_a_pass_that_was_not_seen_is_expected_to_do_as_one_like_it() -> None:
    planner = Planner()
    planner.begin("prefill", [1, 2, 3], again=True)
    for block in (3, 1, 2):
        planner.touch(block)
    planner.begin("decode", [1, 2, 3], like="prefill", again=True)
    assert list(planner.schedule.order[:3]) == [3, 1, 2]
    planner.begin("other", [1, 2, 3], like="unknown", again=True)
    assert list(planner.schedule.order[:3]) == [1, 2, 3]


def test_what_is_only_guessed_is_no_example() -> None:
    planner = Planner()
    planner.begin("first", [1, 2], again=True)
    planner.reset()
    planner.begin("second", [2, 1], like="first", again=True)
    assert list(planner.schedule.order[:2]) == [2, 1]


# -- models ---------------------------------------------------------------


class Shared(nn.Module):
    """An encoder and a decoder that share an embedding, whose weight is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(4096, 512)
        self.encoder = nn.Sequential(self.shared, nn.Linear(512, 512), nn.Linear(512, 512))
        self.decoder = nn.Sequential(self.shared, nn.Linear(512, 512), nn.Linear(512, 512))
        self.head = nn.Linear(512, 4096, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(ids) + self.decoder(ids))
        return out


def wrapped_in(tier: tiermem.TierManager) -> WrappedModel:
    wrapped: WrappedModel
    (wrapped,) = tier._wrapped.values()
    return wrapped


def each(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


@pytest.mark.parametrize("tokens", [1, 4000])
def test_the_order_of_modules_is_that_of_uses(tokens: int) -> None:
    with tiermem.TierManager(device="cpu", hbm="11MiB") as tier, torch.no_grad():
        model = tier.wrap(Shared(), blocks=each)
        order = wrapped_in(tier).scopes[""].order(tokens)
        model(torch.arange(tokens))
        assert list(order) == list(tier._manager.parts.planner.used)
        whole = wrapped_in(tier).scopes[""].order(0)
        assert len(whole) > len(order) if tokens == 1 else len(whole) == len(order)


def test_embeddings_are_used_whole_where_all_fits() -> None:
    with tiermem.TierManager(device="cpu", hbm="64MiB") as tier, torch.no_grad():
        model, orders = tier.wrap(Shared(), blocks=each), list[Sequence[int]]()
        begin = tier._manager.begin_pass

        def noted(key: object, guess: Sequence[int], **kwargs: Any) -> None:
            orders.append(guess)
            begin(key, guess, **kwargs)

        tier._manager.begin_pass = noted  # type: ignore[method-assign, assignment]
        model(torch.arange(1))
        assert list(orders[0]) == list(tier._manager.parts.planner.used)


def test_a_model_that_is_a_part_of_itself_has_an_order() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = model[0]
    inner.register_module("outer", model)
    with tiermem.TierManager(device="cpu", hbm="1MiB") as tier:
        tier.wrap(model, blocks=["0", "1"])
        assert len(wrapped_in(tier).scopes[""].order()) == 2


class Outer(nn.Module):
    """Holds its own weight while it calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x @ self.weight)
        return out


def test_what_a_call_holds_while_others_run_is_known() -> None:
    model = nn.Sequential(Outer(), nn.Linear(256, 256))
    with tiermem.TierManager(device="cpu", hbm="4MiB") as tier:
        tier.wrap(model, blocks=["0", "0.layer", "1"])
        wrapped = wrapped_in(tier)
        names = {g.block.name for g in wrapped.groups if g.block.id in wrapped.modules.held()}
        assert names == {"Sequential.0"}


def test_a_wrap_that_is_cut_short_while_it_fills_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = [p.detach().clone() for p in model.parameters()]

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with tiermem.TierManager(device="cpu", hbm="1MiB") as tier:
        with monkeypatch.context() as patch:
            patch.setattr(tier._runtime, "fill_ahead", stopped)
            with pytest.raises(KeyboardInterrupt):
                tier.wrap(model)
        assert not tier._wrapped and len(tier._manager.parts.table) == 0
        assert all(map(torch.equal, model.parameters(), before))
        tier.wrap(model)
        model(torch.randn(1, 64))


@pytest.mark.parametrize("fits", [False, True])
def test_what_measuring_takes_is_made_ahead_where_blocks_move(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(HostClock, "prepare", lambda _, stamps: asked.append(stamps))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    hbm = "1MiB" if fits else "64KiB"
    with tiermem.TierManager(device="cpu", hbm=hbm, dram="1MiB") as tier:
        tier.wrap(model, blocks=[str(number) for number in range(6)])
    assert asked == ([] if fits else [4 * 6])
