"""What tests of integrations leave in the process is taken away again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

_OF_PROCESSES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Other tests begin without a process group, and with the environment that there was."""
    before = {name: os.environ.get(name) for name in _OF_PROCESSES}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
