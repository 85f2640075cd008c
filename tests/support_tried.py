"""Optimizer classes of torch are tried once in a test process: a trial is half of what one costs.

A trial is a function of the class, its settings, and what the parameters are, and those of
torch's own classes do not change. The first trial of each kind is made, as are all of other
classes, of methods, and in the tests that are about trials.
"""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.optim import tried

_ABOUT_TRIALS = ("classes", "trial", "subclass", "torch_versions", "interrupts", "errors")
"""Words in the names of modules that make every trial, or remember it in their own way."""

_found: dict[Any, Any] = {}
_try = tried.check_separable


def try_once(name: str, make: Any, settings: Any, *rest: Any) -> Any:
    """Tries a class of torch's once for the same settings and parameters.

    Args:
        name: As for ``check_separable``, like the others.
        make: Makes an instance.
        settings: Of the parameter group.
        rest: What the parameters are, and a method of the class or None.

    Returns:
        What ``check_separable`` returns.
    """
    cls = getattr(getattr(make, "__self__", make), "cls", make)
    if rest[-1] is not None or not str(cls.__module__).startswith("torch.optim."):
        return _try(name, make, settings, *rest)
    key = cls, repr(sorted(settings.items(), key=str)), repr(rest)
    if key not in _found:
        _found[key] = _try(name, make, settings, *rest)
    return _found[key]


def remember_trials(module: str, patch: pytest.MonkeyPatch) -> None:
    """Makes trials once from now on, unless the module of tests is about them.

    Args:
        module: Its name.
        patch: Undoes it.
    """
    name = module.rpartition(".")[2]
    if not any(word in name for word in _ABOUT_TRIALS):
        patch.setattr(tried, "check_separable", try_once)
