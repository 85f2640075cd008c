"""Which functions exchange tensors between processes, and how they come to know of stand-ins.

Up to torch 2.12 most of them hand their arguments to C++ as they are, without asking the class of a
tensor (``__torch_function__``): there a stand-in has no bytes. Later versions ask one argument of
those that take several (of ``all_gather`` what is sent, not where it goes to). All of these are
wrapped from the import of tiermem on. ``isend`` and ``irecv`` are not: ``P2POp`` knows them by
identity, and programs may have imported them before. Those for objects pickle stand-ins by
themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType
from typing import Any

Exchange = Callable[[Callable[..., Any], Any, Any], Any]
_BY_IDENTITY = ("isend", "irecv")
_TAKES = ("tensor", "input", "output", "gather_list", "scatter_list")


def collectives(module: Any) -> set[Callable[..., Any]]:
    """Returns the functions of ``torch.distributed.distributed_c10d``, none where there is none."""
    found = getattr(module, "__dict__", {}).values()
    return {function for function in found if type(function) is FunctionType}


def tell(
    module: Any, package: Any, concerned: Callable[[Any], bool], exchange: Exchange
) -> list[str]:
    """Has functions that do not ask a tensor's class tell of stand-ins.

    Args:
        module: ``torch.distributed.distributed_c10d``, in which they are replaced.
        package: Another one that has them by the same names (``torch.distributed``).
        concerned: Whether a value is a stand-in.
        exchange: Called in place of a function that is given one: with it and its arguments.

    Returns:
        The names of those that were replaced.
    """
    told = []
    for name in getattr(module, "__all__", ()):
        function = getattr(module, name, None)
        if type(function) is not FunctionType or name in _BY_IDENTITY or "object" in name:
            continue
        if not _is_mute(function):
            continue
        telling = _telling(function, concerned, exchange)
        for place in (module, package):
            if getattr(place, name, None) is function:
                setattr(place, name, telling)
        told.append(name)
    return told


def _is_mute(function: Callable[..., Any]) -> bool:
    """Whether a function takes tensors some of whose classes it does not ask."""
    names = inspect.unwrap(function).__code__.co_names
    takes = [name for name in inspect.signature(function).parameters if _is_tensors(name)]
    return len(takes) > ("has_torch_function" in names)


def _is_tensors(name: str) -> bool:
    return any(kind in name for kind in _TAKES)


def _telling(
    function: Callable[..., Any], concerned: Callable[[Any], bool], exchange: Exchange
) -> Callable[..., Any]:
    # nested, for the compiler not to be kept from following it to what it stands before
    def has_any(values: Iterable[Any]) -> bool:
        return any(
            has_any(value) if type(value) in (list, tuple) else concerned(value) for value in values
        )

    @wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if has_any((*args, *kwargs.values())):
            return exchange(function, args, kwargs)
        return function(*args, **kwargs)

    return telling
