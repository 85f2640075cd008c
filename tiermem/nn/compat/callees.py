"""What Python code may call: found by the names that it uses, and their values.

The values of names are recorded, to detect that a name later refers to other code.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice, repeat
from operator import is_
from typing import Any

from torch import nn
from torch.autograd import Function

_BY_TEXT = frozenset({"getattr", "setattr", "attrgetter", "methodcaller", "__getattribute__"})
_WRAPPERS = 5
"""How many decorators around a function are unwrapped."""
_HELD = 3
"""How deep attributes of objects, and their attributes, are inspected."""
_MOST = 64
"""How many elements of a list or dictionary are inspected."""
_LISTS = (list, tuple, deque)
_TRUSTED = ("torch", "tiermem")
_WRITES = "torch.ao."
_MADE = frozenset({"__init__", "__call__"})
"""Methods called without a name when code creates an object and calls it."""
OPERATORS = frozenset(
    f"__{way}{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
        *("lshift", "rshift", "and", "xor", "or"),
    )
    for way in ("", "r", "i")
) | {
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__", "__bool__"),
    *("__iter__", "__next__", "__enter__", "__exit__", "__neg__", "__pos__", "__invert__"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
}
"""Methods that code calls without a name, of any object."""
_IMPORT = dis.opmap["IMPORT_NAME"]
_Found = tuple[Mapping[str, Any], str, Any, Any]
"""The owner of a name, the name, its value, and the code of that."""


class Places:
    """Where an inspection of code found functions: names, and their values.

    Attributes:
        known: What is known of classes that only their objects may keep alive.
    """

    __slots__ = ("_found", "_lists", "_side_by_side", "known")

    def __init__(self) -> None:
        """Starts empty."""
        self.known: Known = {}
        self._found: dict[tuple[int, str], _Found] = {}
        self._lists: dict[int, tuple[list[Any], int]] = {}
        self._side_by_side: _SideBySide | None = None

    def note(self, owner: type | types.ModuleType | dict[str, Any], name: str) -> None:
        """Notes the value of a name, even if it has none.

        Args:
            owner: The class or module whose attribute it is, or the dictionary that has it.
            name: The name.
        """
        names = owner if isinstance(owner, dict) else vars(owner)
        value = names.get(name)
        self._found[id(owner), name] = names, name, value, getattr(value, "__code__", None)
        self._side_by_side = None

    def note_list(self, values: list[Any]) -> None:
        """Notes the length of a list into which functions may be put."""
        self._lists[id(values)] = values, len(values)

    def include(self, others: Places) -> None:
        """Adds the places of another inspection."""
        self._found |= others._found
        self._lists |= others._lists
        self._side_by_side = None

    def changed(self) -> bool:
        """Whether a name now refers to other code; one without a value, to anything."""
        if self._side_by_side is None:
            self._side_by_side = _SideBySide(self._found.values())
        if not self._side_by_side.is_as_before() and self._has_other_code():
            return True
        return any(
            len(values) != size and any(callable(v) and is_called(v) for v in values[:_MOST])
            for values, size in self._lists.values()
        )

    def _has_other_code(self) -> bool:
        for names, name, value, code in self._found.values():
            now = names.get(name)
            if now is value:
                if code is not None and getattr(value, "__code__", None) is not code:
                    return True
            elif value is not None or (callable(now) and is_called(now)):
                return True
        return False


class _SideBySide:
    """Names and their values, in lists: hundreds are checked in each pass."""

    __slots__ = ("_coded", "_codes", "_kinds")

    def __init__(self, found: Iterable[_Found]) -> None:
        found = list(found)
        self._kinds: list[tuple[Callable[..., Any], list[Any], list[Any], list[Any]]] = []
        kind: Any
        for kind in (dict, types.MappingProxyType):  # of modules and of classes
            rows = [row for row in found if isinstance(row[0], kind)]
            names, keys, values = ([row[place] for row in rows] for place in range(3))
            self._kinds.append((kind.get, names, keys, values))
        self._coded = [value for _, _, value, code in found if code is not None]
        self._codes = [code for _, _, _, code in found if code is not None]

    def is_as_before(self) -> bool:
        """Whether each name has the same value as before, with the same code."""
        for get, names, keys, values in self._kinds:
            if not all(map(is_, map(get, names, keys), values)):
                return False
        codes = map(getattr, self._coded, repeat("__code__"), repeat(None))
        return all(map(is_, codes, self._codes))


Known = dict[tuple[type, bool], tuple[bool, Sequence[frozenset[str]], Places]]
"""Whether code of a class may write, the names that each function of it uses, and where."""


def is_trusted(thing: Any) -> bool:
    """Whether a class or a function is torch's or tiermem's, whose writes are all counted.

    Modules of ``torch.ao`` are excluded (fake quantization with learned scales).
    """
    module = getattr(thing, "__module__", None) or ""
    return module.partition(".")[0] in _TRUSTED and not module.startswith(_WRITES)


def callees_of(
    function: types.FunctionType, names: set[str], kind: type, places: Places
) -> Iterator[Any]:
    """Yields what a function may call: methods of the class, globals, its closure."""
    imports = _IMPORT in function.__code__.co_code[::2]
    for name in sorted(names):
        method = getattr(kind, name, None)
        if method is not None and not is_trusted(method):
            for base in kind.__mro__:  # one further down may get it later
                if not _passed_over(base):
                    places.note(base, name)
            yield method
            if isinstance(method, property):
                yield from _parts(method)
            yield from of_object(method, names, places)
            if "super" in names:
                yield from (vars(b)[name] for b in kind.__mro__[1:] if name in vars(b))
        elif method is None and issubclass(kind, nn.Module):
            for base in kind.__mro__:
                if name in vars(base) and not is_trusted(base):
                    places.note(base, name)
        value = function.__globals__.get(name)
        if value is None and imports:
            value = _imported(function, name)
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, names, places)
        elif is_called(value):
            places.note(function.__globals__, name)
            yield value
        elif value is not None:
            yield from of_object(value, names, places)
        elif name in function.__globals__:  # it may be assigned later
            places.note(function.__globals__, name)
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            held.append(cell.cell_contents)
    for value in held:
        yield value
        yield from of_object(value, names, places)


def _imported(function: types.FunctionType, name: str) -> types.ModuleType | None:
    """Returns the module of a name that a function imports itself, if it has been imported."""
    package = function.__globals__.get("__package__") or ""
    while package:  # it may have been imported from a package further up
        if (found := sys.modules.get(f"{package}.{name}")) is not None:
            return found
        package = package.rpartition(".")[0]
    return sys.modules.get(name)


def of_object(value: Any, names: Set[str], places: Places, depth: int = _HELD) -> Iterator[Any]:
    """Yields what code may call of an object.

    Args:
        value: The object.
        names: The names that the code uses.
        places: Receives the places on which the result depends.
        depth: How much deeper attributes and elements are inspected.

    Yields:
        Elements of a list or dictionary, methods, functions that an object was given, and the
        same of its attributes.
    """
    kind = type(value)
    if kind in _LISTS or isinstance(value, dict):
        if kind is list:
            places.note_list(value)
        elif kind is dict:
            for name in [key for key in islice(value, _MOST) if is_called(value[key])]:
                places.note(value, name)
        inside = dict.values(value) if isinstance(value, dict) else value
        for one in list(islice(inside, _MOST)):
            if is_called(one):
                yield one
            if depth:
                yield from of_object(one, names, places, depth - 1)
        if kind in _LISTS or kind is dict:
            return
    if isinstance(value, type):
        yield from _of_class(value, value, names)
        return
    if isinstance(value, nn.Module) or _passed_over(kind):
        return
    yield from _of_class(kind, value, names)
    given = getattr(value, "__dict__", {})
    for name in sorted(names):
        there = getattr(kind, name, kind)
        if name in given:
            one = given[name]
        elif isinstance(there, types.MemberDescriptorType):  # of `__slots__`
            one = getattr(value, name, None)
        else:
            if there is None:  # the class has a slot for it
                places.note(given, name)
            continue
        if name in given and (one is None or is_called(one)):
            places.note(given, name)
        if is_called(one):
            yield one
        if depth:
            yield from of_object(one, names, places, depth - 1)


def _of_class(kind: type, own: Any, names: Set[str]) -> Iterator[Any]:
    """Yields methods of a class that code uses by name, or calls without a name.

    Args:
        kind: The class.
        own: An object of it; the class itself if the code may create some.
        names: Names of the code.
    """
    of_modules = issubclass(kind, nn.Module)
    for base in () if _passed_over(kind) else kind.__mro__:
        for name, method in [] if _passed_over(base) else sorted(vars(base).items()):
            special = not of_modules and (name in OPERATORS or (name in _MADE and own is kind))
            applied = name == "forward" and "apply" in names and issubclass(kind, Function)
            if not (name in names or special or applied):
                continue
            for thing in _parts(method):
                # a bound method shows whose other methods it calls; a module's is called with the
                # module
                yield thing if of_modules else types.MethodType(thing, own)


def _parts(method: Any) -> list[types.FunctionType]:
    """Returns the functions of an attribute of a class; a property may have two."""
    if isinstance(method, property):
        return [f for f in (method.fget, method.fset) if isinstance(f, types.FunctionType)]
    found = getattr(method, "__func__", method)  # of a static or a class method
    return [found] if isinstance(found, types.FunctionType) else []


def _passed_over(kind: type) -> bool:
    """Whether a class is torch's, tiermem's or Python's own."""
    package = (getattr(kind, "__module__", None) or "").partition(".")[0]
    return package in _TRUSTED or package in sys.stdlib_module_names


