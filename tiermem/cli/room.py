"""Default budgets that turn out too small are raised to what is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from tiermem.errors import CapacityError

_T = TypeVar("_T")
_ASKED = re.compile(r"\b(hbm|dram|nvme)(?:_bytes)?= at least [^()]*\((\d+) bytes\)")
_TRIES = 24


def with_room(
    run: Callable[[Mapping[str, int]], _T],
    given: Collection[str],
    raised: Callable[[str, int], object],
) -> _T:
    """Runs something under budgets; raises those that were not given until it fits.

    Args:
        run: Takes the least that budgets have to be, by tier; may raise a CapacityError that says
            how much would do.
        given: Tiers whose budgets the user gave: they stay as they are.
        raised: Told of each tier that gets more, and how much.

    Returns:
        What ``run`` returns.

    Raises:
        CapacityError: If a given budget is too small, or what was asked for does not help.
    """
    least: dict[str, int] = {}
    for _ in range(_TRIES):
        try:
            return run(least)
        except CapacityError as error:
            found = _ASKED.search(str(error))
            if found is None:
                raise
            tier, nbytes = found[1], int(found[2])
            if tier in given or nbytes <= least.get(tier, 0):
                raise
        least[tier] = nbytes
        raised(tier, nbytes)
    return run(least)
