"""References to a gradient's stand-in are counted right in every version of Python."""

from __future__ import annotations

from typing import Any

from tiermem.nn.tensors.lazy import is_held


class Owner:
    def __init__(self) -> None:
        self.thing: Any = object()


def taken(owner: Owner) -> bool:
    """As the gradient store does it: out of where it was, into one local variable."""
    thing, owner.thing = owner.thing, None
    return is_held(thing)


def test_one_local_variable_does_not_count() -> None:
    assert not taken(Owner())


def test_one_reference_elsewhere_does() -> None:
    owner = Owner()
    kept = [owner.thing]
    assert taken(owner)
    del kept
    assert not taken(Owner())
