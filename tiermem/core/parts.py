"""Into how many parts the step of a large parameter is divided. Pure arithmetic."""

from __future__ import annotations

from tiermem.core.block import ALIGNMENT, align_up

_MOST = 0.2
"""Share of the HBM beside weights and gradient above which a parameter's state and master are
stepped in parts: a larger piece would need one contiguous place with nothing else in it."""
_EACH = 16
"""A large part takes one in this many of that room: three parts fit beside other blocks."""
_FEWER, _USUAL = 6, 64 << 20
"""If that would be less than ``_USUAL`` bytes, a part takes one in ``_FEWER`` instead, up to
``_USUAL``: a part takes a slow host 1.2 ms, and the link takes 0.5 ms for 29 MB of state."""
_PARTS = 256
"""The most parts of a parameter, unless there is only room for smaller parts."""
_FINEST = 4096
"""The most parts in any case: with even less room, the budget of HBM is refused."""
_AT_ONCE, _BLOCKS = 3, 3
"""How many parts are in HBM at once, and the blocks of each: of gradient, state and master."""
_MOST_GRADIENT = 0.8
"""Share of the HBM beside the blocks that calls hold above which a gradient is kept in runs; below,
three parts of state and master mostly fit in the rest."""
_KEPT, _PRECISE = 4, 4
"""A master and three state tensors, in float32 or wider: no torch class keeps more."""
_LEAST = 64 << 20
"""Bytes below which a parameter is stepped as a whole if that fits at all: its copies only take
milliseconds."""
_ALIGNED = 1024
"""Elements. Runs begin and end at borders of vectors and cache lines, so that every element is
processed by the same instructions as in the whole tensor."""


def parts_of(elements: int, nbytes: int, room: int) -> list[tuple[int, int]]:
    """Divides a parameter into runs of elements for its steps.

    Args:
        elements: How many it has.
        nbytes: Bytes of its state and master.
        room: Bytes of HBM beside its weights, its gradient, and other blocks that are held.

    Returns:
        Begin and end of each run; one run if there is enough room.
    """
    if nbytes <= (room if nbytes < _LEAST else _MOST * room):
        return [(0, elements)]
    return _cut(elements, nbytes, room)


def gradient_parts(
    elements: int, itemsize: int, room: int, *, least: bool = False
) -> list[tuple[int, int]]:
    """Divides a gradient into runs of elements, each of which is a block.

    The parameter is stepped in the same runs, so they are as short as its state may require.

    Args:
        elements: How many it has.
        itemsize: Bytes of one.
        room: Bytes of HBM beside the blocks that calls hold at once, its weights among them.
        least: Whether to divide it even if it leaves some room.

    Returns:
        Begin and end of each run; one run if there is enough room for the whole, or if three runs
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
    """Returns the room beside the blocks that calls hold in which a gradient stays whole."""
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
