"""How many examples property tests draw: few, and many with HYPOTHESIS_PROFILE=thorough."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = settings.get_current_profile_name() == "thorough"


def examples(few: int, many: int = 2000) -> int:
    """Returns ``few``, or ``many`` in a thorough run."""
    return many if THOROUGH else few
