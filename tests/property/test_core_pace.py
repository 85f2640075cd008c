"""How far ahead, what stays, what is learned: each beside an oracle that shares no code with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.cost import Timetable, refetched, streaming_time
from tiermem.core.loops import Files, Loop
from tiermem.core.pace import Estimates, Recent, Waste
from tiermem.core.plans import share_hbm
from tiermem.core.residents import choose_residents

# -- how far ahead ---------------------------------------------------------------

ticks = st.integers(0, 12).map(float)
fetched = st.one_of(st.none(), st.integers(1, 30).map(float))


def waits(
    compute: list[float],
    fetches: list[float | None],
    slots: int,
    wants: Callable[[int, int], bool],
) -> float:
    """Plays uses against a link that serves in order; returns how long the compute waited.

    Every block is another one. Copies are asked for when a use begins; there are places for
    ``slots`` fetched blocks, and one comes free at the end of a use.
    """
    now = link = waited = 0.0
    arrived: dict[int, float] = {}
    upcoming = [position for position, fetch in enumerate(fetches) if fetch is not None]
    for use, seconds in enumerate(compute):
        while upcoming:
            position = upcoming[0]
            busy = sum(1 for other in arrived if other >= use)
            if position > use and (busy >= slots or not wants(position, use + 1)):
                break
            link = max(link, now) + fetches[upcoming.pop(0)]  # type: ignore[operator]
            arrived[position] = link
        if use in arrived:
            waited += max(0.0, arrived[use] - now)
            now = max(now, arrived[use])
        now += seconds
    return waited


@given(st.lists(st.tuples(ticks, fetched), min_size=1, max_size=14), st.integers(2, 8))
def test_what_is_not_due_yet_is_never_missed(uses, slots) -> None:
    """Begun as late as the rule says, nothing waits longer than begun as early as there is room."""
    compute = [seconds for seconds, _ in uses]
    fetches = [fetch for _, fetch in uses]
    table = Timetable(compute, [None if f is None else ("up", f) for f in fetches])
    early = waits(compute, fetches, slots, lambda position, cursor: True)
    late = waits(compute, fetches, slots, table.due)
    assert late <= early


@given(st.lists(st.tuples(ticks, fetched), min_size=2, max_size=14))
def test_what_is_due_is_due(uses) -> None:
    """Where the rule waits for nothing, leaving what it asks for to the next use does wait."""
    compute = [seconds for seconds, _ in uses]
    fetches = [fetch for _, fetch in uses]
    table = Timetable(compute, [None if f is None else ("up", f) for f in fetches])
    if waits(compute, fetches, 99, table.due):
        return
    for use in range(len(uses) - 1):
        due = [p for p in range(use + 1, len(uses)) if fetches[p] and table.due(p, use + 1)]
        if not due or waits(compute, fetches, 99, lambda p, cursor, due=due: p < due[0]):
            continue
        rest = [None if p < due[0] else f for p, f in enumerate(fetches)]
        too_late = waits(compute[use + 1 :], rest[use + 1 :], 99, lambda p, cursor: True)
        assert too_late > 0


@given(st.integers(1, 60), st.integers(1, 40))
def test_equal_blocks_are_fetched_the_known_depth_ahead(transfer, compute) -> None:
    """With one block missing of many alike, the rule is ``ceil(transfer / compute)``."""
    uses = 70
    fetches: list[tuple[str, float] | None] = [None] * uses
    fetches[-1] = ("up", float(transfer))
    table = Timetable([float(compute)] * uses, fetches)
    first = next(cursor for cursor in range(uses) if table.due(uses - 1, cursor))
    assert uses - first == min(uses, math.ceil(transfer / compute))


def test_links_do_not_wait_for_each_other() -> None:
    table = Timetable([10.0] * 4, [None, None, ("nvme", 25.0), ("up", 5.0)])
    assert table.due(2, 0) and not table.due(3, 2) and table.due(3, 3)


def test_the_way_to_what_is_due_is_due() -> None:
    """The walk goes place by place, so it must not stop before a slow fetch for a later use."""
    table = Timetable([10.0] * 8, [None] * 4 + [("up", 5.0), None, ("nvme", 65.0), ("up", 5.0)])
    assert [table.due(position, 1) for position in range(8)] == [True] * 7 + [False]


def test_margin_and_latency_begin_earlier() -> None:
    plain = Timetable([1.0] * 40, [None] * 39 + [("up", 8.0)])
    careful = Timetable([1.0] * 40, [None] * 39 + [("up", 8.0)], margin=1.5, latency=2.0)
    assert next(c for c in range(40) if plain.due(39, c)) == 32
    assert next(c for c in range(40) if careful.due(39, c)) == 26


def test_what_is_not_known_is_not_due() -> None:
    table = Timetable([1.0, 1.0, None, 1.0], [("up", 1.0)] * 4)
    assert [table.knows(position) for position in range(4)] == [True, True, False, False]
    assert table.due(1, 1) and not table.due(2, 1) and not table.due(3, 3)
    assert not Timetable((), ()).due(0, 0)


# -- what stays ------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(-5, 250))
def test_no_choice_moves_fewer_bytes(sizes, room) -> None:
    """A round moves what does not stay: no other set of blocks that fits leaves less."""
    by_id = dict(enumerate(sizes))
    kept = choose_residents(range(len(sizes)), by_id, room)
    moved = sum(size for block, size in by_id.items() if block not in kept)
    least = min(
        sum(sizes) - sum(sizes[block] for block in stay)
        for count in range(len(sizes) + 1)
        for stay in combinations(range(len(sizes)), count)
        if sum(sizes[block] for block in stay) <= max(room, 0)
    )
    assert moved == least


@given(st.integers(1, 60), st.integers(0, 60))
def test_equal_blocks_that_stay_are_spread_evenly(blocks, stay) -> None:
    kept = sorted(choose_residents(range(blocks), dict.fromkeys(range(blocks), 7), 7 * stay))
    assert len(kept) == min(blocks, stay)
    if kept:
        gaps = [after - before for before, after in zip([-1, *kept], kept, strict=False)]
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("blocks", [300, 5000])
def test_many_sizes_leave_little_over(blocks) -> None:
    sizes = {block: 4096 * (1000 + block * 7919 % blocks) for block in range(blocks)}
    room = sum(sizes.values()) // 3
    kept = choose_residents(range(blocks), sizes, room)
    assert 0 <= room - sum(sizes[block] for block in kept) < min(sizes.values())


def test_coarse_steps_still_fit() -> None:
    """A room of more steps than are told apart: rounded up, so that what is kept does fit."""
    sizes = {block: 1_000_003 + 2 * block for block in range(200)}
    room = 77 * 1_000_003
    kept = choose_residents(range(200), sizes, room)
    assert room - 1_100_000 < sum(sizes[block] for block in kept) <= room


blocks_used = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(blocks_used, st.lists(st.integers(1, 5), min_size=5, max_size=5), st.integers(1, 20))
def test_no_fetch_is_overlooked(order, sizes, room) -> None:
    """What least recent use would have to fetch is expected; more may be."""
    by_id = dict(enumerate(sizes))
    expected = refetched(order, by_id, (), room, ())
    inside: list[int] = []
    for block, foreseen in zip(order, expected, strict=True):
        if block not in inside:
            assert foreseen
        else:
            inside.remove(block)
        inside.append(block)
        while len(inside) > 1 and sum(by_id[b] for b in inside) > room:
            del inside[0]


def test_residents_come_once() -> None:
    order = [0, 1, 0, 1, 2]
    assert refetched(order, {0: 1, 1: 1}, {0}, 0, {1}) == [True, False, False, True, False]


@given(st.lists(st.tuples(ticks, st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 12))
def test_the_model_of_the_link_agrees_with_a_step_by_step_one(uses, slots) -> None:
    compute = [seconds for seconds, _ in uses]
    transfer = [float(fetch) for _, fetch in uses]
    found = streaming_time(compute, transfer, [1] * len(uses), slots)
    # use i ends at e[i]; its fetch begins when the one before is over and its slot is free
    ends: list[float] = []
    link = 0.0
    for i, (seconds, fetch) in enumerate(zip(compute, transfer, strict=True)):
        link = max(link, ends[i - slots] if i >= slots else 0.0) + fetch
        ends.append(max(link, ends[-1] if ends else 0.0) + seconds)
    assert found == ends[-1]


_STAGING = 20
"""Bytes of staging: two blocks."""


def looped(
    compute: list[float], transfer: float, room: int = 80, files: Files | None = None
) -> Loop:
    """Returns three rounds of sixteen blocks of ten bytes."""
    sizes = dict.fromkeys(range(16), 10)
    order = list(range(16)) * 3
    return Loop(order, sizes, room, compute, dict.fromkeys(range(16), transfer), 0.0, files)


def test_compute_bound_loops_stream_through_half_the_room() -> None:
    """No time is lost by it, and what the model does not know finds room."""
    plan = share_hbm(looped([5.0] * 48, 1.0))
    assert plan.reserve == 40 and len(plan.residents) == 4 and plan.in_dram is None


def test_uneven_compute_is_worth_more_slots() -> None:
    """With two slots the link stands still during each long use, and is waited for after it."""
    even = share_hbm(looped([2.0] * 48, 4.0))
    uneven = share_hbm(looped([14.0, 0.0, 0.0, 0.0] * 12, 4.0))
    assert even.reserve == 20 and len(even.residents) == 6
    assert uneven.reserve > 20 and len(uneven.residents) < 6


def test_a_disk_that_is_waited_for_reads_straight_and_dram_keeps_all_it_can() -> None:
    files = Files(dict.fromkeys(range(16), 40.0), 35, _STAGING)
    plan = share_hbm(looped([2.0] * 48, 1.0, files=files))
    assert plan.in_dram is not None and len(plan.in_dram) == 3
    assert not plan.in_dram & plan.residents


def test_only_a_loop_that_waits_for_its_disk_begins_before_there_is_room() -> None:
    files = Files(dict.fromkeys(range(16), 0.02), 100, _STAGING)
    waits = looped([0.002] * 48, 0.001, files=files, room=30)
    plan = share_hbm(waits)
    assert plan.parks
    assert waits.seconds(plan) < 0.95 * waits.seconds(replace(plan, parks=False))
    assert not share_hbm(looped([0.2] * 48, 0.001, files=files, room=30)).parks
    there_and_back = [*range(16), *range(15, -1, -1)] * 3
    turning = replace(waits, order=there_and_back, compute=[0.002] * 96)
    assert turning.length == 32 and not share_hbm(turning).parks


def test_what_dram_can_hold_is_not_read_again() -> None:
    files = Files(dict.fromkeys(range(16), 40.0), 100, _STAGING)
    plan = share_hbm(looped([2.0] * 48, 1.0, files=files))
    assert plan.residents | (plan.in_dram or set()) == set(range(16))


def test_a_plan_in_force_stays_until_another_is_much_better() -> None:
    """Times differ from day to day; each change of plan costs a round of reads."""

    def times(compute: float, disk: float) -> Loop:
        files = Files(dict.fromkeys(range(16), disk), 35, _STAGING)
        return looped([compute] * 48, 1.0, files=files)

    waited = share_hbm(times(2.0, 40.0))
    assert share_hbm(times(2.0, 38.0), waited) is waited
    changed = share_hbm(times(40.0, 6.0), waited)
    loop = times(40.0, 6.0)
    assert loop.seconds(changed) * 1.05 < loop.seconds(waited) or changed is waited
    much = times(12.0, 6.0)
    assert much.seconds(share_hbm(much, waited)) <= 1.05 * much.seconds(share_hbm(much))


def test_what_fits_stays() -> None:
    loop = Loop([0, 1, 0, 1], {0: 5, 1: 5}, 10, [1.0] * 4, {0: 1.0, 1: 1.0}, 0.0)
    plan = share_hbm(loop)
    assert plan.residents == {0, 1} and plan.reserve == 0


# -- what is learned -------------------------------------------------------------


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=12))
def test_the_estimate_is_the_lower_median_of_the_last_five(samples) -> None:
    recent = Recent()
    for sample in samples:
        recent.add(sample)
    last = sorted(samples[-5:])
    assert recent.value in last and len(recent) == len(last)
    assert sum(s < recent.value for s in last) <= len(last) / 2
    assert sum(s > recent.value for s in last) <= len(last) / 2
    assert recent.most == max(last)


def run(estimates: Estimates, passes: int, seconds: float, key: str = "f") -> int:
    """Plays passes of four blocks; returns how many were measured."""
    measured = 0
    for _ in range(passes):
        if estimates.wants(key):
            measured += 1
            estimates.observe(key, dict.fromkeys(range(4), seconds), {}, ())
    return measured


def test_a_steady_loop_is_measured_ever_less() -> None:
    estimates = Estimates()
    assert run(estimates, 2, 1.0) == 2
    assert run(estimates, 160, 1.0) == 10
    version = estimates.version
    run(estimates, 64, 1.1)
    assert estimates.version == version, "a tenth is no reason for another plan"


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_the_depth_follows_when_times_change(factor) -> None:
    estimates = Estimates()

    def depth() -> int:
        compute = [estimates.compute("f", 0)] * 100
        fetches: list[tuple[str, float] | None] = [None] * 99
        fetches.append(("up", 6.0))
        table = Timetable(compute, fetches)
        return 100 - next(cursor for cursor in range(100) if table.due(99, cursor))

    run(estimates, 100, 1.0)
    assert depth() == 6
    version = estimates.version
    run(estimates, 16 + 4, factor)
    assert depth() == math.ceil(6.0 / factor)
    assert estimates.version > version
    run(estimates, 16, factor)
    assert run(estimates, 160, factor) == 10, "and is measured ever less again"


def test_one_slow_pass_changes_nothing() -> None:
    estimates = Estimates()
    run(estimates, 100, 1.0)
    version = estimates.version
    while not run(estimates, 1, 50.0):
        pass
    run(estimates, 40, 1.0)
    assert estimates.compute("f", 0) == 1.0 and estimates.version == version


def test_nothing_is_known_before_two_samples() -> None:
    estimates = Estimates()
    run(estimates, 1, 9.0)
    assert estimates.compute("f", 0) is None and estimates.samples("f") == 1
    run(estimates, 1, 1.0)
    assert estimates.compute("f", 0) == 1.0, "the cold one does not count"
    assert estimates.compute("f", 77) == 1.0, "another block is taken for a typical one"
    assert estimates.compute("g", 0) is None
    assert [row[:3] for row in estimates.rows()] == [("f", block, 1.0) for block in range(4)]


def test_links_begin_with_what_the_profile_says() -> None:
    estimates = Estimates(lambda link, nbytes: 100.0 if link == "dram->hbm" else None)
    assert estimates.transfer("dram->hbm", 1, 500) == 5.0
    assert estimates.best_rate("dram->hbm") == 100.0 and estimates.best_rate("nvme->hbm") is None
    assert estimates.transfer("nvme->hbm", 1, 1 << 30) > 0
    estimates.wants("f")
    estimates.observe("f", {1: 1.0}, {"dram->hbm": (500, 2.0)}, [("dram->hbm", 1, 2.5)])
    assert estimates.transfer("dram->hbm", 1, 500) == 2.5
    assert estimates.transfer("dram->hbm", 2, 500) == 2.0
    estimates.wants("f")
    estimates.observe("f", {1: 1.0}, {"dram->hbm": (500, 1.0)}, ())
    assert estimates.best_rate("dram->hbm") == 500.0


def test_a_link_that_slows_down_is_a_reason_to_plan_anew() -> None:
    estimates = Estimates()
    run(estimates, 20, 1.0)
    estimates.wants("f")
    estimates.observe("f", {}, {"nvme->hbm": (100, _STAGING)}, ())
    version = estimates.version
    for _ in range(5):
        estimates.observe("f", {}, {"nvme->hbm": (100, 3.0)}, ())
    assert estimates.version > version
    assert [estimates.wants("f") for _ in range(5)] == [True] * 4 + [False]


def test_times_that_change_all_the_time_are_measured_now_and_then() -> None:
    """Where others use the machine: each pair of passes takes half or twice what the last did."""
    estimates = Estimates()
    measured = 0
    for number in range(320):
        if estimates.wants("f"):
            measured += 1
            estimates.observe("f", dict.fromkeys(range(4), 1.0), {}, ())
        estimates.took("f", 1.0 if number % 8 < 4 else 2.0)
    assert measured <= 2 + 320 // 16 + 4 * (320 // 64 + 1)


def test_a_pass_that_uses_a_block_twice_computes_for_both_uses() -> None:
    estimates = Estimates()
    for seconds in (9.0, 6.0, 7.0):
        estimates.wants("f")
        estimates.observe("f", {1: 1.0, 2: 2.0}, {}, (), seconds)
    assert estimates.computes("f") == 7.0
    assert estimates.wants("g")
    estimates.observe("g", {1: 1.0, 2: 2.0}, {}, ())
    assert estimates.computes("g") is None
    estimates.wants("g")
    estimates.observe("g", {1: 1.0, 2: 2.0}, {}, ())
    assert estimates.computes("g") == 3.0


def test_memory_stays_bounded() -> None:
    estimates = Estimates()
    for number in range(300):
        run(estimates, 1, 1.0, key=f"pass {number}")
    assert len({row[0] for row in estimates.rows()}) == 256
    for number in range(2000):
        estimates.wants("f")
        estimates.observe("f", {number: 1.0}, {}, [("up", number, 1.0)])
    assert sum(row[0] == "f" for row in estimates.rows()) < 100
    waste = Waste()
    for number in range(70_000):
        waste.fetched(number, 0, "f")
        waste.left(number)
    assert len(waste.outcomes) <= 1 << 16


# -- what fetching ahead paid ----------------------------------------------------


def test_a_fetch_that_is_used_is_none_wasted() -> None:
    waste = Waste()
    for number in range(20):
        waste.fetched(1, number, "f")
        waste.used(1)
        assert not waste.left(1)
        assert waste.end(number, "f", [1]) == 0
    assert not waste.stopped and not waste.pending and not waste.outcomes


@given(st.lists(st.booleans(), max_size=60))
def test_fetching_stops_and_starts_as_it_paid(chosen) -> None:
    """Beside a model that keeps the whole history and reads the rule off it."""
    waste = Waste()
    outcomes: list[bool] = []
    stopped, streak = False, 0
    for number, uses in enumerate(chosen):
        assert waste.stops("f", 1) == stopped
        if not stopped:
            waste.fetched(1, number, "f")
        if uses:
            waste.used(1)
        wasted = waste.end(number, "f", [1] if uses else [])
        assert wasted == (not stopped and not uses)
        if stopped:
            streak = streak + 1 if uses else 0
            if streak == 2:
                stopped, outcomes = False, []
            continue
        if outcomes or not uses:
            outcomes = [*outcomes, not uses][-8:]
        if not any(outcomes):
            outcomes = []
        if not uses and len(outcomes) > 1 and sum(outcomes) * 2 > len(outcomes):
            stopped, streak = True, 0


def test_a_fetch_for_a_later_pass_has_time() -> None:
    waste = Waste()
    waste.fetched(1, 2, "b")
    assert waste.end(1, "f", []) == 0
    assert waste.end(2, "b", []) == 1
    waste.fetched(2, 3, "b")
    assert waste.left(2) and not waste.left(2)
    assert waste.end(3, "b", []) == 0


def test_passes_are_told_apart_and_blocks_forgotten() -> None:
    waste = Waste()
    for number in range(2):
        waste.fetched(1, number, "f")
        waste.end(number, "f", [])
    assert waste.stops("f", 1) and not waste.stops("g", 1) and not waste.stops("f", 2)
    waste.forget([1])
    assert not waste.stopped


def test_a_pass_of_another_length_is_measured_again_at_once() -> None:
    """By the host's clock alone, long before it is its turn."""
    found = Estimates()
    for _ in range(8):
        if found.wants("loop"):
            found.observe("loop", {1: 1.0}, {}, ())
        found.took("loop", 1.0)
    assert not found.wants("loop")
    found.took("loop", 1.1)  # as good as before
    assert not found.wants("loop")
    found.took("loop", 8.0)
    assert not found.wants("loop")  # that may be chance
    found.took("loop", 8.0)
    asked = 0
    while found.wants("loop"):
        found.observe("loop", {1: 8.0}, {}, ())
        asked += 1
    assert 3 <= asked <= 12 and found.compute("loop", 1) == 8.0


def test_what_is_never_the_same_twice_is_not_measured_for_ever() -> None:
    """A host that limits, and has other things to do: every measured pass is a surprise."""
    found, asked = Estimates(), 0
    for _ in range(400):
        if found.wants("loop"):
            found.observe("loop", {1: (1.0, 2.0, 4.0)[asked % 3]}, {}, ())
            asked += 1
    assert asked <= 3 + 5 * 400 // 20


def test_a_length_of_nothing_says_nothing() -> None:
    """A clock that stands still, or a pass that was never begun."""
    found = Estimates()
    found.took("loop", 1.0)
    for _ in range(4):
        if found.wants("loop"):
            found.observe("loop", {1: 1.0}, {}, ())
        found.took("loop", 0.0)
    assert not found.wants("loop")
