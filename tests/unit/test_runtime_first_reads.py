"""The first passes of a model whose weights are in files: what they read, in virtual time.

A Llama of 1.0 B as in ``test_runtime_nvme_pace``; reads begin when it is loaded, before anything is
known of the passes to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support_virtual import LLAMA, PAGE, Machine, Streamed, both, forward, streamed

HBM, DRAM = 125, 100
_LOAD = 2048
_ALL = sum(LLAMA) * PAGE


def machine(gigabytes: float) -> Machine:
    """Returns a machine whose disk gives so many gigabytes per second."""
    rate = gigabytes * 1e9 / 1536
    return Machine(straight=rate, in_place=0.92 * rate)


def load(made: Streamed, seconds: float) -> None:
    """Begins to read, as a model that is loaded does; the first call comes so much later."""
    made.manager.parts.pass_timer.estimates.flops = 1e12
    made.manager.begin_pass(("loaded", 1), [block.id for block in made.blocks])
    made.world.advance(made.world.now + seconds)


def call(
    made: Streamed, key: object, uses: Sequence[tuple[int, float]], guess: list[int], again: bool
) -> int:
    """Runs a pass and waits for the device; returns the bytes read since the call before."""
    manager, world = made.manager, made.world
    before = world.read
    manager.begin_pass(key, guess, load=_LOAD, again=again)
    for number, seconds in uses:
        world.advance(world.now + world.machine.host)
        manager.acquire(made.blocks[number])
        world.kernel(seconds)
        manager.release(made.blocks[number])
    manager.end_pass()
    world.advance(world.compute)
    manager.parts.table.check()
    return world.read - before


@pytest.mark.parametrize(
    ("gigabytes", "seconds"), [(1.5, 0.0), (1.5, 0.1), (1.5, 0.25), (4.4, 0.02), (4.4, 0.08)]
)
def test_each_byte_is_read_once_before_the_first_result(
    gigabytes: float, seconds: float, tmp_path: Path
) -> None:
    """Neither what was read before the first plan was made, nor anything for the next pass."""
    [(key, uses)] = forward(0.006)
    # the embedding is used first, as the order of the modules says
    with streamed(tmp_path, LLAMA, hbm=HBM, dram=DRAM, machine=machine(gigabytes)) as made:
        made.blocks = [*made.blocks[-1:], *made.blocks[:-1]]
        order = [((number + 1) % len(LLAMA), seconds) for number, seconds in uses]
        load(made, seconds)
        call(made, key, order, [block.id for block in made.blocks], again=True)
        assert made.world.read == _ALL
        assert made.world.now <= 1.04 * _ALL / made.world.machine.in_place


def test_another_plan_for_a_loop_that_turns_reads_hardly_anything_again(tmp_path: Path) -> None:
    """Steps of adapters: what they stream through is known once the second step is under way."""
    (ahead, uses), (back, others) = both(0.066)
    with streamed(tmp_path, LLAMA[:-1], hbm=HBM, dram=HBM, machine=machine(1.5)) as made:
        load(made, 0.1)
        order = [block.id for block in made.blocks]
        read = []
        for _ in range(8):
            step = call(made, ahead, uses, order, again=False)
            read.append(step + call(made, back, others, order[::-1], again=False))
            made.manager.begin_pass("step", [])
        whole = sum(LLAMA[:-1]) * PAGE
        assert read[0] <= 1.3 * whole and read[1] <= 0.75 * whole
        assert min(read) == read[-1]
