"""What every test shares: hypothesis profiles, and GPU tests skipped without a GPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tensors are tiny here. A team of threads for them waits for its slowest member, which on a
# loaded machine is twenty times as long, and sums in an order that depends on the cores.
torch.set_num_threads(1)

# A shell starts what runs beside it with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_SLOW_OK)
settings.register_profile(
    "thorough", deadline=None, max_examples=2000, suppress_health_check=_SLOW_OK
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    left_out = {}
    if not torch.cuda.is_available():
        left_out["gpu"] = "needs a CUDA device"
    if os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
        left_out["thorough"] = "a variant: runs with HYPOTHESIS_PROFILE=thorough"
    for marker, reason in left_out.items():
        for item in items:
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
