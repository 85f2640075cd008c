"""Blocks that come up packed, on streams in every order that events allow."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from support_packed import always_used, pack, small_tiles
from support_streams import DOWN, UNPACK, UP, Case, Streamed, cases

PACKED = cases(slots=(1, 4), blocks=(2, 7), depth=(0, 3), late=(UP, DOWN, UNPACK))


def packed_again(bench: Streamed, random: Random) -> int:
    """Some blocks that have been written since get packed copies again; returns how many."""
    some = [block for block in bench.blocks if random.random() < 0.7]
    return pack(bench.manager, some)


@settings(max_examples=150)
@given(PACKED)
def test_nothing_packed_is_read_or_overwritten_too_soon(case: Case) -> None:
    """Random uses; what is written has no packed copy until it is packed again."""
    with small_tiles():
        bench = Streamed(case)
        random = Random(case.seed + 1)
        loop = [random.randrange(case.blocks) for _ in range(case.blocks)]
        always_used(bench.manager)
        made = 0
        with bench:
            for round_number in range(5):
                made += packed_again(bench, random)
                bench.manager.begin_pass("loop")
                for number in loop:
                    kind = random.random()
                    writable = number > 0
                    bench.use(
                        number, write=writable and kind < 0.2, discard=writable and kind > 0.9
                    )
                    bench.stray(random)
                    bench.run_on(random)
                if round_number == 2:
                    random.shuffle(loop)
        assert made


@settings(max_examples=100)
@given(cases(slots=(2, 5), blocks=(3, 8), depth=(1, 3), late=(UP, UNPACK)))
def test_nor_in_a_loop_that_repeats(case: Case) -> None:
    """Where blocks leave for others in one go, some of them packed and some not."""
    with small_tiles():
        bench = Streamed(case)
        bench.manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
        random = Random(case.seed + 1)
        always_used(bench.manager)
        packed_again(bench, random)
        with bench:
            for round_number in range(8):
                bench.manager.begin_pass("loop")
                for number in range(case.blocks):
                    written = round_number == 5 and number == case.blocks - 1
                    bench.use(number, write=written, discard=False)
                    if random.random() < 0.1:
                        bench.switch()
                    bench.run_on(random)


@settings(max_examples=100)
@given(cases(slots=(1, 3), blocks=(5, 5), depth=(1, 1), lags=(0, 1, 3), late=(UP, UNPACK)))
def test_nor_where_the_host_writes_homes_or_others_get_them(case: Case) -> None:
    with small_tiles():
        bench = Streamed(case)
        random = Random(case.seed + 1)
        always_used(bench.manager)
        with bench:
            for round_number in range(4):
                packed_again(bench, random)
                bench.manager.begin_pass("loop")
                for number in range(case.blocks):
                    kind = random.random()
                    if kind < 0.6:
                        bench.use(number, write=kind < 0.1, discard=False)
                    elif kind < 0.75:
                        bench.rewrite(number)
                    elif kind < 0.85 and round_number:
                        bench.replace(number)
                    bench.run_on(random)
