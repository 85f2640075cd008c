"""Programs drawn at random see the same with tiermem as without; the sweep draws many more."""

from __future__ import annotations

import pytest
import torch
from support_programs import drawn, tried


@pytest.mark.parametrize("seed", range(8))
def test_programs_see_the_same(seed: int) -> None:
    found = tried(drawn(seed, 16), torch.device("cpu"))
    assert found.startswith("same"), found
