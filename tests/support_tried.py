"""Optimizer classes of torch are tried once in a test process: a trial is half of what one costs.

A trial is a function of the class, its settings, and what the parameters are, and those of
torch's own classes do not change. So is a look at the state that they keep. The first of each kind
is made, as are all of other classes, of methods, and in the tests that are about trials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tiermem.optim import tried
from tiermem.optim.rules.probe import StateProbe

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
    cls = _class_made_by(make)
    if rest[-1] is not None or not _is_torchs(cls):
        return _try(name, make, settings, *rest)
    key = cls, _text_of(settings), repr(rest)
    if key not in _found:
        _found[key] = _try(name, make, settings, *rest)
    return _found[key]


@contextmanager
def trials_apart() -> Iterator[None]:
    """Remembers nothing of before inside ``with``, and nothing of that afterwards.

    For kernels that are replaced: a trial finds out whether torch counts what they write.
    """
    before = dict(_found)
    _found.clear()
    try:
        yield
    finally:
        _found.clear()
        _found.update(before)


def _class_made_by(make: Any) -> Any:
    return getattr(getattr(make, "__self__", make), "cls", make)


def _is_torchs(cls: Any) -> bool:
    return str(cls.__module__).startswith("torch.optim.")


def _text_of(settings: dict[str, Any]) -> str:
    return repr(sorted(settings.items(), key=str))


class _LooksOnce(StateProbe):
    """Looks at what a class of torch's keeps once for the same settings and parameters."""

    def _remembered(self, settings: dict[str, Any], of_what: Any, find: Any) -> Any:
        cls = _class_made_by(self._make)
        if not _is_torchs(cls):
            return find()
        key = cls, _text_of(settings), self._devices, self.sparse, of_what
        if key not in _found:
            _found[key] = find()
        return _found[key]

    def _try_tiny(
        self, param: torch.Tensor, settings: dict[str, Any], look: Any, *, or_else: Any
    ) -> Any:
        how = (look.func.__name__, look.args) if isinstance(look, partial) else look.__name__
        try_it = partial(super()._try_tiny, param, settings, look, or_else=or_else)
        return self._remembered(settings, (how, param.dim(), param.dtype), try_it)

    def _learn(self, param: torch.Tensor, stride: tuple[int, ...], settings: dict[str, Any]) -> Any:
        of_what = tuple(param.shape), stride, param.dtype
        return self._remembered(settings, of_what, partial(super()._learn, param, stride, settings))


def remember_trials(module: str, patch: pytest.MonkeyPatch) -> None:
    """Makes trials once from now on, unless the module of tests is about them.

    Args:
        module: Its name.
        patch: Undoes it.
    """
    name = module.rpartition(".")[2]
    if not any(word in name for word in _ABOUT_TRIALS):
        patch.setattr(tried, "check_separable", try_once)
        patch.setattr(tried, "StateProbe", _LooksOnce)
