"""What tests of integrations share: other optimizer classes than torch's are tried once, too."""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.optim import tried

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
def classes_are_tried_once(
    classes_are_tried_once: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes the many optimizers of these tests cheap: torch's as everywhere, of some all."""
    if any(name in request.module.__name__ for name in ("zero_infinity", "test_lora")):
        monkeypatch.setattr(tried, "check_separable", _tried_once)
