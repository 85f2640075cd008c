"""The planner: next uses, loops it has seen, loops that change, and the optimum of evicting."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.cost import eviction_cost
from tiermem.core.residents import choose_residents
from tiermem.core.schedule import NEVER, Planner, Schedule, seldom_of

orders = st.lists(st.integers(0, 7), max_size=40)


@given(orders, st.integers(0, 9), st.integers(0, 45))
def test_next_use_is_the_first_from_there(order, block, start) -> None:
    naive = next((i for i in range(start, len(order)) if order[i] == block), NEVER)
    assert Schedule(order).next_use(block, start) == naive


def schedule_of(passes: str, **orders: list[int]) -> Schedule:
    order, begins = [], []
    for name in passes:
        begins.append((len(order), name))
        order += orders[name]
    return Schedule(order, begins)


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=8))
def test_what_is_seldom_used_is_in_a_third_of_the_passes(uses: list[list[int]]) -> None:
    passes = {block: sum(block in one for one in uses) for one in uses for block in one}
    most = max(passes.values(), default=0)
    # a pass that uses nothing is none; a round is counted once, however much of it is foreseen
    comes_again = any(uses[n:] == uses[:-n] for n in range(1, len(uses) // 2 + 1))
    if not comes_again:
        assert seldom_of((), uses) == {block for block, n in passes.items() if n <= most / 3}


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (7, 1)])
def test_what_is_seldom_used_is_so_wherever_in_a_loop_it_is(first: int, second: int) -> None:
    planner = Planner()
    for number in range(6 * (first + second)):
        blocks = [2, 3] if number % (first + second) < first else [4, 5]
        planner.begin(tuple(blocks))
        for block in blocks:
            planner.touch(block)
        if number > 3 * (first + second) and {2, 4} <= set(planner.schedule.order):
            assert planner.schedule.seldom == ({4, 5} if first >= 3 * second else set())


def test_what_ends_soon_is_not_seldom_used_before_it_does() -> None:
    past, soon = [[1, 2]] * 5, [[1, 2], *[[3, 4]] * 4]
    assert seldom_of((), soon) == {1, 2}
    assert not seldom_of(past, soon)
    assert not seldom_of(past, soon[1:2])  # a model that is not foreseen is no measure


def test_what_is_behind_makes_no_other_schedule() -> None:
    """What was recorded of a schedule is taken up again as soon as the same is ahead."""
    planner = Planner()
    for _ in range(9):
        planner.begin("a", again=True)
        planner.touch(1)
    first = planner.schedule
    for key in "aaaa":
        planner.begin(key, again=True)
        assert planner.schedule is first
        planner.touch(1)


@pytest.mark.parametrize(
    "passes, found",
    [
        ("aaaa", "a"),
        ("fbfbfb", "fb"),
        ("bfbfbf", "bf"),
        ("fboofbo", "fb"),
        ("ofbofb", "fb"),
        ("fbfbof", "fb"),
        ("aabaab", "aab"),
        ("abaaba", "aba"),
        ("aaaaae", "a"),
        ("fbfbe", "fb"),
        ("fba", ""),
        ("a", ""),
        ("oooo", ""),
        ("agag", "a"),
    ],
)
def test_a_round_is_what_comes_again(passes: str, found: str) -> None:
    """Passes that use nothing it is about may come in between; names alone make no difference."""
    orders = {"a": [1, 2], "b": [3, 2, 1], "f": [1, 2, 3], "e": [2], "o": [9], "g": [1, 2]}
    schedule = schedule_of(passes, **orders)
    spans = schedule.round_over({1, 2, 3})
    assert "".join(str(name) for _, _, name in spans) == found
    for begin, end, name in spans:
        assert schedule.order[begin:end] == orders[str(name)]


def run(planner: Planner, key: str, order: list[int]) -> list[bool]:
    """Plays one pass; returns, use by use, whether it was what the planner expected next."""
    planner.begin(key)
    hits = []
    for block in order:
        hits.append(planner.distance(block) == 0)
        planner.touch(block)
    return hits


def no_repeats(order: list[int]) -> list[int]:
    return [b for i, b in enumerate(order) if i == 0 or b != order[i - 1]]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), orders.filter(len).map(no_repeats)),
        min_size=1,
        max_size=4,
        unique_by=lambda item: item[0],
    )
)
def test_a_loop_seen_twice_is_foreseen(loop) -> None:
    planner = Planner()
    for _ in range(3):
        for key, order in loop:
            run(planner, key, order)
    learned = planner.learned
    for key, order in loop:
        assert all(run(planner, key, order))
        following = [use for k, o in loop * 3 for use in [(k, o)]]
        at = [k for k, _ in loop].index(key)
        ahead = [b for _, o in following[at + 1 : at + 3] for b in o]
        assert list(planner.schedule.order[planner.cursor :])[: len(ahead)] == ahead
    assert planner.learned == learned, "nothing new was learned"


def test_accumulation_is_told_apart_by_what_came_before() -> None:
    """fwd, bwd, fwd, bwd, opt: after a backward comes a forward, or the optimizer."""
    forward, backward, step = [0, 1, 2], [2, 1, 0], [5, 6, 7]
    loop = [("f", forward), ("b", backward), ("f", forward), ("b", backward), ("o", step)]
    planner = Planner()
    for _ in range(4):
        for key, order in loop:
            run(planner, key, order)
    for index, (key, order) in enumerate(loop):
        run(planner, key, order)
        ahead = loop[(index + 1) % len(loop)][1]
        assert list(planner.schedule.order[planner.cursor :])[: len(ahead)] == ahead, index


@given(st.lists(st.tuples(st.sampled_from("ab"), orders), max_size=12), st.sets(st.integers(0, 7)))
def test_any_order_is_taken_and_the_last_one_is_learned(passes, gone) -> None:
    planner = Planner()
    for key, order in passes:
        run(planner, key, order)
        assert 0 <= planner.cursor <= len(planner.schedule)
    planner.begin("end")
    last = {key: no_repeats(order) for key, order in passes}
    for key, order in last.items():
        planner.begin(key)
        assert list(planner.schedule.order)[: len(order)] == order
        for block in order:
            planner.touch(block)
    planner.forget(gone)
    assert not gone & set(planner.schedule.order)
    assert 0 <= planner.cursor <= len(planner.schedule)
    for key in last:
        planner.begin(key)
        assert not gone & set(planner.schedule.order)


def test_a_pass_that_changes_is_learned_again() -> None:
    planner = Planner()
    for _ in range(3):
        run(planner, "f", [0, 1, 2, 3])
    assert not all(run(planner, "f", [3, 1, 0, 2]))
    assert all(run(planner, "f", [3, 1, 0, 2]))
    assert all(run(planner, "f", [3, 1, 0, 2]))


def test_a_guess_serves_the_first_time() -> None:
    planner = Planner()
    planner.begin("f", [4, 5, 6])
    assert [planner.distance(block) for block in (4, 5, 6)] == [0, 1, 2]
    assert planner.distance(9) == NEVER
    assert planner.touch(4) and not planner.touch(4)
    assert planner.distance(5) == 0


def test_memory_stays_bounded_under_passes_without_order() -> None:
    planner = Planner()
    for number in range(6000):
        planner.begin(number * 7919 % 251)
        planner.touch(number % 13)
    assert len(planner._after) <= 4096
    assert len(planner._cache) <= 33


# -- evicting ---------------------------------------------------------------


def fewest_misses(trace: tuple[int, ...], room: int) -> int:
    """Returns the optimum by trying every eviction."""

    @cache
    def rest(position: int, inside: frozenset[int]) -> int:
        if position == len(trace):
            return 0
        block = trace[position]
        if block in inside:
            return rest(position + 1, inside)
        if len(inside) < room:
            return 1 + rest(position + 1, inside | {block})
        return 1 + min(rest(position + 1, inside - {victim} | {block}) for victim in inside)

    return rest(0, frozenset())


def misses_by_cost(trace: tuple[int, ...], room: int) -> int:
    schedule = Schedule(trace)
    inside: set[int] = set()
    misses = 0
    for position, block in enumerate(trace):
        if block in inside:
            continue
        misses += 1
        if len(inside) == room:

            def cost(victim: int, now: int = position + 1) -> float:
                use = schedule.next_use(victim, now)
                distance = NEVER if use == NEVER else use - now
                return eviction_cost(4096, distance, dirty=False)

            inside.remove(min(sorted(inside), key=cost))
        inside.add(block)
    return misses


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4))
def test_equal_sizes_are_evicted_as_belady_does(cycle, rounds, room) -> None:
    trace = tuple(cycle * rounds)[:14]
    assert misses_by_cost(trace, room) == fewest_misses(trace, room)


@pytest.mark.parametrize(("blocks", "room"), [(5, 2), (5, 4), (6, 3)])
def test_a_sweep_there_and_back_misses_as_few_as_can_be(blocks, room) -> None:
    there = list(range(blocks))
    trace = tuple((there + there[::-1]) * 2)
    assert misses_by_cost(trace, room) == fewest_misses(trace, room)


def test_a_dirty_block_costs_its_write_as_well() -> None:
    assert eviction_cost(100, 3, dirty=True) == 2 * eviction_cost(100, 3, dirty=False)
    assert eviction_cost(100, NEVER, dirty=False) == 0.0
    assert 0.0 < eviction_cost(100, NEVER, dirty=True) < eviction_cost(100, 1 << 19, dirty=False)


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(1, 50), min_size=10, max_size=10),
    st.integers(-10, 400),
)
def test_residents_fit_and_leave_no_room_for_another(order, sizes, room) -> None:
    by_id = dict(enumerate(sizes))
    kept = choose_residents(order, by_id, room)
    used = sum(by_id[block] for block in kept)
    assert kept <= set(order)
    assert used <= max(room, 0)
    assert all(used + by_id[block] > room for block in set(order) - kept)


def test_a_pass_is_exact_until_something_else_is_used() -> None:
    planner = Planner()
    for _ in range(3):
        planner.begin("loop")
        for block in range(4):
            planner.touch(block)
    planner.begin("loop")
    assert planner.exact
    planner.touch(0)
    assert planner.exact
    planner.touch(2)
    assert not planner.exact
    for block in (1, 3):
        planner.touch(block)
    assert planner.used == [0, 2, 1, 3]
