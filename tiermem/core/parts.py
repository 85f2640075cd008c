"""Into how many parts the step of a large parameter is cut. Pure arithmetic."""

from __future__ import annotations

from tiermem.core.block import ALIGNMENT, align_up

_MOST = 0.2
"""Share of the HBM beside weights and gradient above which a parameter's state and master are
stepped in parts: what comes as a whole needs a place that nothing else is in."""
_EACH = 16
"""A large one takes one in so many of that room: three parts fit beside what else streams."""
_FEWER, _USUAL = 6, 64 << 20
"""Where that is less than so many bytes, one in as many instead, up to these: a part takes a slow
host 1.2 ms, and a link 0.5 ms for 29 MB of state."""
_PARTS = 256
"""Into so many a parameter is cut at most, unless there is room for smaller ones only."""
_FINEST = 4096
"""Likewise at all: where there is next to no room, HBM is refused, with the least."""
_AT_ONCE, _BLOCKS = 3, 3
"""Parts that are in HBM at once, and blocks of each: of gradient, state and master."""
_MOST_GRADIENT = 0.8
"""Share of the HBM beside what calls hold above which a gradient is kept in runs; in what is left
else, three parts of state and master fit, mostly."""
_KEPT, _PRECISE = 4, 4
"""A master and three states, in float32 or what is wider: no class of torch's keeps more."""
_LEAST = 64 << 20
"""Bytes below which a parameter is stepped as a whole where that fits at all: its copies take
milliseconds."""
_ALIGNED = 1024
"""Elements. Runs begin and end where vectors and cache lines do, so that every element goes through
the same instructions as in the whole."""


def parts_of(elements: int, nbytes: int, room: int) -> list[tuple[int, int]]:
    """Cuts a parameter into runs of elements for its steps.

    Args:
        elements: How many it has.
        nbytes: Of its state and master.
        room: Bytes of HBM beside its weights and gradient, and what else is held.

    Returns:
        Where each begins and ends; one where there is room enough.
    """
    if nbytes <= (room if nbytes < _LEAST else _MOST * room):
        return [(0, elements)]
    return _cut(elements, nbytes, room)


def gradient_parts(
    elements: int, itemsize: int, room: int, *, least: bool = False
) -> list[tuple[int, int]]:
    """Cuts a gradient into runs of elements, each of which comes to HBM by itself.

    The parameter is stepped in the same runs, so they are as short as its state may ask for.

    Args:
        elements: How many it has.
        itemsize: Bytes of one.
        room: Bytes of HBM beside what calls hold at once, its weights among that.
        least: Whether to cut it also where it leaves some room.

    Returns:
        Where each begins and ends; one where there is room enough for the whole, or three runs
        would take as much.
    """
    nbytes = elements * itemsize
    if not nbytes or (not least and whole_gradient(nbytes) <= room):
        return [(0, elements)]
    each = itemsize + _KEPT * max(itemsize, _PRECISE)
    runs = _cut(elements, elements * each, room)
    longest = max(end - begin for begin, end in runs)
    if _AT_ONCE * align_up(longest * itemsize) >= align_up(nbytes):
        return [(0, elements)]
    return runs


def whole_gradient(nbytes: int) -> int:
    """Returns the room beside what calls hold in which a gradient of so many bytes is whole."""
    return int(nbytes / _MOST_GRADIENT)


def at_once(largest: int) -> int:
    """Returns the bytes of parts that are in HBM at once, given those of the largest."""
    return _AT_ONCE * largest


def _cut(elements: int, nbytes: int, room: int) -> list[tuple[int, int]]:
    """Returns runs of which three fit in the room; of large ones, those that take a sixteenth."""
    count = -(-nbytes // max(1, (room - _AT_ONCE * _BLOCKS * ALIGNMENT) // _AT_ONCE))
    if nbytes >= _LEAST:
        each = max(room // _EACH, min(_USUAL, room // _FEWER), 1)
        count = max(count, min(_PARTS, -(-nbytes // each)))
    length = elements // max(1, min(_FINEST, count)) // _ALIGNED * _ALIGNED or _ALIGNED
    return [(at, min(elements, at + length)) for at in range(0, elements, length)]
