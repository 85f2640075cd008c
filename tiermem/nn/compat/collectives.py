"""Functions that exchange tensors between processes, and how they are made aware of stand-ins.

Up to torch 2.12 most of them pass their arguments to C++ directly, without calling the class of a
tensor (``__torch_function__``): there a stand-in has no bytes. Later versions check one argument of
those that take several (for ``all_gather`` what is sent, not the target). All of these are
wrapped when tiermem is imported. ``isend`` and ``irecv`` are not: ``P2POp`` compares them by
identity, and programs may have imported them before. The functions for objects pickle stand-ins
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
    """Returns the functions of ``torch.distributed.distributed_c10d``, none without that."""
    found = getattr(module, "__dict__", {}).values()
    return {function for function in found if type(function) is FunctionType}


def tell(
    module: Any, package: Any, concerned: Callable[[Any], bool], exchange: Exchange
) -> list[str]:
    """Wraps functions that do not call a tensor's class, so that stand-ins are noticed.

    Args:
        module: ``torch.distributed.distributed_c10d``, in which they are replaced.
        package: Another module that has them under the same names (``torch.distributed``).
        concerned: Whether a value is a stand-in.
        exchange: Called instead of a function that gets one: with the function and its arguments.

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
    """Whether a function takes tensors without calling the class of each."""
    names = inspect.unwrap(function).__code__.co_names
    takes = [name for name in inspect.signature(function).parameters if _is_tensors(name)]
    return len(takes) > ("has_torch_function" in names)


def _is_tensors(name: str) -> bool:
    return any(kind in name for kind in _TAKES)


def _telling(
    function: Callable[..., Any], concerned: Callable[[Any], bool], exchange: Exchange
) -> Callable[..., Any]:
    # nested, so that the compiler can still trace the wrapped function
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
