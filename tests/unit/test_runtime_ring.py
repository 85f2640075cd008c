"""HBM handed out in circles: what has been there longest leaves first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support_runtime import PAGE, Rig, rig

from tiermem.core.block import Block, Extent, Role
from tiermem.runtime.lookahead.lates import Lates
from tiermem.runtime.lookahead.plan_maker import PlanMaker
from tiermem.runtime.services.sweep import BlockSweep


def new_maker(parts: Any) -> PlanMaker:
    return PlanMaker(parts, Lates(), PAGE)


def page_of(made: Rig, number: int) -> int:
    extent = made.manager.parts.table[made.blocks[number].id].extent
    assert extent is not None
    return extent.offset // PAGE


def places(made: Rig) -> list[tuple[Block, Extent]]:
    records = [made.manager.parts.table[block.id] for block in made.blocks]
    return [(r.block, r.extent) for r in records if r.extent is not None]


@contextmanager
def training(hbm: int, count: int, *, beside: bool = True) -> Iterator[Rig]:
    """Opens a manager over blocks that a step writes."""
    with rig(hbm, depth=0) as made:
        made.manager.prefetcher.fetcher.beside = beside
        for _ in range(count):
            made.add(1, "dram", Role.OPTIMIZER)
        yield made


def rounds(made: Rig, order: list[int], count: int) -> list[int]:
    """Goes through a loop; returns where each block was in the last round."""
    found = []
    for _ in range(count):
        made.manager.begin_pass("f")
        found = []
        for number in order:
            made.write(made.blocks[number])
            found.append(page_of(made, number))
    return found


def test_places_are_given_away_in_the_order_of_their_age() -> None:
    with training(4, 9) as made:
        found = rounds(made, [*range(9)], 4)
        assert all((b - a) % 4 == 1 for a, b in itertools.pairwise(found))
        made.check()


def test_every_round_gives_the_same_places() -> None:
    """Nine blocks through four places: without a beginning of its own a round would be shifted."""
    with training(4, 9) as made:
        before = rounds(made, [*range(9)], 4)
        slots = {id(made.manager.parts.slots.slot(b, e)) for b, e in places(made)}
        assert rounds(made, [*range(9)], 1) == before
        assert {id(made.manager.parts.slots.slot(b, e)) for b, e in places(made)} == slots


def test_by_next_use_alone_the_place_just_left_is_taken() -> None:
    with training(4, 9, beside=False) as made:
        found = rounds(made, [*range(9)], 4)
        assert sum(a == b for a, b in itertools.pairwise(found)) >= 4


def test_what_comes_again_soon_stays() -> None:
    """Block 0 is used at every second place; the circle goes around it."""
    with training(4, 8) as made:
        order = [n for number in range(1, 8) for n in (0, number)]
        rounds(made, order, 3)
        made.manager.parts.counters.reset()
        rounds(made, order, 2)
        assert made.manager.stats().misses == 2 * 7


def test_what_is_held_is_passed_by() -> None:
    with training(4, 9) as made:
        rounds(made, [*range(9)], 2)
        made.manager.acquire(made.blocks[3])
        at = page_of(made, 3)
        found = rounds(made, [0, 1, 2, 4, 5, 6, 7, 8], 2)
        assert at not in found
        made.manager.release(made.blocks[3])
        made.check()


@contextmanager
def going_round(role: Role) -> Iterator[Rig]:
    """A loop of nine blocks of one role that has gone round three times, in HBM for four."""
    with rig(4) as made:
        for _ in range(9):
            made.add(1, "dram", role)
        for _ in range(3):
            made.manager.begin_pass("f")
            for block in made.blocks:
                made.use(block)
        yield made


@pytest.mark.parametrize(("role", "circles"), [(Role.PARAM, False), (Role.OPTIMIZER, True)])
def test_only_loops_that_write_beside_the_compute_go_in_circles(role: Role, circles: bool) -> None:
    with going_round(role) as made:
        schedule, maker = made.manager.parts.planner.schedule, new_maker(made.manager.parts)
        for beside in (False, True):
            outlook = maker.make(schedule, maker.made_of(set()), set(), beside=beside)
            assert (outlook.turn > 0) == (circles and beside)


@pytest.mark.parametrize(("role", "anew"), [(Role.PARAM, True), (Role.OPTIMIZER, False)])
def test_times_that_change_make_no_plan_anew_for_a_ring(role: Role, anew: bool) -> None:
    with going_round(role) as made:
        parts = made.manager.parts
        maker = new_maker(parts)
        was = maker.made_of(set())
        plan = maker.make(parts.planner.schedule, was, set(), beside=True)
        assert not maker.is_stale(plan, was)
        parts.pass_timer.estimates.version += 1
        assert maker.is_stale(plan, maker.made_of(set())) == anew
        made.add(1, "dram", role)
        assert maker.is_stale(plan, maker.made_of(set()))


def test_copies_are_not_fetched_past_a_block_that_the_host_works_on() -> None:
    """Its own copy, once it is back, would wait for theirs."""
    with rig(8, [(1, "dram")] * 6, depth=4) as made:
        manager = made.manager
        manager.prefetcher.fetcher.beside = True
        for _ in range(3):
            manager.begin_pass("f")
            for block in made.blocks:
                made.use(block)
        for block in made.blocks:
            manager.host_loans.lend([block])
            manager.host_loans.give_back([block])
        manager.host_loans.lend([made.blocks[3]])
        manager.begin_pass("f")
        made.use(made.blocks[0])
        there = [n for n, b in enumerate(made.blocks) if manager.parts.table[b.id].usable]
        assert there == [0, 1, 2]
        manager.host_loans.give_back([made.blocks[3]])
        for block in made.blocks[1:]:
            made.use(block)


def steps(made: Rig, count: int) -> None:
    """Goes through a loop that reads weights, then writes them and their state, backwards."""
    half = len(made.blocks) // 2
    weights, state = made.blocks[:half], made.blocks[half:]
    for _ in range(count):
        made.manager.begin_pass("forward")
        for block in weights:
            made.use(block)
        made.manager.begin_pass("backward")
        for block, own in zip(reversed(weights), reversed(state), strict=True):
            made.use(block)
            made.write(own)
            made.write(block)
            BlockSweep(made.manager).write([block, own])


@contextmanager
def stepping(hbm: int, count: int) -> Iterator[Rig]:
    """Opens a manager over weights and their state, as on a GPU."""
    with rig(hbm) as made:
        manager = made.manager
        manager.prefetcher.fetcher.beside = True
        manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
        manager.parts.pass_timer.estimates.rate = lambda *_: 1.0  # type: ignore[method-assign]
        for role in (Role.PARAM, Role.OPTIMIZER):
            for _ in range(count):
                made.add(1, "dram", role)
        yield made


def test_what_there_is_room_for_is_neither_fetched_nor_written() -> None:
    """Ten weights and ten of state, six places for the circle: eleven of twenty stay."""
    with stepping(6 + 11, 10) as made:
        steps(made, 5)
        evictor, table = made.manager.parts.evictor, made.manager.parts.table
        weights = {block.id for block in made.blocks[:10]}
        assert weights <= evictor.residents and len(evictor.residents) == 11
        assert evictor.regions.border == 6 * PAGE and made.manager.stats().kept_in_hbm == 11 * PAGE
        assert all(evictor.regions.stays(table[block]) for block in evictor.residents)
        before = {block: table[block].extent for block in evictor.residents}
        moved: list[int] = []
        transfers = made.manager.parts.transfers
        fill, drain = transfers.fill, transfers.drain
        transfers.fill = lambda r, *a: (moved.append(r.block.id), fill(r, *a))[1]  # type: ignore[method-assign]
        transfers.drain = lambda r: (moved.append(r.block.id), drain(r))[1]  # type: ignore[method-assign]
        steps(made, 3)
        assert moved and not set(moved) & evictor.residents
        assert {block: table[block].extent for block in evictor.residents} == before
        made.check()


def test_a_pass_begins_with_kernels_not_with_fetches() -> None:
    """What its first four uses want comes at once; what comes later is fetched by later uses."""
    with stepping(6, 32) as made:
        steps(made, 3)
        planner, transfers = made.manager.parts.planner, made.manager.parts.transfers
        ahead: list[int] = []
        fill = transfers.fill

        def filling(record: Any, *args: Any) -> None:
            if record.block.id != planner.last:
                ahead.append(planner.cursor)
            fill(record, *args)

        transfers.fill = filling  # type: ignore[method-assign]
        steps(made, 2)
        assert len(planner.schedule) >= 64
        assert ahead and min(ahead) > 4
        made.check()


def test_a_short_loop_is_fetched_ahead_from_its_first_use_on() -> None:
    with stepping(6, 10) as made:
        steps(made, 3)
        made.manager.parts.counters.reset()
        steps(made, 2)
        assert made.manager.stats().prefetches > 0
        made.check()


def test_the_circle_keeps_out_of_what_stays() -> None:
    with stepping(6 + 11, 10) as made:
        steps(made, 5)
        evictor, table = made.manager.parts.evictor, made.manager.parts.table
        for block in made.blocks:
            extent = table[block.id].extent
            if extent is not None and block.id not in evictor.residents:
                assert extent.end <= evictor.regions.border
        made.check()


def test_without_room_beside_the_circle_everything_goes_round() -> None:
    with stepping(6, 10) as made:
        steps(made, 4)
        assert made.manager.parts.evictor.residents == frozenset()
        assert made.manager.stats().kept_in_hbm == 0
        made.check()


def test_a_pass_that_foresees_less_state_changes_nothing() -> None:
    with stepping(6 + 11, 10) as made:
        steps(made, 4)
        residents = made.manager.parts.evictor.residents
        for _ in range(3):  # micro-batches without a step
            made.manager.begin_pass("forward")
            for block in made.blocks[:10]:
                made.use(block)
            made.manager.begin_pass("backward, no step")
            for block in reversed(made.blocks[:10]):
                made.write(block)
        steps(made, 2)
        assert made.manager.parts.evictor.residents == residents
        made.check()


def test_less_stays_once_there_is_less_room() -> None:
    with stepping(6 + 11, 10) as made:
        steps(made, 4)
        made.add(4, "hbm")
        fixed = made.blocks.pop()
        steps(made, 4)
        assert len(made.manager.parts.evictor.residents) == 11 - 4
        made.blocks.append(fixed)
        made.check()


def test_what_stays_goes_once_it_is_removed() -> None:
    with stepping(6 + 11, 10) as made:
        steps(made, 4)
        made.manager.remove_blocks(made.blocks[10:])
        del made.blocks[10:]
        for _ in range(3):
            made.manager.begin_pass("forward")
            for block in made.blocks:
                made.write(block)
        alive = {block.id for block in made.blocks}
        assert made.manager.parts.evictor.residents <= alive
        made.check()


def test_what_is_used_several_times_takes_its_room_once() -> None:
    """Half of HBM is fetched ahead: 1, 2 and 3 beside 0, though 0 and 1 are used in turns."""
    with rig(8, depth="auto") as made:
        made.manager.prefetcher.fetcher.beside = True
        for _ in range(20):
            made.add(1, "dram", Role.OPTIMIZER)
        order = [*[0, 1] * 6, *range(2, 20)]
        rounds(made, order, 3)
        made.manager.begin_pass("f")
        made.write(made.blocks[0])
        made.write(made.blocks[1])
        table = made.manager.parts.table
        there = {n for n in range(2, 16) if table[made.blocks[n].id].extent is not None}
        assert there == {2, 3}
        made.check()
