"""Into how many parts the step of a large parameter is cut. Pure arithmetic."""

from __future__ import annotations

_MOST = 0.8
"""Share of the HBM beside weights and gradient above which a parameter's state and master are
stepped in parts. With an eighth, training at 16,384 tokens was some percent slower on an H200, not
faster as simulated."""
_EACH = 16
"""A large one takes one in so many of that room: three parts fit beside what else streams."""
_PARTS = 256
"""Most parts of a parameter, unless there is room for smaller ones only."""
_FIT = 4
"""So many parts are not more than the room: three, and what pages and runs round up."""
_FINEST = 4096
"""Most parts at all: where there is next to no room, HBM is refused, with the least."""
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


def _cut(elements: int, nbytes: int, room: int) -> list[tuple[int, int]]:
    """Returns runs of which one takes a quarter of the room, or a sixteenth if they are large."""
    room = max(1, room)
    count = -(-nbytes * _FIT // room)
    if nbytes >= _LEAST:
        count = max(count, min(_PARTS, -(-nbytes * _EACH // room)))
    length = -(-elements // min(_FINEST, count))
    length += -length % _ALIGNED
    return [(at, min(elements, at + length)) for at in range(0, elements, length)]
