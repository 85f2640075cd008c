"""Blocks of two sizes, half of which fit: how near to the bus's bound they come.

The model is the one of ``support_half``; its bound is the copy of half of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_half import (
    BESIDE,
    BUS,
    LARGE,
    PAGES,
    SMALL,
    WEIGHTS,
    Forward,
    Host,
    compute,
    forward,
)
from support_virtual import PAGE

from tiermem.config import Policy, Settings
from tiermem.core.block import Role
from tiermem.core.layout import TensorShape
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead import plan_maker as outlook
from tiermem.runtime.manager import BlockManager

HALF = WEIGHTS // 2 + BESIDE
LITTLE = 1280
COPIED = WEIGHTS * PAGE / BUS
SLOTS = LARGE + 2 * SMALL


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.964), (2048, 0.962)])
@pytest.mark.parametrize("host", [Host(prelude=3e-4), Host()])
def test_half_of_the_weights_cost_half_of_the_copies(tokens: int, share: float, host: Host) -> None:
    with forward(HALF, host) as made:
        seconds, moved = made.passes(tokens)
        assert seconds <= COPIED / 2 / share
        assert SLOTS * PAGE <= made.plan.reserve <= 2 * LARGE * PAGE
        assert moved <= WEIGHTS / 2 + 2 * LARGE + SMALL
        assert made.manager.replay.repeating
        made.manager.parts.counters.reset()
        made.passes(tokens, warm=0)
        assert made.manager.parts.counters.misses == 0
        made.manager.parts.table.check()


def test_a_host_without_lead_costs_no_more_than_its_prelude() -> None:
    """The link has what is left of the round before to do meanwhile."""
    slow = Host(use=250e-6, copy=150e-6, prelude=4e-3)
    with forward(HALF, slow) as made:
        seconds, moved = made.passes(2048)
        assert seconds <= moved * PAGE / BUS + slow.prelude + 1e-3


def test_compute_of_what_stays_does_not_hold_up_the_link() -> None:
    """Half as much again: between the small blocks there is always a large one to be copied."""
    with forward(HALF) as made:
        seconds, moved = made.passes(3072)
        assert sum(compute(3072)) > 0.7 * COPIED / 2
        assert seconds <= 1.03 * moved * PAGE / BUS


def test_where_most_blocks_stream_all_slots_are_alike() -> None:
    """Large blocks in a row would wait for each other in the one slot they had."""
    with forward(LITTLE) as made:
        for tokens, share in ((1, 0.98), (2048, 0.97)):
            seconds, moved = made.passes(tokens)
            assert moved * PAGE / BUS >= share * seconds


@pytest.mark.parametrize("tokens", [3072, 4096, 5632, 7168, 8192])
@pytest.mark.parametrize("hbm", [LITTLE, HALF])
def test_neither_the_bus_nor_compute_waits_long_where_both_have_much_to_do(
    tokens: int, hbm: int
) -> None:
    with forward(hbm) as made:
        seconds, moved = made.passes(tokens)
        assert seconds <= 1.03 * max(moved * PAGE / BUS, sum(compute(tokens)))


def test_what_compute_has_time_for_is_not_copied_needlessly() -> None:
    """Kernels are slower beside copies: four slots are enough to have them out of the way."""
    with forward(LITTLE) as made:
        _, moved = made.passes(8192)
        assert made.plan.reserve <= LITTLE // 4 * PAGE
        assert moved <= sum(PAGES) - LITTLE + LITTLE // 4 + LARGE


def test_where_compute_is_what_takes_long_there_are_slots_enough() -> None:
    def at(made: Forward, tokens: int) -> float:
        return sum(compute(tokens)) / made.passes(tokens)[0]

    with forward(HALF) as made:
        at(made, 1)
        assert at(made, 8192) >= 0.97
        assert at(made, 16384) >= 0.99
    with forward(HALF) as made:
        assert at(made, 8192) >= 0.97


@pytest.mark.parametrize(
    ("order", "begins", "round_"),
    [
        ([0, 1, 2] * 3, (0, 3, 6), True),
        ([0, 1, 2] * 3, (0,), False),  # how long a pass is, is not known
        ([0, 1, 1] * 2, (0, 3), False),
        ([0, 1, 2, 0, 2, 1], (0, 3), False),
        ([0, 1, 2] * 2, (0, 0, 3, 3), False),  # a pass that uses nothing comes first
    ],
)
def test_a_schedule_goes_round_where_each_pass_is_the_first(
    order: list[int], begins: tuple[int, ...], round_: bool
) -> None:
    schedule = Schedule(order, [(begin, "") for begin in begins])
    assert outlook._goes_round(schedule) is round_


SIZES = [1, 3, 3, 3, 8, 8] * 4
ROUND = list(range(len(SIZES)))


orders = st.one_of(
    st.just(ROUND), st.permutations(ROUND), st.lists(st.sampled_from(ROUND), max_size=40)
)


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(orders, max_size=6), st.integers(0, 3))
def test_bytes_are_right_whatever_is_used(passes: Sequence[Sequence[int]], depth: int) -> None:
    """The loop that HBM is laid out for is left again, and blocks are held for long."""
    hbm = (8 + 6 + 4 * 9) * PAGE
    manager = BlockManager(
        Settings("cpu", hbm, sum(SIZES) * PAGE, (), None, Policy(params="dram"), "auto")
    )
    manager.prefetcher.fetcher.beside = True
    try:
        blocks = manager.add_blocks(
            [
                (f"b{n}", Role.PARAM, [TensorShape("w", (p * PAGE,), (1,), torch.uint8, 1)])
                for n, p in enumerate(SIZES)
            ]
        )
        for number, block in enumerate(blocks):
            manager.write_home(block, [torch.full((block.nbytes,), number, dtype=torch.uint8)])
        for order in [*[ROUND] * 8, *passes, *[ROUND] * 4]:
            manager.begin_pass("loop")
            held = []
            for number in order:
                slot = manager.acquire(blocks[number])
                assert bool((slot.bytes == number).all())
                held.append(blocks[number])
                if len(held) > min(depth, 1):
                    manager.release(held.pop(0))
            for block in held:
                manager.release(block)
            manager.parts.table.check()
    finally:
        manager.close()


def there_and_back(made: Forward) -> None:
    """Uses all blocks in order, then in reverse, a few times."""
    manager, order = made.manager, list(made.blocks)
    for _ in range(6):
        for key, blocks in (("there", order), ("back", order[::-1])):
            manager.begin_pass(key)
            for block in blocks:
                made.world.advance(made.world.now + made.host.use)
                manager.acquire(block)
                made.world.kernel(1e-4)
                manager.release(block)
            manager.end_pass()
    manager.parts.table.check()


def test_a_loop_that_goes_there_and_back_is_no_round() -> None:
    """The same blocks are used twice; where that comes again and again the plan does for both."""
    with forward(HALF) as made:
        for _ in range(2):
            made.passes(1)
            there_and_back(made)
        seconds, _ = made.passes(1)
        assert seconds <= COPIED / 2 / 0.96
