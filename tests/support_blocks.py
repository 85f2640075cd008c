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
    for name in ("_FINEST", "_RUN", "_PARTS"):
        patch.setattr(partition, name, 1)
    patch.setattr(need, "_LEAST_UNIT", 1)
    patch.setattr(blocks, "steps_bind", lambda *_: True)
    patch.setattr(blocks, "SHARES", ())
