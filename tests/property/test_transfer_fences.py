"""Which copies a place of HBM has to wait for: the last that touched it, and no later one."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.block import Extent
from tiermem.transfer.streams import Fences


@dataclass(eq=False)
class Copy:
    """A copy of a stream, and the event behind it."""

    number: int
    extent: Extent
    over: bool = False
    waiter: int = -1

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        raise AssertionError("nobody waits here")


def touch(one: Extent, other: Extent) -> bool:
    return one.offset < other.end and other.offset < one.end


def last_of(copies: list[Copy], extent: Extent) -> int:
    return max((c.number for c in copies if not c.over and touch(c.extent, extent)), default=-1)


def number_of(found: Copy | None) -> int:
    return -1 if found is None else found.number


@given(seed=st.integers(0, 1 << 20), most=st.integers(1, 12), over=st.sampled_from([0.0, 0.3]))
def test_no_copy_that_touches_a_place_is_missed(seed: int, most: int, over: float) -> None:
    rng, fences, copies = random.Random(seed), Fences(), list[Copy]()
    for number in range(60):
        extent = Extent(rng.randrange(24), rng.randint(1, most))
        copies.append(Copy(number, extent))
        fences.add(extent, copies[-1])
        if rng.random() < over:  # a stream's copies end in order
            for copy in copies[: rng.randrange(number + 1)]:
                copy.over = True
        asked = Extent(rng.randrange(30), rng.randint(1, most))
        found = fences.last(asked)
        if last_of(copies, asked) >= 0:
            assert number_of(found) >= last_of(copies, asked)  # type: ignore[arg-type]


@given(seed=st.integers(0, 1 << 20))
def test_a_part_of_a_place_holds_up_only_that_part(seed: int) -> None:
    """Places are taken whole or by halves, as in a ring of blocks of two sizes."""
    rng, fences, copies = random.Random(seed), Fences(), list[Copy]()
    for number in range(60):
        extent = rng.choice([Extent(2 * rng.randrange(8), 2), Extent(rng.randrange(16), 1)])
        copies.append(Copy(number, extent))
        fences.add(extent, copies[-1])
        for half in range(16):
            asked = Extent(half, 1)
            assert number_of(fences.last(asked)) == last_of(copies, asked)  # type: ignore[arg-type]
