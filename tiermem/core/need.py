"""The least budgets of a program, found by simulating it with sizes only: no torch, no memory.

What a program needs depends on the budget itself: with a larger one, blocks and units of gradients
are larger, and there is more staging. So the least budget is searched from below, and the result is
known to work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tiermem.core.block import ALIGNMENT, align_up

Home = Literal["hbm", "dram", "nvme", "auto"]

_LEAST_UNIT = 16 << 20
LARGEST_WHOLE, _AT_ONCE = 128 << 20, 10
"""If optimizer steps are host-bound, blocks need not be smaller than this, nor than this part of
HBM, which holds two of them with gradients and Adam's state."""
_LITTLE_MORE = 8
"""A unit may be larger by one part in this many: to step a bias by itself takes the host as long as
the matrix beside it."""
STEPPED = 10
"""Times the bytes of a bfloat16 parameter: gradient, master and three states in float32."""
STEPPED_WHOLE = 5
"""The same without a master: a gradient in float32, and three states in the parameter's dtype."""
_ROUNDS = 256
_FINE = 256  # the search ends at this part of a budget, or at a page


def whole_block(hbm: int) -> int:
    """Returns the bytes up to which a block is stepped as one unit if steps are host-bound.

    The step of a small unit takes the host as long as that of a large one.

    Args:
        hbm: Budget in bytes.
    """
    return min(hbm // _AT_ONCE, LARGEST_WHOLE)


def unit_limit(hbm: int, block: int, sizes: Sequence[int], *, few: bool) -> int:
    """Returns the bytes a unit of gradients may have, so that an optimizer step fits in HBM.

    A step holds a block of weights, its unit of gradients, and state and masters of a few times
    the unit's size, while the next unit is fetched. Units are not made smaller than a size that a
    link copies at full speed. A parameter whose step may have to be divided into parts is a unit
    of its own.

    Args:
        hbm: Budget in bytes.
        block: Bytes of the block of weights.
        sizes: Bytes of its parameters.
        few: Whether there should be few units, since their steps are host-bound.
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
    """The bytes that the step of one unit has in HBM at once, without those fixed there.

    Attributes:
        nbytes: All of them.
        weights: Those of its block of weights.
        overlap: Whether the step may be performed while a forward holds blocks.
    """

    nbytes: int
    weights: int
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """A program, simulated with one budget of HBM.

    Attributes:
        homes: Home and bytes of every block, in the order in which homes are reserved.
        chain: Most bytes of blocks that nested calls hold at once, without those fixed in HBM.
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
            files: Whether there is an NVMe tier, for ``"auto"`` blocks for which DRAM has no room.
        """
        return self._place(dram, files=files)[0]

    def on_disk(self, dram: int) -> int:
        """Returns the bytes in files if there are ``dram`` bytes of DRAM for homes."""
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
    """Returns the least budget that is enough for what is needed with that budget.

    A larger budget may need less (fewer blocks, each of whole pages), so searching upwards alone
    could end at a budget that is too large.

    Args:
        need: Returns the bytes needed with a budget.
        budget: Where to begin, in bytes; returned if it is enough.
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
