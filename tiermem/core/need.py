"""The least budgets of a program, found by playing it through over sizes: no torch, no memory.

What a program needs depends on the budget itself: a larger one has larger blocks, larger units of
gradients and more staging. So the least budget is looked for from below, and what is found works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tiermem.core.block import ALIGNMENT, align_up

Home = Literal["hbm", "dram", "nvme", "auto"]

_LEAST_UNIT = 16 << 20
LARGEST_WHOLE, _AT_ONCE = 128 << 20, 10
"""Where steps bind the host, blocks need not be finer than that, nor than this part of HBM, which
holds two of them with gradients and the states of Adam."""
_LITTLE_MORE = 8
"""A unit may be larger by one part in so many: a step of a bias by itself is as much work for the
host as one of the matrix beside it."""
STEPPED = 10
"""Times the bytes of a bfloat16 parameter: gradient, master and three states in float32."""
STEPPED_WHOLE = 5
"""Likewise without a master: a gradient in float32, and three states in the parameter's dtype."""
_ROUNDS = 256
_FINE = 256  # so many parts of a budget are told apart, as long as they are pages


def whole_block(hbm: int) -> int:
    """Returns the bytes up to which a block is stepped as one where steps bind the host.

    That of a small unit takes it as long as that of a large one.

    Args:
        hbm: Budget in bytes.
    """
    return min(hbm // _AT_ONCE, LARGEST_WHOLE)


def unit_limit(hbm: int, block: int, sizes: Sequence[int], *, few: bool) -> int:
    """Returns the bytes a unit of gradients may have, so that an optimizer step fits in HBM.

    A step holds a block of weights, its unit of gradients, and state and masters of a few
    times the unit's size; and the next unit is fetched meanwhile. Units small enough for
    that are not made smaller than what a link carries at full speed. A parameter whose step may
    have to be made in parts is a unit of its own.

    Args:
        hbm: Budget in bytes.
        block: Bytes of the block of weights.
        sizes: Bytes of its parameters.
        few: Whether units are to be few, since their steps bind the host.
    """
    free, whole = max(0, hbm - block), sum(sizes)
    if few and whole <= whole_block(hbm):
        return whole
    limit = max(free // 20, min(_LEAST_UNIT, free // 8))
    largest = max(sizes, default=0)
    if STEPPED * largest > free:
        return limit
    limit = max(largest, limit)
    return whole if whole <= limit + limit // _LITTLE_MORE else limit


@dataclass(frozen=True, slots=True)
class StepNeed:
    """The bytes that one unit of an optimizer step has in HBM at once, less what is fixed there.

    Attributes:
        nbytes: All of it.
        weights: Its block of weights.
        overlap: Whether it may be made while a forward holds blocks.
    """

    nbytes: int
    weights: int
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """A program as it runs with one budget of HBM.

    Attributes:
        homes: Home and bytes of every block, in the order in which homes are reserved.
        chain: Most bytes of blocks that nested calls hold at once, less those fixed in HBM.
        gradients: Bytes of the largest unit of gradients that is not fixed; 0 for none.
        steps: The units of its optimizers.
    """

    homes: Sequence[tuple[Home, int]]
    chain: int
    gradients: int = 0
    steps: Sequence[StepNeed] = ()

    def hbm(self) -> int:
        """Returns the bytes of HBM that forward, backward and step take."""
        fixed = sum(nbytes for home, nbytes in self.homes if home == "hbm")
        most = self.chain + self.gradients
        for step in self.steps:
            beside = max(0, self.chain - step.weights) if step.overlap else 0
            most = max(most, step.nbytes + beside)
        return fixed + most

    def short_of_dram(self, dram: int, *, files: bool) -> int:
        """Returns how many bytes of DRAM are missing.

        Args:
            dram: Bytes for homes.
            files: Whether there is an NVMe tier, for what ``"auto"`` does not find room for.
        """
        return self._place(dram, files=files)[0]

    def on_disk(self, dram: int) -> int:
        """Returns the bytes in files, where there are so many bytes of DRAM for homes."""
        return self._place(dram, files=True)[1]

    def _place(self, dram: int, *, files: bool) -> tuple[int, int]:
        left, short, below = dram, 0, 0
        for home, nbytes in self.homes:
            if home == "nvme" or (home == "auto" and files and nbytes > left):
                below += nbytes
            elif home != "hbm":
                short += max(0, nbytes - left)
                left = max(0, left - nbytes)
        return short, below


def least(need: Callable[[int], int], budget: int) -> int:
    """Returns the least budget that holds what is needed with that budget.

    Less may be needed with a larger budget (there are fewer blocks, each of whole pages), so that
    a way up alone would end too high.

    Args:
        need: Returns the bytes needed with a budget.
        budget: Where to begin, in bytes; if it does, it is what is returned.
    """
    low = high = budget
    for _ in range(_ROUNDS):
        wanted = need(high)
        if wanted <= high:
            break
        high = wanted
    while high - low > max(ALIGNMENT, high // _FINE):
        middle = low + align_up((high - low) // 2)
        if middle >= high:
            break
        if need(middle) <= middle:
            high = middle
        else:
            low = middle
    return high
