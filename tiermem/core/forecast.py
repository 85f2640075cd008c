"""Forecasts the compute time of blocks in a pass that has not been measured yet. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tiermem.core.block import Block
from tiermem.core.pace import Estimates
from tiermem.core.schedule import is_backward

_LEAST = 8e-6
"""Seconds of the shortest use: one or two launches of a kernel with little work."""
_PER_ELEMENT = 2.0
"""Operations for each element of a weight and each token: a multiplication and an addition."""
_BACKWARD = 2.0
"""Factor of backward's operations over forward's: the gradients of the input and of the weight."""
_PRECISE = 8.0
"""Factor of the time of an operation on 4-byte elements over that on 2-byte ones."""
_LAUNCHES = 100e-6
"""Seconds that the host takes for the launches of a use."""
_TALL = 6
_LOOKED_UP = 8192
_STEPS = 2


class Sized(NamedTuple):
    """A pass and the amount of its work.

    Attributes:
        key: Name of the pass.
        load: Tokens, rounded by :func:`rounded`; 0 if they are not known.
    """

    key: Hashable
    load: int


def rounded(tokens: int) -> int:
    """Returns a number of tokens, rounded to a power of the square root of 2; 0 for none.

    Times of passes with the same rounded load differ by a fifth at most.
    """
    if tokens <= 0:
        return 0
    return max(1, round(2 ** (round(_STEPS * math.log2(tokens)) / _STEPS)))


def timed(key: Hashable, load: int) -> Hashable:
    """Returns the name under which passes are measured: with their load, if it is known."""
    return Sized(key, load) if load else key


class Forecast:
    """Seconds of compute: measured, or estimated from shapes and other measurements.

    If there are measurements of other loads, those of the nearest one are scaled by the ratio of
    the estimates from shapes (weights times tokens, at the device's speed). If there are none, the
    estimate from shapes is used.
    """

    def __init__(self, estimates: Estimates) -> None:
        """Uses a set of measurements, which may grow.

        Args:
            estimates: The measurements; their ``flops`` is the device's speed.
        """
        self._estimates = estimates

    def seconds(
        self, key: Hashable, load: int, order: Sequence[tuple[int, Block | None]]
    ) -> list[float | None]:
        """Returns the seconds of each use of a pass; None if they cannot be estimated.

        Args:
            key: Name of the pass.
            load: Its tokens, rounded; 0 if they are not known.
            order: Id of each block that it uses, and the block, if it exists.
        """
        estimates = self._estimates
        name = timed(key, load)
        if load and estimates.sure(key) and not estimates.sure(name):
            name, load = key, 0  # a pass without tokens: an optimizer's
        if not load or estimates.sure(name):
            return [estimates.compute(name, block) for block, _ in order]
        if not estimates.flops:
            return [None] * len(order)
        first = self._shapes(key, load, order)
        like = self._nearest(key, load)
        if not like:
            return list(first)
        found: list[float | None] = []
        there = self._shapes(key, like, order)
        for (block, _), now, then in zip(order, first, there, strict=True):
            measured = estimates.compute(Sized(key, like), block)
            found.append(now if measured is None else _scaled(measured, now, then))
        return found

    def _nearest(self, key: Hashable, load: int) -> int:
        """Returns the nearest load that was measured; 0 if there is none."""
        known = (name for name in self._estimates.known() if isinstance(name, Sized))
        loads = [name.load for name in known if name.key == key]
        return min(loads, key=lambda other: abs(math.log(other / load)), default=0)

    def _shapes(
        self, key: Hashable, load: int, order: Sequence[tuple[int, Block | None]]
    ) -> list[float]:
        """Returns seconds estimated from shapes and the device's speed."""
        often = _PER_ELEMENT * load / self._estimates.flops
        if is_backward(key):
            often *= _BACKWARD
        found = [
            max(_LEAST, often * _elements(block)) if block is not None else _LEAST
            for _, block in order
        ]
        if order and (block := order[0][1]) is not None and _is_table(block):
            found[0] = _LEAST  # the pass begins with an embedding, which only looks up rows
        return found


def _scaled(measured: float, now: float, then: float) -> float:
    """Returns the seconds of a use that were measured with another load, scaled to this one.

    A short use is mostly launches by the host, which do not take longer for more work.

    Args:
        measured: Measured with the other load.
        now: Estimated from shapes, with this load.
        then: Estimated from shapes, with the other load.
    """
    if now > then and then < _LAUNCHES:
        return measured + now - then
    return measured * now / then


@lru_cache(1 << 14)  # needed for each plan
def _elements(block: Block) -> float:
    """Returns the elements of a block's matrices; 4-byte elements count as often as they cost."""
    found = 0.0
    for spec in block.tensors:
        count = math.prod(spec.shape)
        found += count * (_PRECISE if spec.nbytes >= 4 * count else 1.0)
    return found


def _is_table(block: Block) -> bool:
    """Whether a block is one matrix that looks like an embedding's."""
    if len(block.tensors) != 1 or len(block.tensors[0].shape) != 2:
        return False
    rows, columns = block.tensors[0].shape
    return rows >= _LOOKED_UP and rows >= _TALL * columns
