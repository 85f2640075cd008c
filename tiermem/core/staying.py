"""Chooses what stays in HBM in a loop that writes; the others stream through a ring. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiermem.core.residents import choose_residents

_WINDOW = 6
"""The ring has room for this many of the largest block: weights, gradients, master and state of a
step are in use while those of the next step arrive and those of the previous one leave."""
_SECONDS = 0.1
"""The ring also has the bytes that the link copies in this time: a place is free again once its
block has been written home, after all blocks before it. With a ring of 1.2 GB at 47 GB/s, steps
took 0.998 s (simulated), with 4.7 GB 0.94 s, although less stayed."""
_USUAL = 16
"""If copies take longer than compute, the ring has room for this many blocks of the usual size
instead: a larger ring would only hide waits of compute, and the link does not wait then."""


def window_of(sizes: Iterable[int], rate: float, *, copies_bind: bool) -> int:
    """Returns the bytes of the ring of a loop that writes.

    Args:
        sizes: Bytes of its blocks.
        rate: Bytes per second that are copied to HBM.
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

    A byte of weights that stays saves three copies per round (to HBM for forward and for backward,
    home after the step; more with several micro-batches), a byte of state saves two. A byte of the
    ring only lets one copy begin sooner. So weights are kept first, then state, each spread evenly
    over the order of use, and the ring gets what it needs.

    Args:
        order: Ids of blocks in order of use; repeats count once.
        weights: Bytes of weights that are used, by id.
        state: Bytes of masters and optimizer state by id.
        window: Bytes that the ring needs; see :func:`window_of`.
        room: Bytes of HBM for all of it.

    Returns:
        The ids of the blocks to keep; none if the ring needs all of the room.
    """
    left = room - window
    kept: frozenset[int] = frozenset()
    for sizes in (weights, state):
        if left > 0:
            some = choose_residents([block for block in order if block in sizes], sizes, left)
            left -= sum(sizes[block] for block in some)
            kept |= some
    return kept
