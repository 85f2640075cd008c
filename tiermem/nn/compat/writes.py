"""Finds modules whose code may write weights in a way that torch does not count.

A parameter's version counter sees every write by a torch operation, save one
made through ``weight.data``, through numpy or through an address. Where the code
that a module's call can reach speaks of any of these, the bytes of its block are
compared with their copy at home after every use. Where it does not, that costs
nothing. Reading the code is a hint only: it looks for names, never for classes.
"""

from __future__ import annotations

import functools
import sys
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
_TRUSTED = ("torch", "tiermem")
_SETUP = ("__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr")
_MERGES = ("merge", "unmerge")
_known: dict[tuple[type, bool], tuple[bool, frozenset[str]]] = {}


def may_write_uncounted(module: nn.Module, *, merging: bool = True) -> bool:
    """Whether a call of ``module`` may write its weights without torch counting it.

    Args:
        module: The module.
        merging: Whether what it does to adapters merged into its weights counts.
    """
    kind = type(module)
    passed = _SETUP if merging else (*_SETUP, *_MERGES)
    if (kind, merging) not in _known:
        codes = set[types.CodeType]()
        may = not _trusted(kind) and _reaches(_methods(kind), kind, codes, _DEPTH, passed)
        names = frozenset(name for code in codes for name in _names(code))
        _known[kind, merging] = may, names.difference(passed)
    may, names = _known[kind, merging]
    own = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    own += [value for value in vars(module).values() if _is_called(value)]
    return may or any(hook_may(module, thing, passed) for thing in (*own, *_beside(module, names)))


def _beside(module: nn.Module, names: frozenset[str]) -> Iterator[Any]:
    """Yields what a module's code names of the modules inside, other than their calls."""
    for name, child in module._modules.items() if names else ():
        if child is None or name not in names:
            continue
        for inner in child.children() if _trusted(type(child)) else (child,):  # of a container
            for called in names & vars(type(inner)).keys() - {"forward", "__call__"}:
                method = vars(type(inner))[called]
                if isinstance(method, types.FunctionType):
                    yield method.__get__(inner)


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
    functions: Iterator[Any],
    kind: type,
    seen: set[types.CodeType],
    depth: int,
    passed: Sequence[str],
) -> bool:
    """Whether code reached from ``functions`` speaks of a way around the version counter.

    What is called by one of the names ``passed`` is not looked at.
    """
    for thing in functions:
        owner = _owner(thing) or kind
        for function in _functions(thing):
            if function.__code__ in seen or _trusted(function):
                continue
            seen.add(function.__code__)
            names = set(_names(function.__code__))
            if names & _UNCOUNTED:
                return True
            callees = _callees(function, names.difference(passed), owner)
            if depth and _reaches(callees, owner, seen, depth - 1, passed):
                return True
    return False


def _owner(thing: Any) -> type | None:
    """Returns the class whose methods a bound method, or an object that is called, may call."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, types.MethodType):
        own = thing.__self__
        return own if isinstance(own, type) else type(own)
    return type(thing) if _has_call(thing) else None


def _functions(thing: Any) -> Iterator[types.FunctionType]:
    """Yields the function behind a thing, and those that decorators have put it around."""
    for _ in range(_DEPTH):
        function = _function(thing)
        if function is None:
            return
        yield function
        thing = function.__dict__.get("__wrapped__")


def _function(thing: Any) -> types.FunctionType | None:
    """Returns the Python function behind a method, partial, property or object that is called."""
    for _ in range(8):
        if isinstance(thing, types.FunctionType):
            return thing
        thing = (
            getattr(thing, "__func__", None)
            or getattr(thing, "func", None)
            or getattr(thing, "fget", None)
            or getattr(thing, "__wrapped__", None)  # of a cache
            or (type(thing).__call__ if _has_call(thing) else None)
        )
        if thing is None:
            return None
    return None


def _is_called(value: Any) -> bool:
    """Whether a module's attribute, or a global, is Python code that may be called."""
    return isinstance(value, types.FunctionType | types.MethodType) or _has_call(value)


def _has_call(thing: Any) -> bool:
    """Whether a thing is an object of a class of Python's with ``__call__``, not torch's."""
    call = next((vars(k)["__call__"] for k in type(thing).__mro__ if "__call__" in vars(k)), None)
    return isinstance(call, types.FunctionType) and not _trusted(call)


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
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, names)
        elif _is_called(value):
            yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet


def _of_module(module: types.ModuleType, names: set[str], depth: int = 2) -> Iterator[Any]:
    """Yields what code may call by the name of a module (``helpers.renorm(weight)``)."""
    package = module.__name__.partition(".")[0]
    if package in _TRUSTED or package in sys.stdlib_module_names:
        return
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, names, depth - 1) if depth else ()
        elif _is_called(value):
            yield value
