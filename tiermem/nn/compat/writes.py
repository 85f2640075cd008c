"""Finds modules whose code may write weights in a way that torch does not count.

A parameter's version counter sees every write by a torch operation, save one
made through ``weight.data``, through numpy or through an address. Where the code
that a module's call can reach speaks of any of these, the bytes of its block are
compared with their copy at home after every use. Where it does not, that costs
nothing. Reading the code is a hint only: it looks for names, never for classes.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_UNCOUNTED = frozenset(
    {
        "data",
        "numpy",
        "data_ptr",
        "untyped_storage",
        "storage",
        "__dlpack__",
        "to_dlpack",
        "from_numpy",
    }
)
_DEPTH = 5
_TRUSTED = ("torch",)
_SETUP = ("__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr")
_MERGES = ("merge", "unmerge")
_known: dict[tuple[type, bool], bool] = {}


def may_write_uncounted(module: nn.Module, *, merging: bool = True) -> bool:
    """Whether a call of ``module`` may write its weights without torch counting it.

    Args:
        module: The module.
        merging: Whether what it does to adapters merged into its weights counts.
    """
    kind = type(module)
    passed = _SETUP if merging else (*_SETUP, *_MERGES)
    if (kind, merging) not in _known:
        known = not _trusted(kind) and _reaches(_methods(kind), kind, set(), _DEPTH, passed)
        _known[kind, merging] = known
    own = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    own += [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    return _known[kind, merging] or any(hook_may(module, hook, passed) for hook in own)


def hook_may(module: nn.Module, hook: Any, passed: Sequence[str] = _SETUP) -> bool:
    """Whether a forward hook of ``module`` may write weights without torch counting it.

    Args:
        module: The module.
        hook: The hook, or a function that takes the place of a method.
        passed: Names of what is not looked at.
    """
    return _reaches(iter([hook]), type(module), set(), _DEPTH, passed)


def only_unmerges(module: nn.Module) -> bool:
    """Whether such a write can only be one that takes merged adapters out again.

    peft's layers list in ``merged_adapters`` what is merged; while it is empty they write nothing.
    """
    merged = getattr(module, "merged_adapters", None)
    return isinstance(merged, list) and not may_write_uncounted(module, merging=False)


def _trusted(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or ""
    return module.partition(".")[0] in _TRUSTED


def _methods(kind: type) -> Iterator[Any]:
    """Yields the methods that classes outside torch define, other than those that set up."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        if not _trusted(base):
            yield from (f for name, f in vars(base).items() if name == "forward")


def _reaches(
    functions: Iterator[Any], kind: type, seen: set[Any], depth: int, passed: Sequence[str]
) -> bool:
    """Whether code reached from ``functions`` speaks of a way around the version counter.

    What is called by one of the names ``passed`` is not looked at.
    """
    for thing in functions:
        function = _function(thing)
        if function is None or function.__code__ in seen or _trusted(function):
            continue
        seen.add(function.__code__)
        names = set(_names(function.__code__))
        if names & _UNCOUNTED:
            return True
        callees = _callees(function, names.difference(passed), kind)
        if depth and _reaches(callees, kind, seen, depth - 1, passed):
            return True
    return False


def _function(thing: Any) -> types.FunctionType | None:
    """Returns the Python function behind a method, partial, decorator or static method."""
    for _ in range(8):
        if isinstance(thing, types.FunctionType):
            return getattr(thing, "__wrapped__", thing)
        thing = (
            getattr(thing, "__func__", None)
            or getattr(thing, "func", None)
            or getattr(thing, "fget", None)
        )
    return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _callees(function: types.FunctionType, names: set[str], kind: type) -> Iterator[Any]:
    """Yields what a function may call: methods of the class, globals, what it closes over."""
    for name in sorted(names):
        method = getattr(kind, name, None)
        if method is not None and not _trusted(method):
            yield method
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet
