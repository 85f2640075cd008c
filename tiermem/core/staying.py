"""What stays in HBM while a loop that writes goes round the rest in circles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiermem.core.residents import choose_residents

_WINDOW = 6
"""The largest block has room so many times in what is left: a step's weights, gradients, master and
state are in use while those of the next arrive and those of the one before leave."""
_SECONDS = 0.1
"""And so long may the link take for it: a place is free again once what left it is down, behind all
that left before. With a window of 1.2 GB at 47 GB/s steps took 0.998 s (simulated), with 4.7 GB
0.94 s, though less stayed."""


def choose_to_stay(
    order: Sequence[int],
    weights: Mapping[int, int],
    state: Mapping[int, int],
    largest: int,
    room: int,
    rate: float,
) -> frozenset[int]:
    """Chooses blocks that are neither fetched nor written in a loop that steps them.

    A byte of weights that stays saves three copies a round (up for forward and for backward, down
    after the step; more with several micro-batches), one of state saves two. As room for fetches
    ahead, which goes in circles, it only has one copy made sooner. So weights come first, then
    state, each spread evenly over the order of use, and the circle keeps what it needs.

    Args:
        order: Ids of blocks in order of use; repeats count once.
        weights: Bytes of those that are trained, or used at all, by id.
        state: Bytes of masters and optimizer state by id.
        largest: Bytes of the largest block of the loop.
        room: Bytes of HBM for all of it.
        rate: Bytes a second that come up.

    Returns:
        The ids of the blocks to keep; none where the circle needs all of the room.
    """
    left = room - max(_WINDOW * largest, int(_SECONDS * rate))
    kept: frozenset[int] = frozenset()
    for sizes in (weights, state):
        if left > 0:
            some = choose_residents([block for block in order if block in sizes], sizes, left)
            left -= sum(sizes[block] for block in some)
            kept |= some
    return kept
