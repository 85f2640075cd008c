"""What tests of integrations leave in the process is taken away again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tiermem.optim import tried

_OF_PROCESSES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_TRIED: dict[Any, Any] = {}
_try = tried.check_separable


def _tried_once(name: str, make: Any, settings: Any, *rest: Any) -> Any:
    """Tries an optimizer class once for the same settings; other tests try every time."""
    if rest[-1] is not None:  # a method of the class
        return _try(name, make, settings, *rest)
    cls = getattr(getattr(make, "__self__", make), "cls", make)
    key = name, cls, repr(sorted(settings.items(), key=str)), repr(rest)
    if key not in _TRIED:
        _TRIED[key] = _try(name, make, settings, *rest)
    return _TRIED[key]


@pytest.fixture(autouse=True)
def classes_are_tried_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the many optimizers of these tests cheap: a trial is half of what one costs."""
    if any(name in request.module.__name__ for name in ("zero_infinity", "test_lora")):
        monkeypatch.setattr(tried, "check_separable", _tried_once)


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
