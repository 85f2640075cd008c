"""What every test shares: hypothesis profiles, no process group left behind, and
GPU tests skipped without a GPU."""

from __future__ import annotations

import gc
import math
import os
import signal
import zlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from support_tried import remember_trials

# Tensors are tiny here. A team of threads for them waits for its slowest member, which on a
# loaded machine is twenty times as long, and sums in an order that depends on the cores.
torch.set_num_threads(1)

# A shell starts what runs beside it with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Collecting makes much and drops nothing: a third of its time went into looking for garbage.
gc.disable()

_OF_PROCESSES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_SLOW_OK)
settings.register_profile(
    "thorough", deadline=None, max_examples=2000, suppress_health_check=_SLOW_OK
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """What a test makes of one ends with it, and the environment is what there was."""
    before = {name: os.environ.get(name) for name in _OF_PROCESSES}
    had_one = dist.is_available() and dist.is_initialized()  # of several tests
    yield
    if not had_one and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def classes_are_tried_once(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember_trials(request.module.__name__, patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def the_collector_is_spared() -> None:
    """Spares the collector what stays of earlier modules: imports, caches, what is remembered.

    Programs collect where memory is short, sweeps after each interrupt. Looked through each time,
    what thousands of tests have left behind took most of their time.
    """
    _freeze()


def _freeze() -> None:
    """Has the collector look no more through what stays of all that there is."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-variant", action="store_true", help="run those of one_in(n), too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("every_variant") and os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
        gone = _other_variants(items)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=list(gone))
    left_out = {}
    if not torch.cuda.is_available():
        left_out["gpu"] = "needs a CUDA device"
    if os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
        left_out["thorough"] = "a variant: runs with HYPOTHESIS_PROFILE=thorough"
    for marker, reason in left_out.items():
        for item in items:
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def _other_variants(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the variants that do not run.

    Those that run are drawn by a checksum of their names, so that each value of each parameter has
    its chance, and are the same wherever and with whatever else they run.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") is not None and "[" in item.nodeid:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    gone = set[pytest.Item]()
    for those in variants.values():
        (n,) = those[0].get_closest_marker("one_in").args  # type: ignore[union-attr]
        those.sort(key=lambda item: zlib.crc32(item.nodeid.rpartition("/")[2].encode()))
        gone.update(those[math.ceil(len(those) / n) :])
    return gone


def pytest_collection_finish() -> None:
    """Spares the collector, and children that are forked, what was imported and collected."""
    gc.enable()
    _freeze()
