"""What planning costs: time and memory of the schedule, for up to 100,000 blocks.

A training loop (forward, backward, optimizer) over so many blocks is played
through the planner. Measured are the plan itself, made anew because the order
of use has changed (at worst once per pass), what is decided from it (who stays,
who leaves first), and what one use and one question for a next use cost.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from common import report

from tiermem.core.residents import choose_residents
from tiermem.core.schedule import Planner, Schedule
from tiermem.core.victims import NextUseQueue


def play(planner: Planner, blocks: int) -> float:
    """Plays one round of the loop; returns seconds per use, planning not counted."""
    order = range(blocks)
    spent = 0.0
    for key, uses in (("f", order), ("b", order[::-1]), ("o", order)):
        planner.begin(key)
        began = time.perf_counter()
        for block in uses:
            planner.touch(block)
        spent += time.perf_counter() - began
    return spent / (3 * blocks)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median seconds of a call."""
    times = []
    for _ in range(repeats):
        gc.collect()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(blocks: int, repeats: int) -> dict[str, Any]:
    """Returns the figures for one number of blocks."""
    planner = Planner()
    for _ in range(3):
        use = play(planner, blocks)

    def plan() -> None:
        planner._cache.clear()  # as after a change of order
        planner.schedule = planner._foresee()

    seconds = timed(plan, repeats)
    gc.collect()
    planner._cache.clear()
    planner.schedule = Schedule(())
    tracemalloc.start()
    plan()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    schedule = planner.schedule
    sizes = dict.fromkeys(range(blocks), 1 << 20)
    queue = NextUseQueue()
    rng = random.Random(0)
    asked = [(rng.randrange(blocks), rng.randrange(len(schedule))) for _ in range(20_000)]

    def ask() -> None:
        for block, start in asked:
            schedule.next_use(block, start)

    return {
        "blocks": blocks,
        "uses planned": len(schedule),
        "plan s": seconds,
        "plan us/block": seconds / blocks * 1e6,
        "peak bytes/block": memory / blocks,
        "who stays s": timed(
            lambda: choose_residents(schedule.order, sizes, blocks << 18), repeats
        ),
        "who leaves s": timed(lambda: queue.rebuild(schedule, 0, range(blocks)), repeats),
        "one use us": use * 1e6,
        "one question us": timed(ask, repeats) / len(asked) * 1e6,
    }


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000, 30_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default=None, help="where to write the JSON (and .md beside it)")
    options = parser.parse_args()
    rows = [measure(blocks, options.repeats) for blocks in options.blocks]
    report("Planning: time and memory by number of blocks", rows, options.out)


if __name__ == "__main__":
    main()
