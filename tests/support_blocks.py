"""Budgets of some hundred KB that are divided into blocks as those of gigabytes are."""

from __future__ import annotations

import pytest

from tiermem.core import need
from tiermem.nn.groups import blocks, partition


def divide_as_large(patch: pytest.MonkeyPatch) -> None:
    """Has blocks as fine as budgets allow, and coarser ones for training, as steps bind the host.

    Where nothing is trained, layers share no blocks, and the host binds nothing.

    Args:
        patch: Undoes it.
    """
    for module, names in (
        (partition, ("_FINEST", "_RUN", "_PARTS")),
        (need, ("_LEAST_UNIT", "_LARGE_ENOUGH")),
    ):
        for name in names:
            patch.setattr(module, name, 1)
    patch.setattr(blocks, "steps_bind", lambda *_: True)
    patch.setattr(blocks, "SHARES", ())
