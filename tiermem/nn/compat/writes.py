"""Finds modules whose code may write weights in a way that torch does not count.

A parameter's version counter counts every write by a torch operation, except one
made through ``weight.data``, through numpy or through an address. If the code
that a module's call can reach uses any of these, the bytes of its block are
compared with their copy at home after every use. Otherwise that costs
nothing. Reading the code is only a heuristic: it looks for names, never for classes.
What code a call can reach is found by :mod:`tiermem.nn.compat.callees`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from tiermem.nn.compat.callees import (
    OPERATORS,
    Known,
    Places,
    callees_of,
    functions_of,
    is_called,
    is_trusted,
    names_in,
    of_object,
    owner_of,
)

_UNCOUNTED = frozenset(
    {
        "data",
        "numpy",
        "data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "__dlpack__",
        "to_dlpack",
        "from_dlpack",
        "__array__",
        "__array_interface__",
        "__cuda_array_interface__",
        "as_cuda_array",
        "asarray",
        "asanyarray",
        "ascontiguousarray",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "from_numpy",
        "_unsafe_preserve_version_counter",
    }
)
_DEPTH = 5
_SETUP = ("__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr")
_MERGES = ("merge", "unmerge")
_CALLS = frozenset({"forward", "_call_impl"}) | OPERATORS


class _Look:
    """One inspection of code: its extent, and the places it depends on."""

    __slots__ = ("codes", "passed", "places")

    def __init__(self, passed: Sequence[str]) -> None:
        self.codes = set[types.CodeType]()
        self.passed = passed
        self.places = Places()


_known: Known = {}
"""For classes that exist under their names."""


def may_write_uncounted(
    module: nn.Module, *, merging: bool = True, places: Places | None = None
) -> bool:
    """Whether a call of ``module`` may write its weights without torch counting it.

    Args:
        module: The module.
        merging: Whether adapters that it merges into its weights count.
        places: Receives the places on which the result depends.
    """
    kind = type(module)
    passed = _SETUP if merging else (*_SETUP, *_MERGES)
    knows = _known if _has_name(kind) else places.known if places is not None else {}
    known = knows.get((kind, merging))
    if known is None or known[2].changed():
        look = _Look(passed)
        may = not is_trusted(kind) and _reaches(_methods(kind, look), kind, look, _DEPTH)
        spoken = [frozenset(names_in(code)).difference(passed) for code in look.codes]
        known = knows[kind, merging] = may, spoken, look.places
    may, names_of, found = known
    names = frozenset[str]().union(*names_of)
    own = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    called = [name for name, value in vars(module).items() if is_called(value)]
    own += [vars(module)[name] for name in called]
    look = _Look(passed)
    for name in names & vars(module).keys():
        beside = [others for others in names_of if name in others]
        own += of_object(vars(module)[name], frozenset[str]().union(*beside), look.places)
    for name in (*called, *(n for n in names & vars(module).keys() if vars(module)[n] is None)):
        look.places.note(vars(module), name)
    if places is not None:
        places.include(found)
    may = may or any(
        hook_may(module, thing, passed, look.places)
        for thing in (*own, *_beside(module, names, look))
    )
    if places is not None:
        places.include(look.places)
    return may


def _beside(module: nn.Module, names: frozenset[str], look: _Look) -> Iterator[Any]:
    """Yields what a module's code uses of the modules inside, apart from their calls."""
    for name, child in module._modules.items() if names else ():
        if child is None or name not in names:
            continue
        for inner in child.children() if is_trusted(type(child)) else (child,):  # of a container
            for called in names & vars(type(inner)).keys() - {"forward", "__call__"}:
                method = vars(type(inner))[called]
                if isinstance(method, types.FunctionType):
                    look.places.note(type(inner), called)
                    yield method.__get__(inner)


def hook_may(
    module: nn.Module,
    hook: Any,
    passed: Sequence[str] = _SETUP,
    places: Places | None = None,
) -> bool:
    """Whether a forward hook of ``module`` may write weights without torch counting it.

    Args:
        module: The module.
        hook: The hook, or a function that replaces a method.
        passed: Names that are not inspected.
        places: Receives the places on which the result depends.
    """
    look = _Look(passed)
    may = _reaches(iter([hook]), type(module), look, _DEPTH)
    if places is not None:
        places.include(look.places)
    return may


def only_unmerges(module: nn.Module) -> bool:
    """Whether such a write can only be one that unmerges adapters.

    peft's layers list merged adapters in ``merged_adapters``; while it is empty they write nothing.
    """
    merged = getattr(module, "merged_adapters", None)
    return isinstance(merged, list) and not may_write_uncounted(module, merging=False)


def _has_name(kind: type) -> bool:
    """Whether a class exists under its name, and so as long as the program.

    Another one, created in a function or by torch for one parametrized module, may refer to that
    module or a whole model in closures of its functions.
    """
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _methods(kind: type, look: _Look) -> Iterator[Any]:
    """Yields the methods that classes outside torch define, except those for construction."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        if not is_trusted(base):
            look.places.note(base, "forward")
            yield from (vars(base)[name] for name in _CALLS & vars(base).keys())


def _reaches(functions: Iterator[Any], kind: type, look: _Look, depth: int) -> bool:
    """Whether code reached from ``functions`` uses a way around the version counter."""
    for thing in functions:
        owner = owner_of(thing) or kind
        for function in functions_of(thing):
            if function.__code__ in look.codes or is_trusted(function):
                continue
            look.codes.add(function.__code__)
            names = set(names_in(function.__code__))
            if names & _UNCOUNTED or ("array" in names and _has_option(function.__code__, "copy")):
                return True
            names.difference_update(look.passed)
            callees = chain(
                callees_of(function, names, owner, look.places),
                of_object(getattr(thing, "__self__", None), names, look.places),
            )
            if depth and _reaches(callees, owner, look, depth - 1):
                return True
    return False


def _has_option(code: types.CodeType, option: str) -> bool:
    """Whether code passes an argument of this name (``np.array(weight, copy=None)``)."""
    return any(
        option in constant
        if isinstance(constant, tuple)
        else isinstance(constant, types.CodeType) and _has_option(constant, option)
        for constant in code.co_consts
    )