def _of_module(
    module: types.ModuleType, names: set[str], places: Places, depth: int = 2
) -> Iterator[Any]:
    """Yields what code may call by the name of a module (``helpers.renorm(weight)``)."""
    package = module.__name__.partition(".")[0]
    if package in _TRUSTED or package in sys.stdlib_module_names:
        return
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, names, places, depth - 1) if depth else ()
        elif value is None or is_called(value):
            places.note(module, name)
            yield from () if value is None else (value,)
        else:
            yield from of_object(value, names, places)


def owner_of(thing: Any) -> type | None:
    """Returns the class whose methods a bound method, or a callable object, may call."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, types.MethodType):
        own = thing.__self__
        return own if isinstance(own, type) else type(own)
    return type(thing) if _has_call(thing) else None


def functions_of(thing: Any) -> Iterator[types.FunctionType]:
    """Yields the function behind an object, and those wrapped by its decorators."""
    for _ in range(_WRAPPERS):
        function = _function(thing)
        if function is None:
            return
        yield function
        thing = function.__dict__.get("__wrapped__")


def _function(thing: Any) -> types.FunctionType | None:
    """Returns the Python function behind a method, partial, property or callable object."""
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


def is_called(value: Any) -> bool:
    """Whether a module's attribute, or a global, is callable Python code."""
    return isinstance(value, types.FunctionType | types.MethodType) or _has_call(value)


def _has_call(thing: Any) -> bool:
    """Whether an object's class has a ``__call__`` in Python that is not torch's."""
    call = next((vars(k)["__call__"] for k in type(thing).__mro__ if "__call__" in vars(k)), None)
    return isinstance(call, types.FunctionType) and not is_trusted(call)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names that code uses, including the code inside it."""
    yield from code.co_names
    if not _BY_TEXT.isdisjoint(code.co_names):
        yield from (text for text in code.co_consts if isinstance(text, str))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
