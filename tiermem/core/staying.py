"""What stays in HBM while a loop that writes goes round the rest in circles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiermem.core.residents import choose_residents

_WINDOW = 6
"""The largest block has room so many times in what is left: a step's weights, gradients, master and
state are in use while those of the next arrive and those of the one before leave."""
_SECONDS = 0.1
"""And so long may the link take for it: a place is free again once what left it is down, behind all
that left before. With a window of 1.2 GB at 47 GB/s steps took 0.998 s (simulated), with 4.7 GB
0.94 s, though less stayed."""
_USUAL = 16
"""Where copies take longer than compute: so many times the usual block has room instead. What a
larger window hides are waits of compute, which the link then has none of."""


def window_of(sizes: Iterable[int], rate: float, *, copies_bind: bool) -> int:
    """Returns the bytes of HBM through which a loop that writes goes in circles.

    Args:
        sizes: Bytes of its blocks.
        rate: Bytes a second that come up.
        copies_bind: Whether a round's copies take longer than its compute.
    """
    ascending = sorted(sizes)
    least = _WINDOW * ascending[-1]
    if not copies_bind:
        return max(least, int(_SECONDS * rate))
    half, passed, usual = sum(ascending) / 2, 0, 0
    for usual in ascending:
        passed += usual
        if passed >= half:
            break
    return max(least, _USUAL * usual)


def choose_to_stay(
    order: Sequence[int],
    weights: Mapping[int, int],
    state: Mapping[int, int],
    window: int,
    room: int,
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
        window: Bytes that the circle needs; see :func:`window_of`.
        room: Bytes of HBM for all of it.

    Returns:
        The ids of the blocks to keep; none where the circle needs all of the room.
    """
    left = room - window
    kept: frozenset[int] = frozenset()
    for sizes in (weights, state):
        if left > 0:
            some = choose_residents([block for block in order if block in sizes], sizes, left)
            left -= sum(sizes[block] for block in some)
            kept |= some
    return kept
